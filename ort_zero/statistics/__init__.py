"""Find where two runs begin to differ: collect, merge and compare statistics of activations and gradients.

:mod:`.collect` measures tensors and writes a run's files, :mod:`.files` reads the files, :mod:`.compare` names the
first divergence and draws the report. Reading and comparing need neither torch nor onnxruntime.
"""

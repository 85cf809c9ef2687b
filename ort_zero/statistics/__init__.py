"""Finds where two runs begin to differ: statistics of activations and gradients, merged and compared.

:mod:`.collect` measures and records, :mod:`.storage` writes and reads, :mod:`.compare` names the first divergence and
draws the report. Reading and comparing need neither torch nor onnxruntime.
"""

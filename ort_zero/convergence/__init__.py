"""Finds where two runs begin to differ: statistics of activations and gradients, merged and compared.

:mod:`.subscriber` collects, :mod:`.storage` writes and reads, :mod:`.compare` names the first divergence,
:mod:`.report` draws it. Reading and comparing need neither torch nor onnxruntime.
"""

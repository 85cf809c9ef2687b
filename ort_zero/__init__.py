"""ONNX Runtime, DeepSpeed ZeRO and today's PyTorch together.

Put an ``"ort_zero"`` section into the DeepSpeed JSON and start the script as before. From Python:

* :func:`enable`, :func:`disable`: patch DeepSpeed, put the very objects back.
* :func:`status`: what is patched, which graph runs, and why.

Importing this package imports none of torch, deepspeed, onnxruntime, onnx.
"""

from ort_zero.plugin.lifecycle import disable, enable, status

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "status"]

"""Train DeepSpeed ZeRO models in ONNX Runtime, with current versions of PyTorch.

Put an ``"ort_zero"`` section into the DeepSpeed JSON and start the script as before. From Python:

* :func:`enable`, :func:`disable`: patch DeepSpeed, restore the original objects.
* :func:`wrap`, :func:`unwrap`: run a module in ONNX Runtime without DeepSpeed, and take it back; a plain
  ``ORTModule(model)`` works too.
* :func:`status`: report the patches, the running graphs, and the reasons for fallbacks.

Importing this package imports none of torch, deepspeed, onnxruntime, onnx.
"""

from typing import TYPE_CHECKING

from ort_zero.plugin.lifecycle import disable, enable, status
from ort_zero.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from ort_zero.plugin.wrap import unwrap, wrap
else:
    __getattr__ = lazy_attributes(
        __name__,
        {
            "unwrap": "ort_zero.plugin.wrap",
            "wrap": "ort_zero.plugin.wrap",
        },
    )

__version__ = "0.1.0"
__all__ = ["__version__", "disable", "enable", "status", "unwrap", "wrap"]

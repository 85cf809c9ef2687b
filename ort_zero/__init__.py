"""Train DeepSpeed ZeRO models in ONNX Runtime, with current versions of PyTorch.

Put an ``"ort_zero"`` section into the DeepSpeed JSON and start the script as before. From Python:

* :func:`enable`, :func:`disable`: patch DeepSpeed, restore the original objects.
* :func:`wrap`, :func:`unwrap`: run a module in ONNX Runtime without DeepSpeed, and take it back; a plain
  ``ORTModule(model)`` works too.
* :func:`status`: report the patches, the running graphs, and the reasons for fallbacks.
* :func:`add_symbolic`, :func:`run_in_torch`: choose how an operator is put into the graph.

Importing this package imports none of torch, deepspeed, onnxruntime, onnx.
"""

from typing import TYPE_CHECKING

from ort_zero.plugin.lifecycle import disable, enable, status
from ort_zero.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from ort_zero.ortmodule.runtime.operators.fallback_table import run_in_torch
    from ort_zero.ortmodule.runtime.operators.symbolics import add_symbolic
    from ort_zero.plugin.wrap import unwrap, wrap
else:
    # the tables of operators import torch
    __getattr__ = lazy_attributes(
        __name__,
        {
            "add_symbolic": "ort_zero.ortmodule.runtime.operators.symbolics",
            "run_in_torch": "ort_zero.ortmodule.runtime.operators.fallback_table",
            "unwrap": "ort_zero.plugin.wrap",
            "wrap": "ort_zero.plugin.wrap",
        },
    )

__version__ = "0.1.0"
__all__ = ["__version__", "add_symbolic", "disable", "enable", "run_in_torch", "status", "unwrap", "wrap"]

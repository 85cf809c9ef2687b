"""ONNX Runtime, DeepSpeed ZeRO and today's PyTorch together.

Put an ``"ort_zero"`` section into the DeepSpeed JSON and start the script as before. From Python:

* :func:`enable`, :func:`disable`: patch DeepSpeed, put the very objects back.
* :func:`wrap`: run a module in ONNX Runtime without DeepSpeed; a plain ``ORTModule(model)`` works too.
* :func:`status`: what is patched, which graph runs, and why.
* :func:`add_symbolic`, :func:`run_in_torch`: how an operator gets into the graph.

Importing this package imports none of torch, deepspeed, onnxruntime, onnx.
"""

from typing import TYPE_CHECKING

from ort_zero.plugin.lifecycle import disable, enable, status
from ort_zero.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from ort_zero.ortmodule.runtime.operators.fallback_table import run_in_torch
    from ort_zero.ortmodule.runtime.operators.symbolics import add_symbolic
    from ort_zero.plugin.wrap import wrap
else:
    # the tables of operators import torch
    __getattr__ = lazy_attributes(
        __name__,
        {
            "add_symbolic": "ort_zero.ortmodule.runtime.operators.symbolics",
            "run_in_torch": "ort_zero.ortmodule.runtime.operators.fallback_table",
            "wrap": "ort_zero.plugin.wrap",
        },
    )

__version__ = "0.1.0"
__all__ = ["__version__", "add_symbolic", "disable", "enable", "run_in_torch", "status", "wrap"]

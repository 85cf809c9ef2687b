"""Everything private of onnxruntime-training 1.19.2's ORTModule.

:mod:`.loading` imports it on today's torch; :mod:`.wrapping` makes one of a user's module; :mod:`.patches` holds the
table of patches that give its forward calls to a :class:`ModelRunner`; :mod:`.manager` is what a runner sees of an
execution manager, :mod:`.sessions` what runs a graph; :mod:`.functions` registers operators. Nothing under
site-packages is edited.
"""

from ort_zero.ortmodule.compat.ortmodule.functions import (
    contiguous,
    onnx_type,
    register_aten_gradient,
    register_function,
    with_all_gradients,
)
from ort_zero.ortmodule.compat.ortmodule.loading import import_ortmodule, is_ortmodule, run_aten_nodes
from ort_zero.ortmodule.compat.ortmodule.manager import Manager
from ort_zero.ortmodule.compat.ortmodule.patches import patches, symbolic_patches
from ort_zero.ortmodule.compat.ortmodule.runner import ModelRunner, running
from ort_zero.ortmodule.compat.ortmodule.sessions import GraphInfo, Recompute, Session, guard_agent, has_gradients
from ort_zero.ortmodule.compat.ortmodule.wrapping import attach, make_ortmodule, manager_by_mode, managers_of

__all__ = [
    "GraphInfo",
    "Manager",
    "ModelRunner",
    "Recompute",
    "Session",
    "attach",
    "contiguous",
    "guard_agent",
    "has_gradients",
    "import_ortmodule",
    "is_ortmodule",
    "make_ortmodule",
    "manager_by_mode",
    "managers_of",
    "onnx_type",
    "patches",
    "register_aten_gradient",
    "register_function",
    "run_aten_nodes",
    "running",
    "symbolic_patches",
    "with_all_gradients",
]

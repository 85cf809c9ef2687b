"""Decides which operators of a module run in PyTorch inside its ONNX graph, and why.

:func:`.compat.torch_onnx.routing` asks a :class:`FallbackPolicy` about each operator that is exported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ort_zero.ortmodule.compat.torch_onnx import TracedNode, TracedPlace, TracedValue, torch_dtype
from ort_zero.ortmodule.runtime.export import autograd_functions, pytorch_calls
from ort_zero.ortmodule.runtime.operators import aten_op, shape_inference
from ort_zero.ortmodule.runtime.operators.fallback_table import IN_TORCH, WITHOUT_GRADIENT, WRONG_GRADIENT

_NO_KERNEL = re.compile(r"Could not find an implementation for (?P<operator>\w+)\(")
_NO_GRADIENT = re.compile(r"gradient builder has not been registered: (?P<operator>\w+)")
_PYTHON_OP = re.compile(r"ort_zero(?:\.\w+)+\.[0-9a-f]{8}")
_GRADIENT_OF = {"Cos": ("Sin",), "Sin": ("Cos",), "Sign": ("Abs",), "Exp": ("Erf", "Gelu"), "Pow": ("Sqrt",)}
"""For operators in gradient graphs, the operators whose gradients they may belong to."""


class FallbackPolicy:
    """Decides for one mode of a module: by a general rule, a table, and what failures have taught.

    Args:
        training: True while the graph is for training, so that gradients matter.
        register: makes an autograd Function callable by name, see
            :func:`ort_zero.ortmodule.compat.ortmodule.register_function`.
    """

    def __init__(self, training: bool, register: Callable[[str, type], None]):
        self.training = training
        self.reasons: dict[str, str] = {}
        """The reason why an operator runs in PyTorch, by the operator's name."""
        self.without_symbolic: dict[str, str] = {}
        """Those of the reasons that are a missing or failing symbolic."""
        self._register = register
        self._sizes: list[list[int | None]] = []
        self._learned: dict[str, str] = {}
        """The reason why an ONNX operator is to be avoided, by the operator's name."""
        self._avoided: dict[tuple[str, str], str] = {}
        """The reason why an ONNX operator is to be avoided in one module, by the module's path and the operator."""
        self.failed_place: TracedPlace | None = None
        """Where the operator was called that stopped the last export; None if no operator did."""
        self._places: dict[str, TracedPlace] = {}
        """The first place of each node that runs in PyTorch, by the name of its function."""

    def learn(self, message: str) -> bool:
        """Avoid the ONNX operator that ORT's error `message` names; return False if it names none, or none new."""
        for pattern, why in (
            (_NO_KERNEL, "ONNX Runtime has no kernel for {} with these types"),
            (_NO_GRADIENT, "ONNX Runtime has no gradient for {}"),
        ):
            match = pattern.search(message)
            if match is None:
                continue
            operator = re.sub(r"Grad(_\d+)?$", "", match["operator"])
            known = len(self._learned)
            for avoided in (operator, *_GRADIENT_OF.get(operator, ())):
                self._learned.setdefault(avoided, why.format(match["operator"]))
            if len(self._learned) > known:
                return True
        return False

    def avoid(self, path: str, operator: str, why: str) -> bool:
        """Avoid an ONNX operator in the module at `path`; return False if it is avoided there already."""
        if operator == "PythonOp" or (path, operator) in self._avoided:
            return False
        self._avoided[path, operator] = why
        return True

    def avoid_all(self, operator: str, why: str) -> bool:
        """Avoid an ONNX operator in the whole model; return False if it is avoided already."""
        return operator not in self._learned and self._learned.setdefault(operator, why) == why

    def failed(self, node: TracedNode) -> None:
        """Note that `node` can neither be exported nor run in PyTorch by itself."""
        self.failed_place = node.place

    def place_of(self, text: str) -> TracedPlace | None:
        """Return where the operator is called whose PyTorch node `text` names; None if it names none."""
        name = _PYTHON_OP.search(text)
        return self._places.get(name[0]) if name is not None else None

    def before(self, node: TracedNode) -> str | None:
        """Return why `node` cannot be exported, or None to try."""
        if node.name == pytorch_calls.OPERATOR:
            return _call_of(node).reason
        if node.name == autograd_functions.OPERATOR:
            return _function_call(node).reason
        if aten_op.uses_complex(node):
            return "ONNX Runtime has no complex numbers"
        if _mixes_precisions_of_numbers(node):
            return "torch's exporter computes in 16 bit where tensors without dimensions have 16 and 32 bit"
        entry = IN_TORCH.get(node.name.removesuffix("_"))
        return entry(node) if callable(entry) else entry

    def after(self, node: TracedNode, exported: list[str], of_sizes: frozenset[str] = frozenset()) -> str | None:
        """Return why the ONNX operators `exported` will not do for `node`, or None to keep them.

        Args:
            node: the operator.
            exported: what it has become.
            of_sizes: those of them that compute with sizes and constants alone, so that no gradient goes through them.
        """
        for operator in exported:
            if operator in self._learned:
                return self._learned[operator]
            if self._avoided and (node.module_path, operator.rpartition("::")[2]) in self._avoided:
                return self._avoided[node.module_path, operator.rpartition("::")[2]]
        if self.training and any(value.requires_grad for value in node.outputs):
            for operator in exported:
                if operator in WITHOUT_GRADIENT and operator not in of_sizes:
                    return f"ONNX Runtime has no gradient for {operator}"
                if operator in WRONG_GRADIENT:
                    return WRONG_GRADIENT[operator]
        return None

    def run_in_torch(
        self, node: TracedNode, why: str, without_symbolic: bool
    ) -> tuple[list[TracedValue], dict[str, Any]]:
        """Return inputs and attributes of the PythonOp that runs `node`."""
        if without_symbolic:
            self.without_symbolic.setdefault(node.name, why)
        operator, inputs = aten_op.operator_of(node)
        name, function = aten_op.function_for(operator)
        self._register(name, function)
        self._places.setdefault(name, node.place)
        if node.name == autograd_functions.OPERATOR:
            self.reasons.setdefault(_function_call(node).name, why)
        elif node.name != pytorch_calls.OPERATOR:
            self.reasons.setdefault(node.name, why)
        elif isinstance(call := _call_of(node), pytorch_calls.FunctionCall):
            self.reasons.setdefault(call.name, why)
        outputs = node.outputs
        self._sizes = aten_op.result_shapes(operator, inputs, outputs)
        others = aten_op.result_shapes(operator, inputs, outputs, trusts_ones=False)
        both = [zip(*sizes, strict=True) for sizes in zip(self._sizes, others, strict=True)]
        ones = [[j for j, (a, b) in enumerate(sizes) if a == b == 1] for sizes in both]
        return inputs, {
            "func_name_s": name,
            "input_convention_s": "d" * len(inputs),
            "input_tensor_types_i": [value.elem_type for value in inputs],
            "input_tensor_ranks_i": [value.rank for value in inputs],
            "output_tensor_types_i": [value.elem_type for value in outputs],
            "output_tensor_ranks_i": [value.rank for value in outputs],
            "training_mode_i": int(self.training),
            # without ORT's own bookkeeping of what a function saves: in_torch keeps nothing that belongs to ORT
            "safe_run_mode_i": 0,
            # what the trace knows and shape inference may not find out again
            "comment_s": json.dumps([ones, [value.traced_sizes for value in outputs]]),
        }

    def result_sizes(self, node: TracedNode) -> list[list[int | None]]:
        """Return the sizes of the results of `node`, the last one that runs in PyTorch; None for those that vary."""
        return self._sizes


def _mixes_precisions_of_numbers(node: TracedNode) -> bool:
    """Return True if all floating-point operands have no dimensions, and some have 16 bit and some more.

    PyTorch computes in the wider type. The exporter takes the type of the first operand, and ORT then drops the cast.
    """
    types = {(value.rank, value.dtype.itemsize) for value in node.inputs if value.is_tensor and value.is_floating}
    return len(types) > 1 and all(rank == 0 for rank, _ in types) and any(size == 2 for _, size in types)


def _function_call(node: TracedNode) -> autograd_functions.AutogradFunctionCall:
    call = node.argument("call")
    assert call is not None
    return autograd_functions.CALLS.numbered(call.constant_number)


def _call_of(node: TracedNode) -> pytorch_calls.PyTorchCall:
    number = node.argument("call")
    assert number is not None
    return pytorch_calls.CALLS.numbered(number.constant_number)


def infer_python_op(node: Any, input_shapes: list, input_types: list[int]) -> list[list[Any]] | None:
    """Return the shapes of the results of a PythonOp node, None for unknown sizes; None if nothing is known."""
    attributes = {a.name: a for a in node.attribute}
    operator = aten_op.operator_named(attributes["func_name"].s.decode())
    if operator is None:
        return None
    ranks = list(attributes["output_tensor_ranks"].ints)
    known = [
        # upstream hands over its own formulas too
        [dim if isinstance(dim, int) or dim is None else str(dim) for dim in shape or [None] * rank]
        for shape, rank in zip(input_shapes, attributes["input_tensor_ranks"].ints, strict=True)
    ]
    found = shape_inference.output_shapes(operator, known, [torch_dtype(kind) for kind in input_types])
    if found is None or [len(shape) for shape in found] != ranks:
        found = [[None] * rank for rank in ranks]
    for shape, ones, traced in zip(found, *json.loads(attributes["comment"].s), strict=True):
        aten_op.leave_out_others(shape, traced)
        for axis in ones:
            shape[axis] = 1
    return found

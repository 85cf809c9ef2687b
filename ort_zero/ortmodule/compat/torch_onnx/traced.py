"""Values, operators and schemas of a TorchScript trace, as symbolics and the choice of operators need them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from ort_zero.ortmodule.compat.frames import Frame, users_line


class TracedValue:
    """An argument or a result of a traced operator: as the tracer saw it, and as the exporter has converted it."""

    def __init__(self, traced, converted=None):
        self._traced = traced
        self.converted = converted
        """The value in the ONNX graph; None for results and for items that the exporter dropped."""

    @property
    def kind(self) -> str:
        """The type's name in TorchScript."""
        return self._traced.type().str()

    @property
    def is_constant(self) -> bool:
        """True for what the trace knows: numbers, texts, None; not for tensors."""
        node = self._traced.node()
        return node.kind() == "prim::Constant" and not self.is_tensor

    @property
    def constant_number(self):
        """The number in a tensor that the trace knows; None if it holds none or its value is unknown."""
        node = self._traced.node()
        if node.kind() not in ("prim::Constant", "onnx::Constant") or not self.is_tensor:
            return None
        value = self._traced.toIValue() if node.kind() == "prim::Constant" else node.t("value")
        return value.item() if value.numel() == 1 else None

    @property
    def constant(self):
        """The value of a constant; lists as tuples."""
        value = self._traced.toIValue()
        return tuple(value) if isinstance(value, list) else value

    @property
    def items(self) -> list[TracedValue] | None:
        """The items of a list that was put together in the trace; None for anything else."""
        if self._traced.node().kind() != "prim::ListConstruct":
            return None
        traced = list(self._traced.node().inputs())
        from torch.onnx import symbolic_helper

        if self.converted is not None and symbolic_helper._is_packed_list(self.converted):
            converted = symbolic_helper._unpack_list(self.converted)
            if len(converted) == len(traced):
                return [TracedValue(t, c) for t, c in zip(traced, converted, strict=True)]
        return [TracedValue(t) for t in traced]

    @property
    def is_tensor(self) -> bool:
        return self._traced.type().kind() == "TensorType"

    @property
    def is_number(self) -> bool:
        return self._traced.type().kind() in ("IntType", "FloatType", "BoolType", "NumberType")

    @property
    def is_complex(self) -> bool:
        return self.is_tensor and "Complex" in (self._traced.type().scalarType() or "")

    @property
    def value_kind(self) -> str:
        """``"complex"``, ``"bool"`` or ``"real"``: how a tensor is to be read from the real one that replaces it."""
        return "complex" if self.is_complex else "bool" if self.scalar_type == "Bool" else "real"

    @property
    def is_floating(self) -> bool:
        """True for a tensor that may have a gradient."""
        return self.is_tensor and (self._traced.type().scalarType() or "") in _REAL | _COMPLEX

    @property
    def requires_grad(self) -> bool:
        """True if PyTorch would compute a gradient for it; known where gradients were on during the trace."""
        return self.is_tensor and self._traced.requiresGrad()

    @property
    def leads_to_gradient(self) -> bool:
        """True if a result of the module that has a gradient depends on it."""
        seen, stack = set(), [self._traced]
        while stack:
            value = stack.pop()
            if value.unique() in seen:
                continue
            seen.add(value.unique())
            for use in value.uses():
                # results of the module pass through a function of ORTModule, which is traced without gradients
                if use.user.kind() in ("prim::Return", "prim::PythonOp"):
                    return True
                stack += [out for out in use.user.outputs() if _may_have_gradient(out)]
        return False

    @property
    def elem_type(self) -> int:
        """ONNX element type of the tensor that replaces it in the graph; complex numbers are pairs of real ones."""
        if not self.is_tensor:
            return {"FloatType": 1, "BoolType": 9}.get(self._traced.type().kind(), 7)
        return ELEM_TYPES[self._scalar_type][0]

    @property
    def rank(self) -> int:
        """Number of axes of the tensor that replaces it in the graph."""
        if not self.is_tensor:
            return 0
        return (self._traced.type().dim() or 0) + self.is_complex

    @property
    def dtype(self):
        """The torch dtype of the tensor that replaces it in the graph."""
        import torch

        if not self.is_tensor:
            return {"FloatType": torch.float32, "BoolType": torch.bool}.get(self._traced.type().kind(), torch.int64)
        return getattr(torch, ELEM_TYPES[self._scalar_type][1])

    @property
    def traced_sizes(self) -> list:
        """The sizes in the trace of the tensor that replaces it in the graph; None for unknown ones."""
        sizes = self._traced.type().sizes() if self.is_tensor else []
        return [*(sizes or [None] * (self.rank - self.is_complex)), *([2] if self.is_complex else [])]

    @property
    def traced_strides(self) -> list | None:
        """The strides in the trace; None if they are unknown."""
        return self._traced.type().strides() if self.is_tensor else None

    @property
    def known_sizes(self) -> list:
        """The sizes that do not depend on those of the graph's inputs; None for the others."""
        from torch.onnx import symbolic_helper

        if self.converted is None:
            return [None] * self.rank
        sizes = symbolic_helper._get_tensor_sizes(self.converted) if self.is_tensor else []
        return sizes if sizes is not None and len(sizes) == self.rank else [None] * self.rank

    def jit_type(self, sizes):
        """Return the TorchScript type to give to the converted result; a size of None is unknown."""
        import torch

        start = self._traced.type() if self.is_tensor else torch._C.TensorType.get()
        return start.with_dtype(self.dtype).with_sizes(sizes)

    @property
    def scalar_type(self) -> str | None:
        """TorchScript's name of a tensor's element type; None if the trace does not know it."""
        return self._traced.type().scalarType()

    @property
    def _scalar_type(self) -> str:
        # values that the exporter's passes have made are typed in the ONNX graph only
        converted = self.converted.type() if self.scalar_type is None and self.converted is not None else None
        known = converted.scalarType() if converted is not None and converted.kind() == "TensorType" else None
        name = self.scalar_type or known or "Float"
        return _PAIRS.get(name, name)


def _requires_grad(value) -> bool:
    if value.node().kind() == "prim::ListConstruct":
        return any(map(_requires_grad, value.node().inputs()))
    return bool(value.type().kind() == "TensorType" and value.requiresGrad())


def _may_have_gradient(value) -> bool:
    kind = value.type().kind()
    return value.requiresGrad() if kind == "TensorType" else kind in ("ListType", "TupleType")


ELEM_TYPES = {
    "Float": (1, "float32"),
    "Byte": (2, "uint8"),
    "Char": (3, "int8"),
    "Short": (5, "int16"),
    "Int": (6, "int32"),
    "Long": (7, "int64"),
    "Bool": (9, "bool"),
    "Half": (10, "float16"),
    "Double": (11, "float64"),
    "BFloat16": (16, "bfloat16"),
}
"""TorchScript's name of an element type to its number in ONNX and its name in torch."""
_REAL = {"Float", "Double", "Half", "BFloat16"}
_PAIRS = {"ComplexFloat": "Float", "ComplexDouble": "Double", "ComplexHalf": "Half"}
_COMPLEX = set(_PAIRS)


def torch_dtype(elem_type: int):
    """Return the torch dtype of an ONNX element type."""
    import torch

    return getattr(torch, {number: name for number, name in ELEM_TYPES.values()}[elem_type])


class Schema:
    """The schema of one overload of an ATen operator."""

    def __init__(self, schema):
        self.overload = schema.overload_name
        self._arguments = schema.arguments

    @property
    def writes_into_argument(self) -> bool:
        """True for the ``out=`` overloads, which write into an argument."""
        return any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in self._arguments)

    def position(self, name: str) -> int | None:
        """Return the position of an argument, or None if there is none of that name."""
        return next((i for i, a in enumerate(self._arguments) if a.name == name), None)

    @property
    def names(self) -> list[str | None]:
        """The name of each argument that must be given by name, None for each other argument."""
        return [a.name if a.kwarg_only else None for a in self._arguments]

    def wants_number(self, position: int) -> bool:
        """Return True if an argument is a number, so that a tensor given for it is one number."""
        return _inner(self._arguments[position].type).kind() in _NUMBERS

    def numbers_among(self, values: list[TracedValue]) -> int:
        """Return how many of `values` are constant numbers where the overload wants numbers."""
        return sum(self.wants_number(i) and value.constant_number is not None for i, value in enumerate(values))

    def takes(self, values: list[TracedValue]) -> bool:
        """Return True if `values` may be its arguments."""
        if len(values) != len(self._arguments):
            return False
        return all(_fits(a.type, v) for a, v in zip(self._arguments, values, strict=True))


_NUMBERS = ("IntType", "FloatType", "BoolType", "NumberType", "SymIntType")

_NUMBERS_OF = {
    "Bool": ("BoolType", "NumberType"),
    "Long": ("IntType", "FloatType", "NumberType", "SymIntType"),
    "Double": ("FloatType", "NumberType"),
}
"""TorchScript's name of the element type of a tensor that was a number, to the types that the number may have."""


def _inner(kind):
    return kind.getElementType() if kind.kind() == "OptionalType" else kind


def _fits(kind, value: TracedValue) -> bool:
    wanted = _inner(kind).kind()
    if value.is_constant and value.constant is None:
        return kind.kind() == "OptionalType"
    if value.items is not None or (value.is_constant and isinstance(value.constant, tuple)):
        return wanted == "ListType"
    if value.is_tensor:
        return wanted == "TensorType" or (
            value.rank == 0 and wanted in _NUMBERS_OF.get(value.scalar_type or "", _NUMBERS)
        )
    if value.is_number:
        return wanted in _NUMBERS
    return wanted not in ("TensorType", "ListType", *_NUMBERS)


@dataclass(frozen=True, slots=True)
class TracedPlace:
    """Where a traced operator was called."""

    path: str
    """Path of the module that called it, empty for the model itself."""
    line: str
    """``"FILE:LINE in FUNCTION"`` of the user's code; empty if it is not known."""


class TracedNode:
    """An operator call in a trace."""

    def __init__(self, node, converted=None):
        self._node = node
        self.name = node.kind()
        """``"aten::relu"``; in-place operators end in an underscore."""
        traced = list(node.inputs())
        self.inputs = [TracedValue(t, c) for t, c in zip(traced, converted or [None] * len(traced), strict=True)]

    @property
    def passes_on(self) -> bool:
        """Whether this is a call of an autograd Function whose attribute ``passes_on`` says that its first result is
        its first argument."""
        if self.name != "prim::PythonOp":
            return False
        return getattr(getattr(self._node.pyobj(), "__self__", None), "passes_on", False)

    def stops_gradient(self, out: TracedValue) -> bool:
        """Return True if `out` has no gradient although an input has one: ``detach``, or inside of ``no_grad``."""
        if not out.is_floating or out.requires_grad or _FACTORY.search(self.name) or self._is_inside(out):
            return False
        return any(leaf.requires_grad for value in self.inputs for leaf in (value.items or [value]))

    def _is_inside(self, out: TracedValue) -> bool:
        """Return True if `out` is a value inside of one call of PyTorch's, whose result has a gradient.

        The trace of a convolution without a batch holds an unsqueeze, a convolution and a squeeze; only the last one
        is marked as having a gradient.
        """
        call = self._node.sourceRange()
        for use in out._traced.uses():
            if use.user.sourceRange() == call and any(map(_requires_grad, use.user.outputs())):
                return not any(_requires_grad(value) for value in use.user.inputs())
        return False

    @functools.cached_property
    def schema(self) -> Schema:
        """The overload that was called.

        Raises:
            TypeError: no overload takes such arguments.
        """
        import torch

        text = self._node.schema()
        matched = Schema(torch._C.parse_schema(text)) if text != "(no schema)" else None
        if matched is not None and not matched.writes_into_argument:
            return matched
        # The exporter's passes turn numbers into tensors. Then the node matches no schema any more, or, as
        # round(x, decimals=0), the one that takes a tensor to write into.
        schemas = map(Schema, torch._C._jit_get_schemas_for_operator(self.name))
        fitting = [found for found in schemas if not found.writes_into_argument and found.takes(self.inputs)]
        if fitting:
            # of quantile(x, 0.3) the tensor is a double, which the overload for tensors does not take
            return max(fitting, key=lambda found: found.numbers_among(self.inputs))
        if matched is not None:
            return matched  # the program itself names a tensor to write into
        raise TypeError(f"{self.name} has no overload for ({', '.join(value.kind for value in self.inputs)})")

    def argument(self, name: str) -> TracedValue | None:
        """Return an argument by its name in the operator's schema; None if it has no such argument."""
        position = self.schema.position(name)
        return None if position is None else self.inputs[position]

    @property
    def outputs(self) -> list[TracedValue]:
        """The results; those of a list of tensors one by one, as far as the trace takes it apart."""
        found = []
        for out in self._node.outputs():
            users = [use.user for use in out.uses()] if out.type().kind() == "ListType" else []
            unpack = next((user for user in users if user.kind() == "prim::ListUnpack"), None)
            found += list(unpack.outputs()) if unpack is not None else [out]
        return [TracedValue(out) for out in found]

    @property
    def returns_list(self) -> bool:
        """True if a result is a list of tensors."""
        return any(out.type().kind() == "ListType" for out in self._node.outputs())

    @property
    def place(self) -> TracedPlace:
        """Where it was called."""
        frames = [Frame(file, int(line), name) for file, line, name in _FRAME.findall(self._node.sourceRange())]
        return TracedPlace(self.module_path, users_line(reversed(frames)))

    @property
    def is_control_flow(self) -> bool:
        """True for a branch or a loop of TorchScript code whose results may have a gradient."""
        if self._node.kind() not in ("prim::If", "prim::Loop"):
            return False
        return any(out.is_tensor and (out.scalar_type is None or out.is_floating) for out in self.outputs)

    @property
    def has_blocks(self) -> bool:
        """True if it holds other operators: branches, loops, and the exporter's form of changes in place."""
        return any(True for _ in self._node.blocks())

    @property
    def module_path(self) -> str:
        """The path of the module that called it, ``""`` for the model itself."""
        names = [part.rpartition("::")[2] for part in self._node.scopeName().split("/")]
        return ".".join(names[names.index("_original_module") + 1 :]) if "_original_module" in names else ""


_FRAME = re.compile(r"^(\S.*?)\((\d+)\): (\S+)$", re.MULTILINE)
_FACTORY = re.compile(r"^prim::|_like$|::new_|::(zeros|ones|full|empty|rand|randn|arange)$")
STOP_GRADIENT = "detach_copy"
"""ATen operator in whose place ORT's gradient stops, see :mod:`ort_zero.ortmodule.compat.ortmodule.loading`."""


def stops_gradient(node) -> bool:
    """Return whether a node of an ONNX graph is there to stop a gradient; all that it computes is its input."""
    return node.op_type == "ATen" and any(
        attribute.name == "operator" and attribute.s.decode() == STOP_GRADIENT for attribute in node.attribute
    )

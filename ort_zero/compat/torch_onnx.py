"""Makes the TorchScript exporter of today's torch answer to the names that onnxruntime-training 1.19.2 imports.

torch 2.9 and later keep the exporter under ``torch.onnx._internal.torchscript_exporter``; the old public modules are
gone or facades without the private helpers. Aliases are added to ``sys.modules``; nothing of torch is changed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

_HOME = "torch.onnx._internal.torchscript_exporter"
_MOVED_INTERNAL = ("jit_utils", "registration", "onnx_proto_utils")
_MOVED_PUBLIC = ("_globals", "_type_utils")
_OPSETS = range(7, 21)
_aliased = False


def alias_exporter_modules() -> None:
    """Register the moved exporter modules under their old names; a second call does nothing."""
    global _aliased
    if _aliased:
        return
    import torch.onnx

    internal = sys.modules["torch.onnx._internal"]
    for name in _MOVED_INTERNAL:
        _alias(f"torch.onnx._internal.{name}", f"{_HOME}.{name}", internal, name)
    for name in _MOVED_PUBLIC:
        _alias(f"torch.onnx.{name}", f"{_HOME}.{name}", torch.onnx, name)
    for opset in _OPSETS:
        # ORT's symbolics import private helpers (_convolution, ...), which the public facades no longer have
        name = f"symbolic_opset{opset}"
        _alias(f"torch.onnx.{name}", f"{_HOME}.{name}", torch.onnx, name)
    _aliased = True


def _alias(old: str, new: str, parent: object, attribute: str) -> None:
    try:
        module = importlib.import_module(new)
    except ImportError:
        return  # an older torch, which still has the old name
    sys.modules[old] = module
    setattr(parent, attribute, module)


class Unexportable(BaseException):
    """A graph cannot hold an operator, and cannot run it in PyTorch by itself either; its module can.

    Not an Exception, so that ORT's own handlers let it pass.
    """

    path = ""
    """Of the module that calls the operator."""


class Symbolic:
    """The private helpers of torch's exporter that our symbolics need."""

    @staticmethod
    def sizes(value):
        """Return the sizes of a traced value (None for unknown ones), or None if not even the rank is known."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_tensor_sizes(value)

    @staticmethod
    def integer(value, name: str) -> int:
        """Return the constant integer that a traced argument holds."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_const(value, "i", name)

    @staticmethod
    def integers(value, name: str) -> list[int]:
        """Return the constant integers that a traced argument holds."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_const(value, "is", name)

    @staticmethod
    def is_list(value) -> bool:
        """Return True if a traced argument is a list."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._is_list(value) or symbolic_helper._is_constant(value) and _of_several(value)

    @staticmethod
    def number(value, name: str) -> float:
        """Return the constant float that a traced argument holds."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._get_const(value, "f", name)

    @staticmethod
    def traced(g, *converted) -> TracedNode:
        """Return the traced operator that is being exported, `converted` being its inputs."""
        return TracedNode(g.original_node, converted)

    @staticmethod
    def original(name: str, opset: int) -> Callable:
        """Return torch's own symbolic of an operator."""
        from torch.onnx._internal.torchscript_exporter import registration

        functions = registration.registry.get_function_group(name)._functions._base
        return functions[max(number for number in functions if number <= opset)]

    @staticmethod
    def dtype(value):
        """Return the torch dtype of a traced tensor."""
        from torch.onnx import JitScalarType

        return JitScalarType.from_value(value).dtype()

    @staticmethod
    def is_none(value) -> bool:
        """Return True if a traced argument is None."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._is_none(value) or value.node().mustBeNone()

    @staticmethod
    def slice(g, value, axis: int, start: int, end: int):
        """Return ``value[start:end]`` along `axis`."""
        from torch.onnx import symbolic_helper

        return symbolic_helper._slice_helper(g, value, axes=[axis], starts=[start], ends=[end])

    @staticmethod
    def onnx_type(dtype: int) -> int:
        """Return the ONNX element type of a dtype as the tracer numbers it."""
        from torch.onnx import JitScalarType  # the facade is kept by every torch so far

        return int(JitScalarType(dtype).onnx_type())


def _of_several(value) -> bool:
    return value.node().kind() == "onnx::Constant" and value.node().t("value").dim() > 0


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
        """``"complex"``, ``"bool"`` or ``"real"``: how a tensor is to be read from the one that stands for it."""
        return "complex" if self.is_complex else "bool" if self.scalar_type == "Bool" else "real"

    @property
    def is_floating(self) -> bool:
        """True for a tensor that may have a gradient."""
        return self.is_tensor and (self._traced.type().scalarType() or "") in _REAL | _COMPLEX

    @property
    def requires_grad(self) -> bool:
        """True if PyTorch would compute a gradient for it; known where the trace was made with gradients on."""
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
        """ONNX element type of the tensor that stands for it; complex numbers are pairs of real ones."""
        if not self.is_tensor:
            return {"FloatType": 1, "BoolType": 9}.get(self._traced.type().kind(), 7)
        return _ELEM_TYPES[self._scalar_type][0]

    @property
    def rank(self) -> int:
        """Number of axes of the tensor that stands for it."""
        if not self.is_tensor:
            return 0
        return (self._traced.type().dim() or 0) + self.is_complex

    @property
    def dtype(self):
        """The torch dtype of the tensor that stands for it."""
        import torch

        if not self.is_tensor:
            return {"FloatType": torch.float32, "BoolType": torch.bool}.get(self._traced.type().kind(), torch.int64)
        return getattr(torch, _ELEM_TYPES[self._scalar_type][1])

    @property
    def traced_sizes(self) -> list:
        """The sizes in the trace of the tensor that stands for it; None for unknown ones."""
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
        name = self.scalar_type or "Float"
        return _PAIRS.get(name, name)


def _may_have_gradient(value) -> bool:
    kind = value.type().kind()
    return value.requiresGrad() if kind == "TensorType" else kind in ("ListType", "TupleType")


_ELEM_TYPES = {
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

    return getattr(torch, {number: name for number, name in _ELEM_TYPES.values()}[elem_type])


class Schema:
    """One overload of an operator."""

    def __init__(self, schema):
        self.overload = schema.overload_name
        self._arguments = schema.arguments

    @property
    def writes_into_argument(self) -> bool:
        """True for the ``out=`` forms."""
        return any(a.kwarg_only and a.alias_info is not None and a.alias_info.is_write for a in self._arguments)

    def position(self, name: str) -> int | None:
        """Return the position of an argument, or None if there is none of that name."""
        return next((i for i, a in enumerate(self._arguments) if a.name == name), None)

    @property
    def names(self) -> list[str | None]:
        """For each argument None, or its name if it must be given by name."""
        return [a.name if a.kwarg_only else None for a in self._arguments]

    def wants_number(self, position: int) -> bool:
        """Return True if an argument is a number, so that a tensor in its place stands for one."""
        return _inner(self._arguments[position].type).kind() in _NUMBERS

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
        return wanted == "TensorType" or (value.rank == 0 and wanted in _NUMBERS_OF.get(value.scalar_type, _NUMBERS))
    if value.is_number:
        return wanted in _NUMBERS
    return wanted not in ("TensorType", "ListType", *_NUMBERS)


class TracedNode:
    """An operator call in a trace."""

    def __init__(self, node, converted=None):
        self._node = node
        self.name = node.kind()
        """``"aten::relu"``; in-place operators end in an underscore."""
        traced = list(node.inputs())
        self.inputs = [TracedValue(t, c) for t, c in zip(traced, converted or [None] * len(traced), strict=True)]

    def stops_gradient(self, out: TracedValue) -> bool:
        """Return True if `out` has no gradient although an input has one: ``detach``, or inside of ``no_grad``."""
        if not out.is_floating or out.requires_grad or _FACTORY.search(self.name):
            return False
        return any(leaf.requires_grad for value in self.inputs for leaf in (value.items or [value]))

    @functools.cached_property
    def schema(self) -> Schema:
        """The overload that was called.

        Raises:
            TypeError: no overload takes such arguments.
        """
        import torch

        text = self._node.schema()
        if text != "(no schema)":
            return Schema(torch._C.parse_schema(text))
        # the exporter's passes turn numbers into tensors, and then the node matches no schema any more
        for known in torch._C._jit_get_schemas_for_operator(self.name):
            found = Schema(known)
            if not found.writes_into_argument and found.takes(self.inputs):
                return found
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
    def module_path(self) -> str:
        """The path of the module that called it, ``""`` for the model itself."""
        names = [part.rpartition("::")[2] for part in self._node.scopeName().split("/")]
        return ".".join(names[names.index("_original_module") + 1 :]) if "_original_module" in names else ""


_FACTORY = re.compile(r"^prim::|_like$|::new_|::(zeros|ones|full|empty|rand|randn|arange)$")
STOP_GRADIENT = "detach_copy"
"""ATen operator in whose place ORT's gradient stops, see :func:`ort_zero.compat.ortmodule.import_ortmodule`."""


class Router(Protocol):
    """Decides for each traced operator whether it is exported or runs in PyTorch."""

    def before(self, node: TracedNode) -> str | None:
        """Return why `node` cannot be exported, or None to try."""

    def after(self, node: TracedNode, made: list[str]) -> str | None:
        """Return why the ONNX operators `made` will not do for `node`, or None to keep them."""

    def run_in_torch(self, node: TracedNode, why: str) -> tuple[list[TracedValue], dict]:
        """Return inputs and attributes of the node that runs `node` in PyTorch.

        Raises:
            TypeError: it cannot.
        """

    def result_sizes(self, node: TracedNode) -> list[list]:
        """Return the sizes of the results of `node`, None for those that vary; asked after :meth:`run_in_torch`."""


@contextlib.contextmanager
def routing(router: Router) -> Iterator[None]:
    """Let `router` decide on every operator that is exported inside."""
    import torch.onnx

    utils = importlib.import_module(f"{_HOME}.utils")
    original = utils._run_symbolic_function

    def run(graph, block, node, inputs, env, values_in_env, new_nodes, *rest):
        def export():
            return original(graph, block, node, inputs, env, values_in_env, new_nodes, *rest)

        context = _context(utils, graph, block, node, env, values_in_env, new_nodes)
        if node.kind() == "prim::ConstantChunk":
            return _chunks(node, inputs, context) or export()
        if node.kind().partition("::")[0] in ("prim", "onnx") or any(True for _ in node.blocks()):
            return export()
        traced = TracedNode(node, inputs)
        why = router.before(traced)
        failed: Exception | None = None
        if why is None:
            try:
                result = export()
            except Unexportable as error:
                error.path = traced.module_path
                raise
            except (AttributeError, NameError, ImportError):
                raise  # a mistake in a symbolic is no reason to leave it out
            except Exception as error:
                failed, why = error, str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            else:
                why = router.after(traced, _kinds(result, inputs))
                if why is None:
                    return _as_traced(_unscaled(result, context), traced, context)
        try:
            needed, attributes = router.run_in_torch(traced, why)
            if any(value.converted is None for value in needed):
                raise TypeError(f"{traced.name}: the exporter has dropped one of its inputs")
        except TypeError as error:
            raise (failed or error) from error
        outputs = traced.outputs
        made = context.op("com.microsoft::PythonOp", *(v.converted for v in needed), outputs=len(outputs), **attributes)
        values = list(made) if isinstance(made, (list, tuple)) else [made]
        for value, out, sizes in zip(values, outputs, router.result_sizes(traced), strict=True):
            value.setType(out.jit_type(sizes))
        values = _as_traced(values, traced, context)
        if traced.returns_list:
            return context.op("prim::ListConstruct", *values)
        return values[0] if len(values) == 1 else values

    merge = torch._C._jit_pass_cse

    def merge_equal(graph):
        # it would merge what is computed with gradient with what is computed without
        stops = any(
            TracedNode(node).stops_gradient(TracedValue(out)) for node in graph.nodes() for out in node.outputs()
        )
        return False if stops else merge(graph)

    select = utils.select_model_mode_for_export

    @contextlib.contextmanager
    def keep_modes(model, mode):
        # upstream puts every submodule into the mode of the whole, and leaves it there
        modes = [(part, part.training) for part in model.modules()] if hasattr(model, "modules") else []
        try:
            with select(model, mode):
                _set_modes(modes)
                yield
        finally:
            _set_modes(modes)

    utils._run_symbolic_function = run
    utils.select_model_mode_for_export = keep_modes
    torch._C._jit_pass_cse = merge_equal
    try:
        yield
    finally:
        utils._run_symbolic_function = original
        utils.select_model_mode_for_export = select
        torch._C._jit_pass_cse = merge


def _chunks(node, inputs, context):
    """Return the parts of a chunked tensor as slices; None where ORT's gradient of Split, which wants all, will do."""
    traced = TracedNode(node, inputs)
    if not traced.inputs[0].requires_grad or all(out.leads_to_gradient for out in traced.outputs):
        return None
    axis = node.i("dim") % traced.inputs[0].rank
    ends = list(itertools.accumulate(out.traced_sizes[axis] for out in traced.outputs))
    return [
        Symbolic.slice(context, inputs[0], axis, start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _set_modes(modes) -> None:
    for part, training in modes:
        part.training = training


def _unscaled(result, context):
    """Return `result`; a sum of two products with numbers as a difference that ORT's ScaledSumFusion does not know.

    When a third value is added to such a sum, the fusion takes the input of that value's node instead of the value.
    """
    if not hasattr(result, "node") or result.node().kind() != "onnx::Add":
        return result
    one, other = result.node().inputs()
    if not (_is_scaled(one) and _is_scaled(other)):
        return result
    difference = context.op("Sub", one, context.op("Neg", other))
    difference.setType(result.type())
    return difference


_NO_CHANGE = {f"onnx::{name}" for name in ("Identity", "Cast", "Dropout", "Expand", "Reshape", "Slice", "Pad")}
"""What ORT's optimizer may find to change nothing, and leave out."""


def _is_scaled(value) -> bool:
    """Return True if ORT may see the product with a number in `value`, possibly after leaving out what adds zero."""
    while True:
        kind, inputs = value.node().kind(), list(value.node().inputs())
        if kind in _NO_CHANGE:
            value = inputs[0]
            continue
        numbers = [Symbolic.sizes(v) in (None, [], [1]) for v in inputs]
        if kind in ("onnx::Mul", "onnx::Div"):
            return any(numbers)
        if kind not in ("onnx::Add", "onnx::Sub") or not any(numbers):
            return False
        value = inputs[numbers.index(True) - 1]


def _as_traced(result, node: TracedNode, context):
    """Return `result` with the element types of the trace, and without gradient where the trace has none.

    Some symbolics take a constructed integer for a float. None knows ``detach`` and ``torch.no_grad``.
    """
    import torch

    values = list(result) if isinstance(result, (list, tuple)) else [result]
    outputs = list(node.outputs)
    if len(values) != len(outputs):
        return result
    for i, (value, out) in enumerate(zip(values, outputs, strict=True)):
        if not isinstance(value, torch._C.Value) or not out.is_tensor or value.type().kind() != "TensorType":
            continue
        made, wanted = value.type().scalarType(), out.scalar_type
        if made is not None and wanted in _ELEM_TYPES and made != wanted:
            values[i] = value = context.op("Cast", value, to_i=_ELEM_TYPES[wanted][0])
        if node.stops_gradient(out):
            kind = value.type()
            values[i] = context.op("org.pytorch.aten::ATen", value, operator_s=STOP_GRADIENT)
            values[i].setType(kind)
    return values if isinstance(result, (list, tuple)) else values[0]


def _context(utils, graph, block, node, env, values_in_env, new_nodes):
    from torch.onnx._internal import jit_utils

    return jit_utils.GraphContext(
        graph=graph,
        block=block,
        opset=utils.GLOBALS.export_onnx_opset_version,
        original_node=node,
        params_dict=utils._params_dict,
        env=env,
        values_in_env=values_in_env,
        new_nodes=new_nodes,
    )


def _kinds(result, inputs) -> list[str]:
    """Return the ONNX operators between `inputs` and `result`."""
    import torch

    given = [value for value in inputs if isinstance(value, torch._C.Value)]
    stop = {value.debugName() for value in given}
    for value in given:
        if value.node().kind() == "prim::ListConstruct":
            stop.update(item.debugName() for item in value.node().inputs())
    kinds: list[str] = []
    seen: set[str] = set()
    stack = [v for v in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(v, torch._C.Value)]
    while stack:
        value = stack.pop()
        name = value.debugName()
        if name in stop or name in seen:
            continue
        seen.add(name)
        node = value.node()
        if node.kind() == "prim::Param":
            continue
        kinds.append(node.kind().removeprefix("onnx::"))
        stack += list(node.inputs())
    return kinds

"""Register one conversion per ATen overload, and convert FX nodes with the registered functions.

Whether ONNX Runtime can run a node is asked of the function that converts the node, so the two answers cannot differ.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ort_zero.compat.torch_compile import OpOverload
from ort_zero.compat.torch_graphs import schema_of
from ort_zero.compile.conversion.fragments import (
    ONNX_TYPES,
    Builder,
    Dim,
    Fragment,
    NotConvertibleError,
    Size,
    Value,
    value_name,
)

Conversion = Callable[..., Any]
"""Called with the builder, the results as nameless values, and all arguments of the ATen schema in order."""
_TABLE: dict[Any, Conversion] = {}
_FAMILIES = ("activation", "arithmetic", "creation", "layers", "reduction", "views")


def converts(*overloads: Any) -> Callable[[Conversion], Conversion]:
    """Register a function as the conversion of ATen overloads.

    Raises:
        TypeError: an overload packet such as ``aten.add``, or an overload that has a conversion.
    """

    def register(function: Conversion) -> Conversion:
        for overload in overloads:
            if not isinstance(overload, OpOverload):
                raise TypeError(f"{overload} is not one overload")
            if overload in _TABLE:
                raise TypeError(f"{overload} has a conversion already")
            _TABLE[overload] = function
        return function

    return register


def overload(name: str, which: str = "default") -> Any:
    """Return an ATen overload by name."""
    return getattr(getattr(torch.ops.aten, name), which)


def overloads(names: str) -> frozenset[Any]:
    """Return the ATen overloads of names such as ``"view slice.Tensor"``."""
    return frozenset(overload(*name.split(".")) for name in names.split())


def table() -> dict[Any, Conversion]:
    """Return the conversions by overload; the families are imported at the first call."""
    for family in _FAMILIES:
        importlib.import_module(f"ort_zero.compile.conversion.{family}")
    return _TABLE


def convert(node: torch.fx.Node, widen: bool) -> Fragment:
    """Return the ONNX form of an FX node.

    Raises:
        NotConvertibleError: ONNX Runtime cannot run the node.
    """
    if node.op != "call_function":
        raise NotConvertibleError("not a call")
    builder = Builder(node.name, widen)
    if node.target is operator.getitem:
        return _item(node, builder)
    conversion = table().get(node.target)
    if conversion is None:
        raise NotConvertibleError("no conversion")
    results = _results_of(node)
    arguments = [_argument(value, builder) for value in _bound(node)]
    made = conversion(builder, results[0] if len(results) == 1 else results, *arguments)
    values = made if isinstance(made, (tuple, list)) else (made,)
    if len(values) != len(results):
        raise AssertionError(f"{node.target}: {len(values)} results, not {len(results)}")
    return builder.finish([builder.cast(value, wanted.dtype) for value, wanted in zip(values, results, strict=True)])


def _item(node: torch.fx.Node, builder: Builder) -> Fragment:
    source, index = node.args
    if not isinstance(source, torch.fx.Node) or not isinstance(index, int):
        raise NotConvertibleError("not an item of a result")
    value = _tensor(node.meta.get("val"), value_name(source, index))
    builder.argument(value)
    return builder.finish([value])


def _bound(node: torch.fx.Node) -> list[Any]:
    """Return all arguments of a call in the order of the schema, with the defaults of missing ones."""
    arguments = []
    for index, argument in enumerate(schema_of(node.target).arguments):
        if index < len(node.args):
            arguments.append(node.args[index])
        elif argument.name in node.kwargs:
            arguments.append(node.kwargs[argument.name])
        else:
            arguments.append(argument.default_value)
    return arguments


def _argument(value: Any, builder: Builder) -> Any:
    if isinstance(value, (list, tuple)):
        return [_argument(item, builder) for item in value]
    if not isinstance(value, torch.fx.Node):
        return value
    fake = value.meta.get("val")
    if isinstance(fake, torch.SymInt):
        return size_of(fake)
    if isinstance(fake, torch.Tensor):
        tensor = _tensor(fake, value_name(value))
        builder.argument(tensor)
        return tensor
    raise NotConvertibleError(f"an argument of the kind {type(fake).__name__}")


def _results_of(node: torch.fx.Node) -> tuple[Value, ...]:
    fake = node.meta.get("val")
    items = fake if isinstance(fake, (tuple, list)) else (fake,)
    return tuple(_tensor(item, "") for item in items)


def _tensor(fake: Any, name: str) -> Value:
    """Return the value of a fake tensor.

    Raises:
        NotConvertibleError: no tensor, or a tensor that ONNX Runtime cannot hold.
    """
    if fake is None:
        return Value(name, torch.float32)  # a result that the caller did not ask for
    if not isinstance(fake, torch.Tensor):
        raise NotConvertibleError(f"a result of the kind {type(fake).__name__}")
    if fake.dtype not in ONNX_TYPES:
        raise NotConvertibleError(f"a tensor of {fake.dtype}")
    if fake.layout != torch.strided or fake.is_quantized:
        raise NotConvertibleError(f"a tensor with the layout {fake.layout}")
    shape = tuple(size_of(size) for size in fake.shape)
    if 0 in shape:
        raise NotConvertibleError("an empty tensor")
    return Value(name, fake.dtype, shape)


def size_of(size: Any) -> Size:
    """Return a size of a fake tensor.

    Raises:
        NotConvertibleError: the size depends on values of tensors.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_number:
        return int(expression)
    if free_unbacked_symbols(size):
        raise NotConvertibleError("a size that depends on values")
    return Dim(expression)

"""What a graph says of its values: element types, shapes, constants, who makes and who reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


class GraphValues:
    """The values of a graph as they were when this was made, and new constants for it.

    Args:
        model: a graph whose names are unique.
        prefix: of the names of new constants.
    """

    def __init__(self, model: onnx.ModelProto, prefix: str):
        self.graph = model.graph
        self.producers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self.graph.node:
            self.producers.update({name: node for name in node.output if name})
            for name in {name for name in node.input if name}:
                self.readers.setdefault(name, []).append(node)
        self.outputs = {output.name for output in self.graph.output}
        self._types = {
            value.name: value.type.tensor_type
            for value in (*self.graph.input, *self.graph.output, *self.graph.value_info)
        }
        self._initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        self._prefix = prefix
        self._constants: dict[tuple[str, str], str] = {}

    def element_type(self, name: str) -> int:
        """Return the number of the element type in ONNX, 0 if it is not known."""
        if name in self._initializers:
            return int(self._initializers[name].data_type)
        return int(self._types[name].elem_type) if name in self._types else 0

    def shape(self, name: str) -> list[int | str] | None:
        """Return the sizes, a name for one that varies, "" for one that is not known; None without a rank."""
        if name in self._initializers:
            return list(self._initializers[name].dims)
        if name not in self._types or not self._types[name].HasField("shape"):
            return None
        dims = self._types[name].shape.dim
        return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims]

    def constant(self, name: str) -> np.ndarray | None:
        """Return the value of a constant; None for any other value."""
        if name in self._initializers:
            return numpy_helper.to_array(self._initializers[name])
        node = self.producers.get(name)
        if node is None or node.op_type != "Constant":
            return None
        value = attributes(node).get("value")
        return None if value is None else numpy_helper.to_array(value)

    def integers(self, name: str) -> list[int] | None:
        """Return a constant list of integers, or one integer, as a list; None for any other value."""
        node = self.producers.get(name)
        if node is not None and node.op_type == "Unsqueeze":
            name = node.input[0]  # as the exporter writes a list of one number
        value = self.constant(name)
        return None if value is None else [int(number) for number in value.reshape(-1)]

    def sole_reader(self, name: str) -> onnx.NodeProto | None:
        """Return the node that reads a value, None if several do or if it is a result of the graph."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.outputs else None

    def add_constant(self, value: Any, dtype: Any) -> str:
        """Return the name of an initializer with a value, which is put into the graph once."""
        array = np.array(value, dtype=dtype)
        key = (str(array.dtype), str(array.tolist()))
        if key not in self._constants:
            self._constants[key] = f"{self._prefix}_{len(self._constants)}"
            self.graph.initializer.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def declare(self, name: str, elem_type: int, shape: list[int | str] | None) -> None:
        """Say what type a new value has."""
        self.graph.value_info.append(helper.make_tensor_value_info(name, elem_type, shape))


def swaps_two_dimensions(node: onnx.NodeProto) -> bool:
    """Return whether a node is a Transpose that swaps two dimensions, of a value that is known to have two."""
    return node.op_type == "Transpose" and list(attributes(node).get("perm", [1, 0])) == [1, 0]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node as Python values; strings as bytes."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}

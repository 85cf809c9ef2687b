"""Leaves tokens out of an exported graph that are padding, between embedding and results.

Linear layers, norms and activations run on packed rows; attention has all places, in which those of padding hold
another token's row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from ort_zero.errors import GraphEditError
from ort_zero.ortmodule.compat.torch_onnx import STOP_GRADIENT
from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, attributes
from ort_zero.ortmodule.onnx_edit.node_edits import (
    ATEN_DOMAIN,
    aten_node,
    copied,
    remove_unread_initializers,
    replace_field,
    with_values,
)
from ort_zero.ortmodule.onnx_edit.topology import captured_inputs, input_names, topological_order
from ort_zero.ortmodule.runtime.padding import operators
from ort_zero.ortmodule.runtime.padding.dependence import Dependence
from ort_zero.ortmodule.runtime.padding.operators import HIDES, name_of
from ort_zero.ortmodule.runtime.padding.states import MERGED, Mask, Rows, Tokens, Unproven

FLOAT = onnx.TensorProto.FLOAT
_ROWS = "ort_zero_rows"
"""Name of the dimension of packed rows."""


@dataclass(frozen=True, slots=True)
class DroppedPadding:
    """What became of the padding of a graph.

    Attributes:
        nodes: number of nodes that run on packed rows.
        why_not: why none does; "" if some do.
    """

    nodes: int
    why_not: str = ""


def drop_padding(model: onnx.ModelProto, losses: Mapping[str, tuple[int, int]], copies: str) -> DroppedPadding:
    """Let an exported model compute the rows of tokens that matter alone, in place.

    A token matters if any query attends to it, it has a label, or the graph reads it by its place. The graph stays as
    it is unless no other result than a row of a token itself can depend on those that are left out.

    Args:
        model: exported for the CPU, with the shapes of its values.
        losses: see :class:`ort_zero.ortmodule.runtime.padding.dependence.Dependence`.
        copies: see there.
    """
    nodes, why_not = 0, "no attention has a mask of its tokens"
    for number, tokens in enumerate(_found_tokens(model)):
        edited = copied(model)
        values = GraphValues(edited, f"ort_zero_padding_{number}")
        dependence = Dependence(values, tokens, losses, copies)
        refusal = _refusal(dependence)
        if not refusal:
            try:
                _Rewrite(edited, values, dependence, number).apply()
            except GraphEditError as error:
                refusal = str(error)
        if refusal:
            why_not = refusal
            continue
        nodes += len(dependence.row_nodes)
        model.CopyFrom(edited)
    return DroppedPadding(nodes, "" if nodes else why_not)


def _found_tokens(model: onnx.ModelProto) -> list[Tokens]:
    """Return the sizes of the sequences whose tokens attend to each other, each once, in the order of the graph."""
    values = GraphValues(model, "")
    found: dict[Tokens, None] = {}
    for node in model.graph.node:
        shape = values.shape(node.input[0]) if node.op_type == "Softmax" else None
        if shape and len(shape) == 4 and shape[-1] == shape[-2] and all(shape):
            found[Tokens(shape[0], shape[-1])] = None
    return list(found)


def _refusal(dependence: Dependence) -> str:
    """Return why the tokens that are padding cannot be left out; "" if they can."""
    if not dependence.row_nodes:
        return "nothing is computed token by token"
    for output in dependence.values.graph.output:
        state = dependence.state(output.name)
        if isinstance(state, Unproven):
            return f"the result {output.name!r} depends on all tokens: {state.why}"
        if state is not None and not isinstance(state, Rows):
            return f"the result {output.name!r} holds attention scores"
    return "" if dependence.needed.attentions else "no attention has a mask of its tokens"


class _Rewrite:
    """Puts packed rows into a graph, once.

    Args:
        model: is changed.
        values: of its graph.
        dependence: says which nodes run on rows.
        number: of the rewrite, for names.
    """

    def __init__(self, model: onnx.ModelProto, values: GraphValues, dependence: Dependence, number: int):
        self.model, self.graph, self.values, self.dependence = model, model.graph, values, dependence
        self.prefix = f"ort_zero_padding_{number}"
        self.dim = _ROWS if number == 0 else f"{_ROWS}_{number}"
        self.nodes: list[onnx.NodeProto] = []
        self.packed: dict[str, str] = {}
        """Names of packed values by those of whole ones."""
        self.whole: dict[str, str] = {}
        """Names of values with a row for each token, by the names that they had in the graph."""
        self.outputs = {output.name for output in self.graph.output}
        self.counts: set[str] = set()
        """Names of the sizes that the graph has already."""
        self.numbers = f"{self.prefix}_numbers"
        self.rows, self.places = f"{self.prefix}_rows", f"{self.prefix}_places"
        self.bools = {bool(flag): values.add_constant(flag, np.bool_) for flag in (False, True)}

    def apply(self) -> None:
        """Change the graph.

        Raises:
            GraphEditError: there is no order in which the nodes could run, as where a mask depends on what it hides.
        """
        operators.register()
        self._tokens()
        made = {name for node in self.dependence.row_nodes.values() for name in node.output if name}
        for node in self.graph.node:
            if id(node) in self.dependence.row_nodes:
                self._on_rows(node)
            elif not (node.op_type == "Shape" and self.dependence.state(node.input[0]) and self._sizes(node)):
                if made.intersection(captured_inputs(node)):
                    raise GraphEditError(f"a body of {node.name!r} reads tokens")
                inputs = [self._whole(name) if name in made else name for name in node.input]
                self.nodes.append(node if inputs == list(node.input) else with_values(node, inputs))
        for name in self.outputs & made:
            self._spread(name, name, "spread_zeros")
        ordered = topological_order(self.graph, self.nodes)
        read = {name for node in ordered for name in input_names(node)} | self.outputs
        # ONNX Runtime warns of each constant that nobody reads
        kept = [node for node in ordered if node.op_type != "Constant" or read.intersection(node.output)]
        replace_field(self.graph, "node", kept)
        named = {name for node in self.graph.node for name in node.output}
        remove_unread_initializers(self.graph)
        replace_field(self.graph, "value_info", [value for value in self.graph.value_info if value.name in named])
        if not any(opset.domain == ATEN_DOMAIN for opset in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(ATEN_DOMAIN, 1))

    # -- which tokens matter ---------------------------------------------------------------------------------------

    def _tokens(self) -> None:
        """Add the nodes that find the numbers of the tokens that matter."""
        tokens = self.dependence.tokens
        like = next(
            (given.name for given in self.graph.input
             if (self.values.shape(given.name) or [])[:2] == [tokens.sequences, tokens.length]), None,
        )  # fmt: skip
        if like is None:
            raise GraphEditError("no argument has the sizes of the tokens")
        sizes: list[int | str] = [tokens.sequences, tokens.length]
        self._add(self.numbers, name_of("numbers"), [like], onnx.TensorProto.INT64, sizes)
        found = [self._attended(masks, by_same) for masks, by_same in self._distinct()]
        for i, (labels, ignored, part) in enumerate(self.dependence.needed.labels):
            rows = self._numbers_of(part)
            constant = self.values.add_constant(ignored, np.int64)
            found.append(self._marked(f"labelled_{i}", "labelled", [self.numbers, rows, labels, constant]))
        for place in sorted(self.dependence.needed.places):
            constant = self.values.add_constant(place, np.int64)
            found.append(self._marked(f"placed_{place}", "placed", [self.numbers, constant]))
        marks = found[0]
        for i, more in enumerate(found[1:]):
            marks = self._marked(f"either_{i}", "either", [marks, more])
        self.nodes.append(aten_node(name_of("rows"), [marks], [self.rows, self.places], self.rows))
        self.values.declare(self.rows, onnx.TensorProto.INT64, [self.dim])
        self.values.declare(self.places, onnx.TensorProto.INT64, sizes)

    def _distinct(self) -> list[tuple[tuple[Mask, ...], bool]]:
        """Return the masks of the attentions, those that are the same once."""
        found = {
            (tuple(self._source(mask) for mask in masks), by_same): None
            for masks, by_same in self.dependence.needed.attentions
        }
        return list(found)

    def _source(self, mask: Mask) -> Mask:
        """Return what an addend is chosen by, where it is either 0 or hides: layers have an addend each."""
        node = self.values.producers.get(mask.value)
        if mask.hides is None and not mask.subtracted and node is not None and node.op_type == "Where":
            first, second = (self.values.constant(name) for name in node.input[1:])
            if first is not None and second is not None:
                hide = [bool((constant <= HIDES).all()) for constant in (first, second)]
                show = [bool((constant > HIDES).all()) for constant in (first, second)]
                if (hide[0] and show[1]) or (show[0] and hide[1]):
                    return Mask(node.input[0], hides=hide[0])
        return mask

    def _attended(self, masks: tuple[Mask, ...], by_same: bool) -> str:
        """Add the marks of an attention."""
        visible = ""
        for mask in masks:
            name, given = f"{self.prefix}_visible_{len(self.nodes)}", mask.value
            if mask.hides is None:  # a learned bias may be in it
                given, shape = f"{name}_of", self.values.shape(mask.value)
                self._add(given, STOP_GRADIENT, [mask.value], FLOAT, shape)
                if mask.subtracted:
                    less, given = given, f"{given}_negated"
                    self.nodes.append(helper.make_node("Neg", [less], [given], given))
                    self.values.declare(given, FLOAT, shape)
            shape = self.values.shape(mask.value)
            self._add(name, name_of("visible"), [given, self.bools[bool(mask.hides)]], onnx.TensorProto.UINT8, shape)
            if visible:
                one, visible = visible, f"{name}_both"
                self._add(visible, name_of("both"), [one, name], onnx.TensorProto.UINT8, None)
            else:
                visible = name
        return self._marked(f"attended_{len(self.nodes)}", "attended", [visible, self.numbers, self.bools[by_same]])

    def _marked(self, name: str, operator: str, inputs: list[str]) -> str:
        """Add a node that makes marks; return their name."""
        tokens = self.dependence.tokens
        result = f"{self.prefix}_{name}"
        shape = [2, tokens.sequences, tokens.length]
        self._add(result, name_of(operator), inputs, onnx.TensorProto.UINT8, shape)
        return result

    def _add(self, name: str, operator: str, inputs: list[str], elem_type: int, shape: list | None) -> None:
        """Add an ATen node with one result."""
        self.nodes.append(aten_node(operator, inputs, [name], name))
        self.values.declare(name, elem_type, shape)

    def _numbers_of(self, part: str) -> str:
        """Return the name of the numbers of the tokens of which there is a loss; "" is for all."""
        if not part:
            return self.numbers
        node, result = self.values.producers[part], f"{self.prefix}_numbers_of_{len(self.nodes)}"
        axes = attributes(node).get("axes")
        given = [self.numbers, *node.input[1:]]
        if axes is None and len(node.input) > 3:
            rank = len(self.values.shape(node.input[0]) or [])
            axes = [axis % rank for axis in self.values.integers(node.input[3]) or ()]
            given[3] = self.values.add_constant(axes, np.int64)
        self.nodes.append(helper.make_node("Slice", given, [result], result))
        self.values.declare(result, onnx.TensorProto.INT64, (self.values.shape(part) or [])[:2] or None)
        return result

    # -- what is computed of them ----------------------------------------------------------------------------------

    def _on_rows(self, node: onnx.NodeProto) -> None:
        """Add a node that works on packed rows in the place of one that works on all."""
        inputs = [self._input(node, name) for name in node.input]
        outputs = []
        for name in node.output:
            self.packed[name] = f"{name}_of_rows" if name else ""
            outputs.append(self.packed[name])
            if name:
                self._declare_packed(name, merged=self.dependence.state(name) == Rows(MERGED))
        if node.op_type == "Reshape":
            shape = self.values.shape(node.output[0]) or []
            lead = [-1, *shape[1:]] if self.dependence.state(node.output[0]) == Rows(MERGED) else [1, -1, *shape[2:]]
            inputs[1] = self.values.add_constant(lead, np.int64)
        self.nodes.append(with_values(node, inputs, outputs))

    def _declare_packed(self, name: str, *, merged: bool) -> None:
        shape = self.values.shape(name)
        if not self.values.element_type(name):
            return
        lead = [self.dim, *shape[1:]] if shape and merged else [1, self.dim, *shape[2:]] if shape else None
        self.values.declare(self.packed[name], self.values.element_type(name), lead)

    def _input(self, node: onnx.NodeProto, name: str) -> str:
        """Return the name of an operand of a node that works on packed rows."""
        merged = self.dependence.has_tokens(node, name) if name else None
        if merged is None:
            return name
        if name in self.packed:
            return self.packed[name]
        result = self.packed[name] = f"{name}_packed"
        given = [name, self.rows, self.places, self.bools[merged]]
        self.nodes.append(aten_node(name_of("pack"), given, [result], result))
        self._declare_packed(name, merged=merged)
        return result

    def _whole(self, name: str) -> str:
        """Return the name of a packed value with a row for each token."""
        if name not in self.whole:
            self.whole[name] = f"{name}_spread"
            self._spread(name, self.whole[name], "spread")
        return self.whole[name]

    def _spread(self, name: str, result: str, operator: str) -> None:
        merged = self.dependence.state(name) == Rows(MERGED)
        given = [self.packed[name], self.rows, self.places, self.bools[merged]]
        self.nodes.append(aten_node(name_of(operator), given, [result], result))
        if result != name:
            self.values.declare(result, self.values.element_type(name), self.values.shape(name))

    def _sizes(self, node: onnx.NodeProto) -> bool:
        """Add nodes for the sizes of a value that depends on tokens, without reading it; return whether they are known.

        Masks are made from such sizes, and packed rows from masks.
        """
        tokens, result = self.dependence.tokens, node.output[0]
        shape, given = self.values.shape(node.input[0]), attributes(node)
        names = []
        for size in (shape or [""])[slice(given.get("start", 0), given.get("end"))]:
            if isinstance(size, int):
                names.append(self.values.add_constant([size], np.int64))
            elif size in (tokens.sequences, tokens.length):
                names.append(self._count("sequences" if size == tokens.sequences else "length"))
            elif size in tokens.products():
                names.append(self._count("all"))
            else:
                return False
        self.nodes.append(helper.make_node("Concat", names, [result], result, axis=0))
        return bool(names)

    def _count(self, what: str) -> str:
        """Return the name of a list of one number: of the sequences, the places in one, or all tokens."""
        result = f"{self.prefix}_{what}"
        if result in self.counts:
            return result
        self.counts.add(result)
        if what == "all":
            self.nodes.append(helper.make_node("Size", [self.numbers], [f"{result}_0"], f"{result}_0"))
            axes = self.values.add_constant([0], np.int64)
            self.nodes.append(helper.make_node("Unsqueeze", [f"{result}_0", axes], [result], result))
            return result
        sizes, index = f"{result}_0", self.values.add_constant([0 if what == "sequences" else 1], np.int64)
        self.nodes.append(helper.make_node("Shape", [self.numbers], [sizes], sizes))
        self.nodes.append(helper.make_node("Gather", [sizes, index], [result], result, axis=0))
        return result

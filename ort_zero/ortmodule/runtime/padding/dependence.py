"""Proves that tokens which are not computed reach nothing that matters, node by node of an exported graph.

Some values hold, for each token, what depends on that token and on those alone that are computed (``Rows`` in
:mod:`.runtime.padding.states`). If some tokens are left out, nothing else of such a value changes. Attention
scores (``Scores``) have the token as a key in their last dimension; once a mask is added that hides it, and the softmax
is taken, its weight is 0 (``Weights``), and the product with the values holds rows of the queries again. A value of any
other form depends on tokens that are left out (``Unproven``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import onnx

from ort_zero.ortmodule.onnx_edit.graph_values import GraphValues, attributes
from ort_zero.ortmodule.onnx_edit.node_edits import ATEN_DOMAIN
from ort_zero.ortmodule.onnx_edit.topology import input_names
from ort_zero.ortmodule.runtime.padding.operators import HIDES
from ort_zero.ortmodule.runtime.padding.states import (
    MERGED,
    Mask,
    Needed,
    Rows,
    Scores,
    State,
    Tokens,
    Unproven,
    Weights,
)

ELEMENTWISE = frozenset(
    "Abs Add And BiasGelu Cast Ceil Celu Clip Cos Div Dropout Elu Equal Erf Exp FastGelu Floor Gelu Greater "
    "GreaterOrEqual HardSigmoid HardSwish Identity LeakyRelu Less LessOrEqual Log Max Min Mish Mod Mul Neg Not Or Pow "
    "QuickGelu Reciprocal Relu Round Selu Sigmoid Sign Sin Softplus Softsign Sqrt Sub Tanh Where Xor".split()
)
"""Operators whose results have at each place what their operands have there."""
STARTS = frozenset({"MatMul", "Gemm", "LayerNormalization", "SimplifiedLayerNormalization", "Dropout"})
"""Operators from which on it pays to leave tokens out."""
_LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "SoftmaxCrossEntropyLossInternal"})
_REDUCTIONS = frozenset(
    "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp".split()
)
_KEEPS_ZEROS = frozenset({"Cast", "Dropout", "Identity"})
_IN_ROW = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "Softmax", "LogSoftmax", "LpNormalization"})
"""Operators along one axis that give each row a result of its sizes."""
_RUN_ON_ROWS = _IN_ROW | _REDUCTIONS | {"Gemm", "Slice", "Split"}
"""Operators that can run on some rows as they stand, where they leave the dimensions of the tokens alone."""
_RULES = {
    "MatMul": "_matmul",
    "Gemm": "_gemm",
    "Transpose": "_transpose",
    "Reshape": "_reshape",
    "Expand": "_expand",
    "Unsqueeze": "_unsqueeze",
    "Squeeze": "_squeeze",
    "Concat": "_along",
    "Split": "_along",
    "Gather": "_gather",
    "Slice": "_slice",
}
"""Methods of :class:`Dependence` that tell what an operator's results hold."""


class Dependence:
    """The states of all values of a graph.

    Args:
        values: of the graph; its nodes stand in an order in which they can run.
        tokens: sizes of what holds something of each token.
        losses: operators of ATen nodes by name, which compute a loss: the numbers of the inputs with rows and labels;
            the label that is ignored follows behind those.
        copies: operator of an ATen node that copies its input.
    """

    def __init__(self, values: GraphValues, tokens: Tokens, losses: Mapping[str, tuple[int, int]], copies: str):
        self.values = values
        self.tokens = tokens
        self.needed = Needed()
        self.states: dict[str, State] = {}
        self.row_nodes: dict[int, onnx.NodeProto] = {}
        """Nodes that work row by row on tokens in the leading dimensions, by their ids: they can run on some rows."""
        self._losses, self._copies = losses, copies
        packed: set[str] = set()
        for node in values.graph.node:
            if self._starts(node):
                self.states[node.input[0]] = Rows(1 if tokens.lead(values.shape(node.input[0])) else MERGED)
                found = self._results(node)
                # its operand is complete: only what comes of it is computed for some tokens alone
                del self.states[node.input[0]]
            else:
                found = self._results(node)
            for name, state in zip(node.output, found, strict=True):
                if name and state is not None:
                    self.states[name] = state
            if self._runs_on_rows(node, packed):
                self.row_nodes[id(node)] = node
                packed.update(name for name in node.output if name)

    def state(self, name: str) -> State:
        """Return what is known of a value."""
        return self.states.get(name)

    def leads(self, name: str) -> bool:
        """Return whether a value has tokens in its leading dimensions, all of them."""
        return self.state(name) in (Rows(1), Rows(MERGED))

    # -- where it begins -------------------------------------------------------------------------------------------

    def _starts(self, node: onnx.NodeProto) -> bool:
        """Return whether tokens are left out from this node on, though its operands have all of them."""
        if node.domain == ATEN_DOMAIN or node.op_type not in STARTS or any(self.state(name) for name in node.input):
            return False
        shape = self.values.shape(node.input[0])
        if self.values.element_type(node.input[0]) != onnx.TensorProto.FLOAT:
            return False
        if node.op_type == "MatMul":
            right = self.values.shape(node.input[1])
            return self.tokens.lead(shape) and right is not None and len(right) == 2
        return self.tokens.merged(shape) if node.op_type == "Gemm" else self.tokens.lead(shape)

    def _runs_on_rows(self, node: onnx.NodeProto, packed: set[str]) -> bool:
        """Return whether a node can run on the rows of some tokens, and should."""
        given, results = ([name for name in names if name] for names in (node.input, node.output))
        if node.domain == ATEN_DOMAIN or not all(self.leads(name) for name in results):
            return False
        if any(self.state(name) is not None and not self.leads(name) for name in given):
            return False
        if node.op_type == "Reshape":
            shape = self._shape(node.output[0])
            rest = shape[1:] if self.state(node.output[0]) == Rows(MERGED) else shape[2:]
            fits = all(isinstance(size, int) for size in rest)
        elif node.op_type in ELEMENTWISE:
            fits = all(self._fits_rows(node, name) for name in given)
        elif node.op_type == "MatMul":
            fits = len(self._shape(node.input[1])) == 2
        elif node.op_type == "Concat":
            fits = all(self.leads(name) for name in given)
        else:
            fits = node.op_type in _RUN_ON_ROWS
        return fits and (node.op_type in STARTS or any(name in packed for name in given))

    def _fits_rows(self, node: onnx.NodeProto, name: str) -> bool:
        """Return whether an operand has all tokens, or none, in the dimensions that have them in the result."""
        if self.has_tokens(node, name) is not None:
            return True
        shape, of_result = self.values.shape(name), self.values.shape(node.output[0])
        if shape is None or of_result is None:
            return False
        dims = 1 if self.state(node.output[0]) == Rows(MERGED) else 2
        return all(size == 1 for size in shape[: max(0, dims - len(of_result) + len(shape))])

    def has_tokens(self, node: onnx.NodeProto, name: str) -> bool | None:
        """Return whether an operand of a node that works row by row has the tokens in one dimension (True) or in two.

        Returns:
            None if it has nothing of each token.
        """
        state = self.state(name)
        if state is not None:
            return state == Rows(MERGED)
        shape, of_result = self._shape(name), self._shape(node.output[0])
        if name != node.input[0] and (node.op_type not in ELEMENTWISE or len(shape) != len(of_result)):
            return None
        if self.state(node.output[0]) == Rows(MERGED):
            return True if self.tokens.merged(shape) else None
        return False if self.tokens.lead(shape) else None

    # -- the rules -------------------------------------------------------------------------------------------------

    def _results(self, node: onnx.NodeProto) -> list[State]:
        """Return what is known of the results of a node."""
        states = {name: state for name in input_names(node) if (state := self.state(name)) is not None}
        count = len(node.output)
        if not states or node.op_type in ("Shape", "Size"):
            return [None] * count
        unproven = next((state for state in states.values() if isinstance(state, Unproven)), None)
        if unproven is not None:
            return [unproven] * count
        rule: Callable[[onnx.NodeProto], list[State] | None] | None
        if node.domain == ATEN_DOMAIN:
            rule = self._aten
        elif node.op_type in ELEMENTWISE:
            rule = self._elementwise
        elif node.op_type in _LOSSES:
            rule = self._loss
        elif node.op_type in _REDUCTIONS:
            rule = self._reduction
        elif node.op_type in _IN_ROW:
            rule = self._in_row
        else:
            rule = getattr(self, _RULES[node.op_type]) if node.op_type in _RULES else None
        found = rule(node) if rule is not None else None
        if found is not None:
            return found
        return [Unproven(f"{node.op_type} {node.name!r} may read tokens that are padding")] * count

    def _shape(self, name: str) -> list[int | str]:
        """Return the sizes of a value, none where they are not known."""
        return self.values.shape(name) or []

    def _axes(self, node: onnx.NodeProto, at: int) -> list[int] | None:
        """Return the axes of a node, from 0: an attribute, or the input with the number `at`; None if not known."""
        rank = len(self._shape(node.input[0]))
        found = attributes(node).get("axes")
        if len(node.input) > at and node.input[at]:
            found = self.values.integers(node.input[at])
        return None if found is None or not rank else [axis % rank for axis in found]

    def _aten(self, node: onnx.NodeProto) -> list[State] | None:
        operator = attributes(node)["operator"].decode()
        if operator == self._copies:
            return [self.state(node.input[0])]
        if operator not in self._losses:
            return None
        rows, labels = (node.input[at] for at in self._losses[operator])
        ignored = self.values.integers(node.input[self._losses[operator][1] + 1])
        others = [name for name in node.input if name != rows and self.state(name) is not None]
        if others or ignored is None or not self._label(rows, labels, ignored[0]):
            return None
        return [None] * len(node.output)

    def _label(self, rows: str, labels: str, ignored: int) -> bool:
        """Note that rows with a label are needed; return whether that can be told."""
        state = self.state(rows)
        if not isinstance(state, Rows) or state.token > 1 or self.state(labels) is not None:
            return False
        self.needed.labels.append((labels, ignored, state.numbers))
        return True

    def _loss(self, node: onnx.NodeProto) -> list[State] | None:
        rows, labels, *more = [name for name in node.input if name]
        given = attributes(node)
        if any(self.state(name) is not None for name in more):
            return None
        rest: list[State] = [self.state(rows)] * (len(node.output) - 1)
        if given.get("reduction", b"mean") == b"none":
            return [self.state(rows), *rest]
        ignored: int | None = given.get("ignore_index", -100)
        if len(node.input) > 3 and node.input[3]:
            constant = self.values.integers(node.input[3])
            ignored = None if constant is None else constant[0]
        state = self.state(rows)
        if not isinstance(state, Rows) or state.token != MERGED or ignored is None:
            return None  # classes are the second dimension, whatever follows
        if not self._label(rows, labels, ignored):
            return None
        return [None, *rest]

    def _elementwise(self, node: onnx.NodeProto) -> list[State] | None:
        states = [(name, state) for name in node.input if name and (state := self.state(name)) is not None]
        name, first = states[0]
        if isinstance(first, Rows):
            whole = len(self._shape(node.output[0]))
            same = all(state == first and len(self._shape(one)) == whole for one, state in states)
            return [first] * len(node.output) if same and whole else None
        if len(states) > 1:
            return None
        if isinstance(first, Weights):
            if len(self._shape(node.output[0])) != 4:
                return None
            scaled = node.op_type == "Mul" or (node.op_type == "Div" and name == node.input[0])
            return [first] * len(node.output) if scaled or node.op_type in _KEEPS_ZEROS else None
        assert isinstance(first, Scores)
        masks = self._masked(node, name, first)
        if masks is None or len(self._shape(node.output[0])) != 4:
            return None
        return [Scores(first.by_same, masks)] * len(node.output)

    def _masked(self, node: onnx.NodeProto, scores: str, state: Scores) -> tuple[Mask, ...] | None:
        """Return the masks of scores behind an elementwise node; None if a key that they hide might be seen again."""
        if node.op_type in ("Cast", "Identity"):
            return state.masks
        others = [name for name in node.input if name and name != scores]
        if node.op_type == "Add" or (node.op_type == "Sub" and node.input[0] == scores):
            per_key = self._shape(others[0])[-1:] == [self.tokens.length]
            return (*state.masks, Mask(others[0], subtracted=node.op_type == "Sub")) if per_key else state.masks
        if node.op_type == "Where" and node.input[0] != scores:
            constant = self.values.constant(others[-1])
            if constant is not None and (constant <= HIDES).all():
                return (*state.masks, Mask(node.input[0], hides=node.input[2] == scores))
        return None if state.masks or node.op_type in ("Dropout", "Where") else ()

    def _in_row(self, node: onnx.NodeProto) -> list[State] | None:
        state, rank = self.state(node.input[0]), len(self._shape(node.input[0]))
        if any(self.state(name) is not None for name in node.input[1:]) or not rank:
            return None
        axis = attributes(node).get("axis", -1) % rank
        if isinstance(state, Scores) and node.op_type == "Softmax" and axis == rank - 1 and state.masks:
            self.needed.attentions.append((state.masks, state.by_same))
            return [Weights(state.by_same)]
        if not isinstance(state, Rows) or state.numbers:
            return None
        # a normalization reads all dimensions from its axis on
        several = node.op_type.endswith("LayerNormalization")
        touched = set(range(axis, rank)) if several else {axis}
        return None if touched & state.axes else [state] * len(node.output)

    def _reduction(self, node: onnx.NodeProto) -> list[State] | None:
        state, axes = self.state(node.input[0]), self._axes(node, 1)
        if not isinstance(state, Rows) or axes is None or set(axes) & state.axes:
            return None
        keeps = attributes(node).get("keepdims", 1)
        return [state if keeps else Rows(state.token - sum(axis < state.token for axis in axes), state.numbers)]

    def _matmul(self, node: onnx.NodeProto) -> list[State] | None:
        left, right = (self.state(name) for name in node.input)
        ranks = [len(self._shape(name)) for name in node.input]
        last = [rank - 1 for rank in ranks]
        if right is None and isinstance(left, Rows):
            return [left] if ranks[0] >= ranks[1] and left.token < last[0] else None
        if right is None and isinstance(left, Weights):
            return [Rows(last[0] - 1)] if left.by_same and ranks[0] >= ranks[1] else None
        if ranks != [4, 4] or not isinstance(right, Rows) or right.numbers:
            return None
        if right.token == last[1] and (left is None or left == Rows(last[0] - 1)):
            return [Scores(left is not None)] if self._shape(node.output[0])[:1] == [self.tokens.sequences] else None
        if isinstance(left, Weights) and right.token == last[1] - 1:
            return [Rows(last[0] - 1) if left.by_same else None]
        return None

    def _gemm(self, node: onnx.NodeProto) -> list[State] | None:
        given = attributes(node)
        others = node.input[1:]
        addend = self._shape(node.input[2]) if len(node.input) > 2 and node.input[2] else []
        alone = self.state(node.input[0]) == Rows(MERGED) and not any(self.state(name) for name in others)
        fits = len(addend) < 2 or addend[0] == 1
        return [self.state(node.input[0])] if alone and fits and not given.get("transA") else None

    def _transpose(self, node: onnx.NodeProto) -> list[State] | None:
        state, order = self.state(node.input[0]), list(attributes(node).get("perm", ()))
        if not isinstance(state, Rows) or not order or order[0] != 0:
            return None
        return [Rows(order.index(state.token), state.numbers)]

    def _reshape(self, node: onnx.NodeProto) -> list[State] | None:
        state = self.state(node.input[0])
        before, after = self._shape(node.input[0]), self._shape(node.output[0])
        if before == after and before:
            return [state]
        if not isinstance(state, Rows) or not before or not after:
            return None
        if state.numbers:
            # all rows of a part, one after the other, with the same numbers
            return [Rows(MERGED, state.numbers)] if state.token == 1 and len(before) == 3 and len(after) == 2 and (
                before[-1] == after[-1]) else None  # fmt: skip
        both = [self.tokens.sequences, self.tokens.length]
        if before[:2] == both and state.token == 1 and after[0] in self.tokens.products():
            return [Rows(MERGED)] if _product(before[2:]) == _product(after[1:]) else None
        if state.token == MERGED and after[:2] == both:
            return [Rows(1)] if _product(before[1:]) == _product(after[2:]) else None
        return self._same_axes(state, before, after)

    def _same_axes(self, state: Rows, before: list[int | str], after: list[int | str]) -> list[State] | None:
        """Return the state of a value in another shape if sequences and places keep a dimension each."""
        if before[0] != after[0]:
            return None
        if state.token == MERGED:
            return [state] if _product(before[1:]) == _product(after[1:]) else None
        size = self.tokens.length
        for axis in (axis for axis in range(1, len(after)) if after[axis] == size):
            same_before = _product(before[1 : state.token]) == _product(after[1:axis])
            if same_before and _product(before[state.token + 1 :]) == _product(after[axis + 1 :]):
                return [Rows(axis, state.numbers)]
        return None

    def _expand(self, node: onnx.NodeProto) -> list[State] | None:
        state = self.state(node.input[0])
        before, after = self._shape(node.input[0]), self._shape(node.output[0])
        if not isinstance(state, Rows) or len(after) != len(before) or not before:
            return None
        return [state] if all(before[axis] == after[axis] for axis in state.axes) else None

    def _unsqueeze(self, node: onnx.NodeProto) -> list[State] | None:
        state, rank = self.state(node.input[0]), len(self._shape(node.output[0]))
        axes = attributes(node).get("axes") or (self.values.integers(node.input[1]) if len(node.input) > 1 else None)
        if not isinstance(state, Rows) or axes is None or not rank:
            return None
        new = {axis % rank for axis in axes}
        old = [axis for axis in range(rank) if axis not in new]
        if old[0] != 0:
            return None
        return [Rows(old[state.token], state.numbers)]

    def _squeeze(self, node: onnx.NodeProto) -> list[State] | None:
        state, axes = self.state(node.input[0]), self._axes(node, 1)
        if not isinstance(state, Rows) or axes is None or set(axes) & state.axes:
            return None
        return [Rows(state.token - sum(axis < state.token for axis in axes), state.numbers)]

    def _along(self, node: onnx.NodeProto) -> list[State] | None:
        """Return the states of Concat and Split."""
        found = [self.state(name) for name in node.input if name and self.state(name) is not None]
        if node.op_type == "Concat" and len(node.input) == 1:
            return list(found)
        state, rank = found[0], len(self._shape(node.input[0]))
        if not isinstance(state, Rows) or any(one != state for one in found) or not rank:
            return None
        inside = attributes(node).get("axis", 0) % rank in state.axes
        return None if inside else [state] * len(node.output)

    def _gather(self, node: onnx.NodeProto) -> list[State] | None:
        state, rank = self.state(node.input[0]), len(self._shape(node.input[0]))
        if not isinstance(state, Rows) or not rank or self.state(node.input[1]) is not None or state.numbers:
            return None
        axis, more = attributes(node).get("axis", 0) % rank, len(self._shape(node.input[1])) - 1
        if axis == state.token and axis:
            places = None if self.values.constant(node.input[1]) is None else self.values.integers(node.input[1])
            self.needed.places.update(places or ())
            return [None] if places else None
        if axis in state.axes:
            return None
        return [Rows(state.token + (more if axis < state.token else 0))]

    def _slice(self, node: onnx.NodeProto) -> list[State] | None:
        state, axes = self.state(node.input[0]), self._axes(node, 3)
        if not isinstance(state, Rows) or axes is None:
            return None
        if not set(axes) & state.axes:
            return [state]
        if state.token != 1 or state.numbers or max(axes) > 1:
            return None
        starts, ends = (self.values.integers(name) for name in node.input[1:3])
        if axes == [1] and starts == [0] and ends == [1]:
            self.needed.places.add(0)
            return [None]
        return [Rows(1, node.output[0])]


def _product(sizes: Sequence[int | str]) -> tuple[int, tuple[str, ...]]:
    """Return the product of sizes: of the numbers, and the names that are left, in order."""
    return math.prod(size for size in sizes if isinstance(size, int)), tuple(
        sorted(size for size in sizes if isinstance(size, str))
    )

"""Rules of ORT's symbolic shape inference that replace upstream's; imports onnxruntime."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper
from onnxruntime.tools import symbolic_shape_infer as upstream

from ort_zero.ortmodule.compat.broadcast_operators import BROADCAST
from ort_zero.ortmodule.compat.ort_kernels import UNFOLD
from ort_zero.ortmodule.compat.torch_onnx import STOP_GRADIENT


class LastingShapeInference(upstream.SymbolicShapeInference):
    """Gives unknown sizes to the results of an operator whose rule fails, where upstream stops.

    Set :attr:`infer_python_op` before the model is inferred.
    """

    infer_python_op: Callable
    """``(node, input shapes, input types) -> output shapes or None`` for the nodes of PyTorch functions."""

    def __init__(self, *args):
        super().__init__(*args)
        self.input_symbols: frozenset[str] = frozenset()
        """Those of the sizes of the graph's inputs."""
        self.input_axes: dict[str, int] = {}
        """Axis of an input whose size each of them is."""
        self.traced_sizes: Mapping[str, int] = {}
        """Sizes in the call that was traced, by their symbols; to be set as well."""
        self.least: dict[str, int] = {}
        """Sizes that symbols of inputs have at least."""
        self.taken_for_equal: list[tuple] = []
        """Symbols and numbers that operators were taken to need equal."""
        self.aten_op_dispatcher_[STOP_GRADIENT] = self._pass_on_shape_and_type
        self.aten_op_dispatcher_[BROADCAST] = self._infer_broadcast
        self.aten_op_dispatcher_[UNFOLD] = self._infer_aten_unfold
        self.dispatcher_["Mod"] = self._infer_Mod
        for table in (self.dispatcher_, self.aten_op_dispatcher_):
            for name, rule in table.items():
                table[name] = self._guarded(rule)

    def infer_all(self, model) -> None:
        """Infer `model`; the result is in ``out_mp_``."""
        shapes = [given.type.tensor_type.shape.dim for given in model.graph.input]
        self.input_axes = {dim.dim_param: axis for sizes in shapes for axis, dim in enumerate(sizes) if dim.dim_param}
        self.input_symbols = frozenset(self.input_axes)
        self._preprocess(model)
        while self.run_:
            before = dict(self.suggested_merge_)
            self._infer_impl()
            if self.suggested_merge_ == before:
                # upstream would try for ever to find the sizes of one node equal, and not get to the next; without
                # this it stops at the first node with an unknown size, so that from now on each gets a symbol
                self.auto_merge_ = False
        self._update_output_from_vi()

    def shape_of(self, name: str) -> list | None:
        """Return the sizes of a value, each a number, a symbol or a formula; None if they are unknown."""
        info = self.known_vi_.get(name)
        return upstream.get_shape_from_value_info(info) if info is not None else None

    def known_size(self, a: Any, b: Any) -> Any:
        """Return the size of what is broadcast from two sizes of which neither is 1 for sure; None if it is unknown."""
        for size in (a, b):
            if isinstance(size, int):
                return size
        return next((size for size in (a, b) if self.traced_sizes.get(size, 0) > 1), None)

    def _guarded(self, rule):
        @functools.wraps(rule)
        def run(node):
            try:
                rule(node)
            except Exception:
                for i, name in enumerate(node.output):
                    self.sympy_data_.pop(name, None)
                    self._set_unknown(node, i)

        return run

    def _onnx_infer_single_node(self, node):
        super()._onnx_infer_single_node(node)
        if self.auto_merge_:
            return
        for i, name in enumerate(node.output):
            shape = (self.shape_of(name) if name else None) or []
            unknown = [size is None or self._is_none_dim(size) for size in shape]
            if any(unknown):
                kind = self.known_vi_[name].type.tensor_type.elem_type
                sizes = [self._new_size(node, axis, i) if unknown[axis] else size for axis, size in enumerate(shape)]
                self.known_vi_[name].CopyFrom(helper.make_tensor_value_info(name, kind, sizes))

    def _set_unknown(self, node, i):
        """Give result `i` unknown sizes; where not even its type is known, those of the first argument."""
        if not node.output[i]:
            return
        info = self.known_vi_[node.output[i]]
        if info.type.WhichOneof("value") not in (None, "tensor_type"):
            return
        kind = info.type.tensor_type
        if not kind.elem_type:
            kind = self.known_vi_[node.input[0]].type.tensor_type
        if kind.elem_type and kind.HasField("shape"):
            sizes = upstream.get_shape_from_sympy_shape(self._new_symbolic_shape(len(kind.shape.dim), node, i))
            info.CopyFrom(helper.make_tensor_value_info(info.name or node.output[i], kind.elem_type, sizes))

    def _infer_broadcast(self, node):
        own, other = self._get_shape(node, 0), self._try_get_value(node, 2)
        kept = int(self._get_value(node, 3))
        last, own = own[len(own) - kept :], own[: len(own) - kept]
        if other is None:
            other = self._new_symbolic_shape(int(self._get_shape(node, 2)[0]), node)
        other = upstream.get_shape_from_sympy_shape(other)[: len(other) - kept]
        rank = max(len(own), len(other))
        pairs = zip([1] * (rank - len(own)) + own, [1] * (rank - len(other)) + other, strict=True)
        sizes = [
            a if b in (a, 1) else b if a == 1 else self.known_size(a, b) or self._new_size(node, axis)
            for axis, (a, b) in enumerate(pairs)
        ]
        kind = self.known_vi_[node.input[0]].type.tensor_type.elem_type
        self.known_vi_[node.output[0]].CopyFrom(helper.make_tensor_value_info(node.output[0], kind, sizes + last))

    def _new_size(self, node, axis, i=0):
        return str(self._new_symbolic_dim_from_output(node, i, axis))

    def _infer_Mod(self, node):
        if not upstream.get_attribute(node, "fmod", 0):
            self._compute_on_sympy_data(node, lambda values: upstream.sympy.Mod(*values))

    def _infer_ReduceProd(self, node):
        values = upstream.as_list(self._try_get_value(node, 0), keep_none=True)
        if values is not None and len(self._get_shape(node, 0)) == 1:
            product = upstream.sympy_reduce_product(values)
            self.sympy_data_[node.output[0]] = [product] if upstream.get_attribute(node, "keepdims", 1) else product

    def _infer_Slice(self, node):
        super()._infer_Slice(node)
        starts, ends, axes, steps = (
            upstream.as_list(self._try_get_value(node, i), keep_none=True) for i in range(1, 5)
        )
        if starts is None or ends is None:
            return
        given, sizes = self._get_shape(node, 0), self.shape_of(node.output[0]) or []
        for i, (start, end) in enumerate(zip(starts, ends, strict=True)):
            axis, step = axes[i] if axes else i, steps[i] if steps else 1
            if isinstance(given[axis], str) and step > 0:
                sizes[axis] = self._slice_size(given[axis], start, end, step, sizes[axis])
        kind = self.known_vi_[node.input[0]].type.tensor_type.elem_type
        self.known_vi_[node.output[0]].CopyFrom(helper.make_tensor_value_info(node.output[0], kind, sizes))

    def _slice_size(self, size, start, end, step, found):
        """Return the size of a slice of `size`; `found` is what upstream finds.

        Upstream does not see that ``x[3:4]`` has the size 1, takes an end of which it does not know whether it is
        beyond the size for the size, and ``x[-2:]`` for two places where there is only one.
        """
        traced, whole = self.traced_sizes.get(size, 0), self.symbolic_dims_[size]
        is_counted_back = upstream.is_literal(start) and start < -1
        if upstream.is_literal(end):
            if step == 1 and 0 < start and end - start == 1 and traced >= end:
                return self._at_least(size, end, 1)
            if not is_counted_back:
                return found
            if traced >= -start:
                return self._at_least(size, -start, found)
            last = whole if end >= self.int_max_ else whole + end if end < 0 else upstream.sympy.Min(end, whole)
        elif not is_counted_back and (step > 1 or (whole - end).is_nonnegative or whole - end == 0):
            return found
        else:
            last = upstream.sympy.Min(end, whole)
        first = upstream.sympy.Max(whole + start, 0) if is_counted_back else start
        formula = upstream.sympy.simplify((last - first + step - 1) // step)
        self._update_computed_dims([formula])
        return str(formula)

    def _at_least(self, size, least, result):
        """Return `result`, which holds if a size of the inputs is at least `least`: that is noted."""
        self.least[size] = max(least, self.least.get(size, 0))
        return result

    def _infer_PythonOp(self, node):
        attributes = {a.name: a for a in node.attribute}
        ranks = list(attributes["output_tensor_ranks"].ints)
        types = list(attributes["output_tensor_types"].ints)
        self.known_vi_[node.output[0]].CopyFrom(helper.make_tensor_value_info(node.output[0], TensorProto.INT64, []))
        shapes = [self._get_shape(node, i) for i in range(len(node.input))]
        kinds = [self.known_vi_[name].type.tensor_type.elem_type for name in node.input]
        found = self.infer_python_op(node, shapes, kinds)
        for i, (rank, kind) in enumerate(zip(ranks, types, strict=True)):
            sizes = list(found[i]) if found is not None else [None] * rank
            for axis, size in enumerate(sizes):
                if size is None or (isinstance(size, str) and size not in self.symbolic_dims_):
                    sizes[axis] = str(self._new_dim(node, i, axis))
            name = node.output[i + 1]
            self.known_vi_[name].CopyFrom(helper.make_tensor_value_info(name, kind, sizes))

    def _new_dim(self, node, i, axis):
        # the names are parsed as formulas elsewhere
        return self._new_symbolic_dim(re.sub(r"\W", "_", node.name) + f"_o{i}_d", axis)

    def _add_suggested_merge(self, symbols, apply=False):
        # upstream asserts that every size is a number or a known symbol; formulas and unknown sizes are neither
        known = [s for s in symbols if s is not None and (upstream.is_literal(s) or s in self.symbolic_dims_)]
        if len({str(s) for s in known if upstream.is_literal(s)}) <= 1 < len(known):
            self.taken_for_equal.append(tuple(known))
            super()._add_suggested_merge(known, apply)

    def _get_int_or_float_values(self, node, broadcast=False, allow_float_values=False):
        for i in range(len(node.input)):
            value = self._try_get_value(node, i)
            array = np.asarray(value) if value is not None and not isinstance(value, list) else None
            if array is not None and array.dtype.kind == "f" and not np.isfinite(array).all():
                return [None] * len(node.input)  # masks hold infinities, which are no sizes
        return super()._get_int_or_float_values(node, broadcast, allow_float_values)

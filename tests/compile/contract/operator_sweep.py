"""Run the operators of torch's OpInfo table compiled and eager, sample by sample, and compare results and gradients.

As a program, write the page on which runtime runs which operator: ``python tests/compile/contract/operator_sweep.py``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.settings import Settings

# importing the table forbids the process to change settings of torch, which other tests do
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

OPERATORS = {
    f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op
    for op in op_db
    if not op.name.startswith("jiterator")  # CUDA alone
}
UNWRITTEN = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split()
)
"""Operators whose results nobody has written: only their sizes and dtypes are compared."""
TOLERANCES = {
    torch.float32: ((1e-4, 1e-5), (1e-3, 1e-4)),
    torch.float64: ((1e-7, 1e-7), (1e-6, 1e-6)),
    torch.bfloat16: ((1.6e-2, 1e-5), (1.6e-2, 1e-5)),
}
"""Relative and absolute tolerance of results, and of gradients, by the dtype of the samples."""


@dataclass(slots=True)
class Outcome:
    """What became of the samples of one operator."""

    name: str
    right: int = 0
    skipped: int = 0
    """Samples that PyTorch itself refuses."""
    faults: list[str] = field(default_factory=list)
    in_ort: bool = False
    """Whether ONNX Runtime ran a segment."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why PyTorch ran other operators of the graphs, by overload."""


@dataclass(slots=True)
class _Results:
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    """The tensors that were passed, after the call."""


def sweep(name: str, dtype: torch.dtype, most: int | None = None) -> Outcome:
    """Return what became of the samples of one operator.

    Args:
        name: the operator's name in OPERATORS.
        dtype: the dtype of the samples.
        most: number of samples to run, spread over all of them; None runs all.
    """
    op = OPERATORS[name]
    outcome = Outcome(name)
    gradients = dtype.is_floating_point and op.supports_autograd and op.supports_dtype(dtype, "cpu")
    torch.manual_seed(0)
    with _quiet():
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
        step = 1 if most is None else max(1, math.ceil(len(samples) / most))
        for index in range(0, len(samples), step):
            _run(outcome, op, samples[index], index, dtype)
    return outcome


def _run(outcome: Outcome, op: Any, sample: Any, index: int, dtype: torch.dtype) -> None:
    def call(first: Any, args: Any, kwargs: Any) -> Any:
        return op.op(first, *args, **kwargs)

    try:
        expected = _results(call, sample)
    except Exception:
        outcome.skipped += 1
        return
    torch._dynamo.reset()
    compiler = Compiler(Settings(place="ort", verify="off", reproducers=os.devnull))
    try:
        _compare(outcome.name, _results(torch.compile(call, backend=compiler), sample), expected, dtype)
        record = compiler.record.as_dict()
        fault = "; ".join(record["failed"].values())
        fault += "no session" * ("excluded" in record["reasons"].values())
    except Exception as error:
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    outcome.in_ort |= any(segment.in_ort for graph in compiler.record.graphs for segment in graph.segments)
    outcome.reasons.update(compiler.record.as_dict()["reasons"])
    if fault:
        outcome.faults.append(f"{outcome.name} {str(dtype).removeprefix('torch.')} sample {index}: {fault}")
    else:
        outcome.right += 1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _results(function: Callable[..., Any], sample: Any) -> _Results:
    """Call a function with copies of a sample's tensors: samples may be changed in place."""
    leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    inputs = _tensors(leaves)
    torch.manual_seed(0)
    results = function(*pytree.tree_unflatten(leaves, structure))
    outputs = _tensors(results)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    ends = [output for output in outputs if output.requires_grad and output.numel()]
    gradients: Any = [None] * len(wanted)
    if ends and wanted:
        gradients = torch.autograd.grad(ends, wanted, [_weights(end) for end in ends], allow_unused=True)
    return _Results([output.detach() for output in outputs], list(gradients), [tensor.detach() for tensor in inputs])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(tensor.detach()).requires_grad_(tensor.requires_grad)  # with the strides, unlike clone


def _weights(end: torch.Tensor) -> torch.Tensor:
    """Return a gradient that differs from element to element: the sum of a softmax has none."""
    weights = torch.linspace(0.5, 1.5, end.numel(), dtype=torch.float64).reshape(end.shape)
    return weights.to(end.dtype)


def _compare(name: str, ours: _Results, theirs: _Results, dtype: torch.dtype) -> None:
    kinds = [[(tuple(out.shape), out.dtype) for out in results.outputs] for results in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise AssertionError(f"results {kinds[0]}, not {kinds[1]}")
    if name in UNWRITTEN:
        return
    (rtol, atol), (gradient_rtol, gradient_atol) = TOLERANCES.get(dtype, TOLERANCES[torch.float32])
    for one, other in zip((*ours.outputs, *ours.inputs), (*theirs.outputs, *theirs.inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=gradient_rtol, atol=gradient_atol, equal_nan=True)
        elif (one if one is not None else other) is not None:
            raise AssertionError("a gradient in one of the two only")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's warnings about the samples out of the report."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)

"""Run the operators of torch's OpInfo table compiled and eager, sample by sample, and compare results and gradients.

As a program, write the page on which runtime runs which operator, in 3 minutes on one core::

    python tests/compile/contract/operator_sweep.py
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from ort_zero.compile.dynamo_backend import Compiler
from ort_zero.compile.engine import CompileEngine
from ort_zero.compile.plan import Segment
from ort_zero.compile.settings import Settings

# importing the table forbids the process to change settings of torch, which other tests do
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)

OPERATORS = {
    f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op
    for op in op_db
    if not op.name.startswith("jiterator")  # CUDA alone
}
UNWRITTEN = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())
"""Operators whose results nobody has written: only their sizes and dtypes are compared."""
DIFFERENCES = frozenset("nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss".split())
"""Operators that subtract two norms: their error is that of the norms, not of the difference."""
_TOLERANCES = {
    torch.float32: ((1e-4, 1e-5), (1e-3, 1e-4)),
    torch.float64: ((1e-7, 1e-7), (1e-6, 1e-6)),
    torch.bfloat16: ((1.6e-2, 1e-5), (1.6e-2, 1e-5)),
}
"""Relative and absolute tolerance of results, and of gradients, by the dtype of the samples."""


def _in_float64(sample: Any) -> Any:
    """Return a sample of bfloat16 as float64."""

    def widen(value: Any) -> Any:
        if value is torch.bfloat16:
            return torch.float64
        if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16:
            return value.detach().double().requires_grad_(value.requires_grad)
        return value

    return sample.transform(widen)


@dataclass(slots=True)
class Outcome:
    """What became of the samples of one operator."""

    name: str
    right: int = 0
    skipped: int = 0
    """Number of samples that PyTorch itself refuses."""
    faults: list[str] = field(default_factory=list)
    in_ort: set[str] = field(default_factory=set)
    """The ATen operators in segments."""


class _Noting(Compiler):
    """Notes the ATen operators of segments."""

    def __init__(self, settings: Settings):
        super().__init__(CompileEngine(settings), "", ())
        self.in_ort: set[str] = set()

    def _runner(self, segment: Segment, *rest: Any) -> Any:
        self.in_ort.update(str(node.target) for node in segment.nodes)
        return super()._runner(segment, *rest)


def sweep(name: str, dtype: torch.dtype, *, limit: int | None = None) -> Outcome:
    """Return what became of the samples of one operator in a dtype, at most `limit` of them, spread over all."""
    op = OPERATORS[name]
    outcome = Outcome(name)
    gradients = dtype.is_floating_point and op.supports_autograd
    torch.manual_seed(0)
    with _quiet():
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
        step = 1 if limit is None else math.ceil(len(samples) / limit)
        for index in range(0, len(samples), max(step, 1)):
            fault = _fault_of(outcome, op, samples[index], dtype)
            if fault:
                outcome.faults.append(f"{name} {str(dtype).removeprefix('torch.')} sample {index}: {fault}")
    return outcome


def _fault_of(outcome: Outcome, op: Any, sample: Any, dtype: torch.dtype) -> str:
    """Run one sample, and return what was wrong; nothing if all was right or PyTorch refuses the sample."""

    def call(first: Any, args: Any, kwargs: Any) -> Any:
        return op.op(first, *args, **kwargs)

    try:
        expected = _results(call, sample)
    except Exception:
        outcome.skipped += 1
        return ""
    torch._dynamo.reset()
    compiler = _Noting(Settings(place="ort", verify="off", reproducers=os.devnull))
    try:
        ours = _results(torch.compile(call, backend=compiler), sample)
        _compare(outcome.name, ours, expected, dtype, lambda: _results(call, _in_float64(sample)))
        fault = "; ".join(compiler.engine.as_dict()["failed"].values())
    except Exception as error:
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    reasons = compiler.engine.as_dict()["reasons"]
    fault += "; ".join(reason for reason in reasons.values() if reason.startswith("no session"))
    outcome.in_ort |= compiler.in_ort
    outcome.right += not fault
    return fault


@dataclass(slots=True)
class _Results:
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    inputs: list[torch.Tensor]
    """The tensors that were passed, after the call."""

    def all(self) -> list[torch.Tensor | None]:
        """Return all tensors to compare, gradients last."""
        return [*self.outputs, *self.inputs, *self.gradients]


def _results(function: Callable[..., Any], sample: Any) -> _Results:
    """Call a function with copies of a sample's tensors, which the function may change in place."""
    leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    leaves = [_copy(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    inputs = _tensors(leaves)
    torch.manual_seed(0)
    outputs = _tensors(pytree.tree_leaves(function(*pytree.tree_unflatten(leaves, structure))))
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    ends = [output for output in outputs if output.requires_grad and output.numel()]
    gradients: Any = [None] * len(wanted)
    if ends and wanted:
        gradients = torch.autograd.grad(ends, wanted, [_weights(end) for end in ends], allow_unused=True)
    return _Results([output.detach() for output in outputs], list(gradients), [tensor.detach() for tensor in inputs])


def _tensors(leaves: Iterable[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return copy.deepcopy(tensor.detach()).requires_grad_(tensor.requires_grad)  # with the strides, unlike clone


def _weights(end: torch.Tensor) -> torch.Tensor:
    """Return a gradient that differs from element to element: the sum of a softmax has none."""
    return torch.linspace(0.5, 1.5, end.numel(), dtype=torch.float64).reshape(end.shape).to(end.dtype)


def _compare(
    name: str, ours: _Results, theirs: _Results, dtype: torch.dtype, in_float64: Callable[[], _Results]
) -> None:
    kinds = [[(tuple(out.shape), out.dtype) for out in results.outputs] for results in (ours, theirs)]
    if kinds[0] != kinds[1]:
        raise AssertionError(f"results {kinds[0]}, not {kinds[1]}")
    if name in UNWRITTEN:
        return
    for index, (one, other) in enumerate(zip(ours.all(), theirs.all(), strict=True)):
        if one is None or other is None:
            if one is not other:
                raise AssertionError("a gradient in one of the two only")
            continue
        rtol, atol = _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])[index >= len(ours.outputs) + len(ours.inputs)]
        try:
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError:
            # ONNX Runtime rounds to 16 bits after a segment, PyTorch after each operator
            exact = in_float64().all()[index] if dtype is torch.bfloat16 else None
            inputs = theirs.inputs if name in DIFFERENCES else []
            if exact is None or not _is_as_exact(one, other, exact, inputs):
                raise


def _is_as_exact(one: torch.Tensor, other: torch.Tensor, exact: torch.Tensor, inputs: Sequence[torch.Tensor]) -> bool:
    """Return True if the error of `one` is at most twice that of `other`, and one rounding to bfloat16.

    Both round at different places: `one` after each segment, `other` after each operator. The rounding is of the
    largest result, or of the largest element of `inputs`.
    """
    if not torch.equal(one.isnan(), other.isnan()):
        return False
    errors = [float((each.double() - exact).nan_to_num(0).abs().max()) for each in (one, other)]
    largest = max(float(each.nan_to_num(0).abs().max()) for each in (exact, *inputs))
    return errors[0] <= 2 * errors[1] + 2**-8 * largest


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the warnings of torch and ort_zero about the samples out of the report."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def page_of(outcomes: Iterable[Outcome]) -> str:
    """Return the section of docs/compatibility.md on which runtime runs which operator."""
    targets = {target for outcome in outcomes for target in outcome.in_ort if target.startswith("aten.")}
    return _PAGE.format(
        torch=torch.__version__.partition("+")[0],
        onnxruntime=onnxruntime.__version__,
        in_ort=_names({_plain(target) for target in targets}),
    )


def _plain(target: str) -> str:
    return target.removeprefix("aten.").partition(".")[0]


def _names(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


_PAGE = """## Operators

The compile backend runs these operators in ONNX Runtime, forward and backward in fp32, by a run of torch's table of
sample inputs; torch decomposes the operators of a model into these first. PyTorch runs all others. torch {torch},
onnxruntime {onnxruntime}, CPU. `python tests/compile/contract/operator_sweep.py` writes this section, in 3 minutes.

{in_ort}.

PyTorch runs them for dtypes that ONNX lacks, such as complex, for empty tensors, and for some arguments, such as
look-ups by several tensors or sums of integers. `ort-zero explain` names each with its reason.
"""
_BEGIN, _END = "<!-- operators: written by operator_sweep.py -->", "<!-- end of operators -->"

if __name__ == "__main__":
    torch.set_num_threads(1)
    supported = [name for name, op in OPERATORS.items() if torch.float32 in op.supported_dtypes("cpu")]
    document = Path(__file__).resolve().parents[3] / "docs/compatibility.md"
    before, _, rest = document.read_text().partition(_BEGIN)
    section = page_of(sweep(name, torch.float32, limit=3) for name in supported)
    document.write_text(f"{before}{_BEGIN}\n{section}{_END}{rest.partition(_END)[2]}")

"""Describe in sentences where and how two runs differ."""

from __future__ import annotations

from ort_zero.statistics.compare.comparison import ComparedRecord
from ort_zero.statistics.records import Phase


def full_name(difference: ComparedRecord) -> str:
    """Return the name of the tensor that differs, with its module: ``"h.0.attn.output[0]"``."""
    return ".".join(filter(None, (difference.module, difference.tensor)))


def spoken(module: str, occurrence: int = 1) -> str:
    """Return a module's name for a sentence, with the number of a repeated call: ``"h.0 (call 2)"``."""
    name = module or "the model's own code"
    return f"{name} (call {occurrence})" if occurrence > 1 else name


def sentence_of(
    difference: ComparedRecord, direction: str, module: str, occurrence: int, hint: str,
    everywhere: bool,
) -> str:  # fmt: skip
    """Return the sentence that describes a first divergence.

    Args:
        difference: the first record with a local error.
        direction: ``"forward"``, ``"backward"`` or ``"input"``.
        module: path of the module whose code computed the record.
        occurrence: number of the module's call, from 1.
        hint: an additional remark; may be empty.
        everywhere: all ranks differ in this step.
    """
    where = f"step {difference.step}, rank {difference.rank}, {direction}"
    what = what_differs(difference)
    if direction == "input":
        ranks = "" if everywhere else "; other ranks agree"
        return f"{where}: the model gets other data: {difference.tensor} {how_it_differs(difference)}{ranks}"
    verb = "adds the error" if difference.kind == "numeric" else "is where the runs diverge"
    sentence = f"{where}: {spoken(module, occurrence)} {verb}: {what} {how_it_differs(difference)}"
    return f"{sentence}; {hint}" if hint else sentence


def what_differs(difference: ComparedRecord) -> str:
    """Return the name of the tensor that differs for a sentence: ``"the gradient of h.0's input[1]"``."""
    name = f"{spoken(difference.module, difference.occurrence)}'s {difference.tensor}" if difference.module else (
        f"the model's {difference.tensor}"
    )  # fmt: skip
    if difference.phase in (Phase.BACKWARD, Phase.PARAMETER_GRADIENT):
        return f"the gradient of {name}"
    return name


def how_it_differs(difference: ComparedRecord) -> str:
    """Return the end of a sentence, the difference of a tensor: ``"has shape (2, 3) and (2, 4)"``."""
    a, b = difference.a, difference.b
    if difference.kind == "shape":
        return f"has shape {tuple(a['shape'])} and {tuple(b['shape'])}"
    if difference.kind == "nan":
        return f"has {a['nan']} NaN and {a['inf']} inf in the first run, {b['nan']} and {b['inf']} in the second"
    return (
        f"differs by {difference.error:.1e} (tolerance {difference.tolerance:.1e}, inherited "
        f"{difference.inherited:.1e}); mean {a['mean']:.4g} / {b['mean']:.4g}, std {a['std']:.4g} / {b['std']:.4g}"
    )

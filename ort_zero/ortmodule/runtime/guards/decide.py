"""Decides whether a module is exported again: which graph serves a call, and why not the last one. Pure.

==================================================================  ============================
what changed                                                        action
==================================================================  ============================
nothing; a size that Python code does not depend on; the step       reuse
structure, dtype or rank of an argument; a constant (None, bool,    export, or switch to the
int, float, str); the module tree or the mode of a submodule;       graph of an earlier call
subscribers that read values; an attribute or global that Python
code read during the trace; torch's default dtype and autocast; a
size, if Python code decides something else by it, or if it is 1
and was not while another one that it meets stays
``requires_grad`` of a parameter or argument; the memory plan;      re-process, or switch to the
determinism; the device; logits that are read call by call          graph of an earlier call
==================================================================  ============================

Calls with gradients and calls without do not meet here: each kind has graphs of its own. ``train()`` and ``eval()``
are modes of submodules, and do.
"""

from __future__ import annotations

from collections.abc import Sequence

from ort_zero.ortmodule.runtime.export import structure_changes
from ort_zero.ortmodule.runtime.guards.keys import (
    Action,
    ExportKey,
    Graphs,
    KnownGraph,
    Observed,
    ProcessKey,
    TensorInput,
    Transition,
)
from ort_zero.utils.text import shortened


def decide(graphs: Graphs, observed: Observed) -> Transition:
    """Return what has to be done before `observed` can run, and every reason for it."""
    current = graphs.current
    if current is None:
        return Transition(Action.EXPORT, ("first call",))
    if current.export.matches(observed.export) and current.process == observed.process:
        return Transition(Action.REUSE, graph=current.number)
    exported = [graph for graph in graphs.known if graph.exported_for(observed)]
    ready = next((graph for graph in exported if graph.process == observed.process), None)
    if ready is not None:
        return Transition(Action.SWITCH, reasons(current, observed), ready.number)
    if exported:
        return Transition(Action.REPROCESS, process_reasons(exported[0].process, observed.process), exported[0].number)
    return Transition(Action.EXPORT, reasons(current, observed))


def reasons(known: KnownGraph, observed: Observed) -> tuple[str, ...]:
    """Return everything in which a graph and a call differ."""
    return (
        *export_reasons(known.export, observed.export),
        *process_reasons(known.process, observed.process),
    )


def export_reasons(old: ExportKey, new: ExportKey) -> tuple[str, ...]:
    """Return why a model that was exported for `old` does not serve `new`."""
    found: list[str] = []
    if new.model.number != old.model.number:
        found += new.model.changes or ("the module was edited",)
    elif new.model.modes != old.model.modes:
        found.append(_mode_reason(old.model.modes, new.model.modes))
    found += structure_changes.differences(old.structure, new.structure)
    found += _tensor_reasons(old.tensors, new.tensors)
    found += old.read.reasons(new.attributes)
    found += old.size_guard.reasons(new.shapes)
    now = dict(new.torch_state)
    found += [f"{name}: {was} -> {now.get(name)}" for name, was in old.torch_state if now.get(name) != was]
    if old.gradients is not None and new.gradients is not None and old.gradients != new.gradients:
        found.append("the forward asks what requires grad, and that has changed")
    if new.readers != old.readers:
        found.append("subscribers read values" if new.readers else "no subscriber reads values any more")
    if not found and not old.matches(new):
        found.append("arguments are given in another order")
    return tuple(found)


def process_reasons(old: ProcessKey, new: ProcessKey) -> tuple[str, ...]:
    """Return why a gradient graph or session that was built for `old` does not serve `new`."""
    found: list[str] = []
    for state, more, less in (("frozen", new, old), ("no longer frozen", old, new)):
        names = [name for name in more.frozen if name not in set(less.frozen)]
        if names:
            found.append(f"{_enumeration('parameter', names)} {state}")
    before, after = set(old.inputs), set(new.inputs)
    found += [f'input "{name}": requires_grad False -> True' for name in new.inputs if name not in before]
    found += [f'input "{name}": requires_grad True -> False' for name in old.inputs if name not in after]
    for what, was, now in (
        ("memory plan", old.memory_plan or "none", new.memory_plan or "none"),
        ("deterministic algorithms", old.deterministic, new.deterministic),
        ("device", old.device, new.device),
        ("head and loss in one node", old.fused_loss, new.fused_loss),
    ):
        if was != now:
            found.append(f"{what}: {was} -> {now}")
    return tuple(found)


def _tensor_reasons(old: Sequence[TensorInput], new: Sequence[TensorInput]) -> list[str]:
    """Describe the inputs whose dtype or rank differ; those that come or go differ in structure."""
    before = {tensor.name: tensor for tensor in old}
    found = []
    for tensor in new:
        known = before.get(tensor.name)
        if known is None:
            continue
        if known.dtype != tensor.dtype:
            found.append(f'input "{tensor.name}": {known.dtype} -> {tensor.dtype}')
        if known.rank != tensor.rank:
            found.append(f'input "{tensor.name}": rank {known.rank} -> {tensor.rank}')
    return found


def _mode_reason(old: bytes, new: bytes) -> str:
    """Describe which submodules went to ``train()`` or ``eval()``."""
    trains = sum(now and not was for was, now in zip(old, new, strict=False))
    evaluates = sum(was and not now for was, now in zip(old, new, strict=False))
    parts = [f"{n} submodules {what}" for n, what in ((trains, "to train()"), (evaluates, "to eval()")) if n]
    return ", ".join(parts) or "another mode of submodules"


def _enumeration(what: str, names: Sequence[str]) -> str:
    """Return a short phrase for several names: by their common layer where they have one."""
    if len(names) == 1:
        return f'{what} "{names[0]}"'
    layer = _common_path(names)
    if layer:
        return f'{len(names)} {what}s of "{layer}"'
    return f"{len(names)} {what}s ({shortened(names)})"


def _common_path(names: Sequence[str]) -> str:
    """Return the path of the innermost module that holds all parameters `names`, "" for the whole."""
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)

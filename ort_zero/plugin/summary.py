"""Print a table once the first training graph runs, on rank 0: active features, and how to switch them."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
import textwrap
import weakref
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from ort_zero import config, env, log
from ort_zero.cpu_memory import measures
from ort_zero.plugin import compile_progress
from ort_zero.runtimes import registry
from ort_zero.utils import tables
from ort_zero.utils.text import shortened

_MIN_STATE, _MAX_WIDTH = 30, 120
_printed: list[str] = []
"""The titles of the models that this process has announced."""
_unsettled: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""The runtimes of models that were announced without a share of operations."""
Row = tuple[str, str, str]
"""Cells of a row: feature, the setting that switches it, and its state."""


def table(
    status: Mapping[str, Any] | None,
    section: config.Config,
    versions: Mapping[str, str],
    plans: Sequence[tuple[str, str]] = (),
    *,
    in_effect: Sequence[str] = (),
    in_engine: bool = True,
    width: int = _MAX_WIDTH,
) -> str:
    """Return the features and costs of an engine's model, as a table that breaks between words at a width.

    Args:
        status: of the engine's model; None where the section leaves the model in PyTorch.
        plans: operators that the backward computes again, and the memory that this saves.
        in_effect: the measures of ``"cpu_memory"`` that are in effect.
    """
    parts = _parts(section, in_effect, in_engine)
    in_torch = [("ONNX Runtime", 'backend: "auto"', "off"), *parts]
    rows: list[Row] = [
        ("feature", 'to switch it, in "ort_zero"', "state"),
        *(in_torch if status is None else _compiled(status, section, parts)),
        *((f"  {operators}", "", effect) for operators, effect in plans),
        ("versions", "", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    before = sum(max(len(row[column]) for row in rows) + len(tables.GAP) for column in (0, 1))
    folded: list[Row] = []
    for feature, setting, state in rows:
        first, *others = textwrap.wrap(state, max(width - before, _MIN_STATE), break_long_words=False) or [""]
        folded += [(feature, setting, first), *(("", "", line) for line in others)]
    return "\n".join(tables.aligned(folded))


def announce(section: config.Config, module: Any, runtime: Any | None, in_engine: bool = True) -> None:
    """Print the table of a model with a section, of a later model one line, on rank 0, unless the level is above INFO.

    Called once more for a model whose share of operations has been settled since, prints a line with the share.
    """
    compile_progress.compiled["seconds"] = 0.0
    logger = log.get_logger()
    status = registry.status_of(runtime) if runtime is not None else None
    if env.rank() != 0 or not logger.isEnabledFor(logging.INFO):
        return
    if status is not None and _unsettled.pop(runtime, False):
        logger.info("it is settled what runs where, of %s: %s", status["module"], _share(status))
        return
    plans: Sequence[tuple[str, str]] = runtime.engine.memory_summary() if runtime is not None else ()
    if status is None:
        title = f"{type(module).__name__} runs in PyTorch, as the section says"
    elif status["fallback_reason"]:
        title = f"{status['module']} runs in PyTorch: it cannot run in ONNX Runtime"
    else:
        titles = {"inductor": "Inductor", "torch": "PyTorch, which is faster"}
        title = f"{status['module']} runs in {titles.get(status['backend'], 'ONNX Runtime')}"
        if not status["compiled"]["settled"]:
            _unsettled[runtime] = True
    _printed.append(title)
    if len(_printed) > 1:
        logger.info("%s%s", title, _in_short(status) if status is not None else "")
        return
    width = min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 0)).columns)
    text = table(status, section, _versions(), plans, in_effect=measures.in_effect(), in_engine=in_engine, width=width)
    logger.info("%s\n%s", title, text)


def _in_short(status: Mapping[str, Any]) -> str:
    """Return what a line tells of a model that is not the first one of its process."""
    if status["fallback_reason"]:
        return f": {status['fallback_reason']}"
    share = f"; {_share(status)}" if status["compiled"]["settled"] else ""
    return f": {len(status['units'])} units{share}; without an ONNX form: {_kept(status)}"


def _share(status: Mapping[str, Any]) -> str:
    """Return in words which part of the operations ONNX Runtime runs, and which units Inductor or PyTorch runs."""
    share, in_torch = status["compiled"]["flop_share"], status["compiled"]["units_in_torch"]
    by_ort, by_inductor = (
        [name for name, found in status["runners"].items() if runner in found["units"]]
        for runner in ("onnxruntime", "inductor")
    )
    text = f"ONNX Runtime runs {', '.join(by_ort) or 'nothing'}"
    if share is not None:
        text = f"ONNX Runtime runs {100 * share:.0f} % of the floating-point operations"
    text += f"; Inductor runs {', '.join(by_inductor)}" if by_inductor else ""
    return text + (f"; PyTorch runs {', '.join(in_torch)} whole" if in_torch else "")


def _parts(section: config.Config, in_effect: Sequence[str], in_engine: bool) -> list[Row]:
    """Return the rows of the parts that need no ONNX Runtime; only an engine saves checkpoints."""
    save, collects, memory = section.checkpoint, section.statistics.enabled, section.cpu_memory
    done = f": {', '.join(in_effect)}" if memory and in_effect else ""
    rows: list[Row] = [
        ("memory of CPUs", _switch("cpu_memory", not memory), _state(memory) + done),
        ("sharded checkpoints", _switch("checkpoint.sharded", not save.sharded), _state(save.sharded)),
        ("asynchronous saving", _switch("checkpoint.async_save", not save.async_save), _state(save.async_save)),
        ("statistics", _switch("statistics.enabled", not collects), _state(collects)),
    ]
    return [row for row in rows if in_engine or not row[1].startswith("checkpoint")]


def _compiled(status: Mapping[str, Any], section: config.Config, parts: list[Row]) -> list[Row]:
    """Return the rows of a model whose units ONNX Runtime runs."""
    record, is_settled = status["compiled"], status["compiled"]["settled"]
    places, verify, checks = f"{status['sessions']} sessions", "", "the first run of each graph, by sizes"
    if status["engine"] == "compile":
        places = f"{record['segments']} segments, {places}"
        verify, checks = 'compile.verify: "sampled", "always", "off"', section.compile.verify
        if is_settled and record["segments_in_torch"]:
            places += f"; PyTorch runs {record['segments_in_torch']} of the segments"
    place = getattr(section, status["engine"]).place
    other_place = f'{status["engine"]}.place: "{"ort" if place == "measured" else "measured"}"'
    units = shortened([unit or "the model" for unit in status["units"]], 2)
    graphs = (
        f"{record['graphs']}, made of {record['dynamo_graphs']} that Dynamo captured; {len(record['recompilations'])} "
        "since an earlier one did not fit"
    )
    return [
        ("ONNX Runtime", "enabled: false", _state(status["backend"] == "onnxruntime")),
        ("units", 'exclude: ["PATTERN"]', f"{len(status['units'])}: {units}"),
        ("graphs", "ort-zero explain SCRIPT", graphs),
        ("  run by", other_place, places),
        ("  operations", other_place, _share(status) if is_settled else "not settled yet, a line will say it"),
        ("checked against PyTorch", verify, checks),
        *parts,
        ("run by PyTorch", "ort-zero explain SCRIPT", _kept(status)),
        *((f"  {path or 'the model'}", "", why) for path, why in status["failures"].items()),
        *((f"  segment {key}", "", why) for key, why in record.get("failed", {}).items()),
    ]


def _kept(status: Mapping[str, Any] | None) -> str:
    if status is None or status["fallback_reason"]:
        return "everything"
    names = [name.removesuffix(".default") for name in status["in_torch"]]
    return shortened(names, 1) or "nothing"


def _state(on: Any) -> str:
    return "on" if on else "off"


def _switch(key: str, to: bool) -> str:
    return f"{key}: {'true' if to else 'false'}"


def _versions() -> dict[str, str]:
    names = ("ort_zero", "torch", "deepspeed", "onnxruntime", "onnxruntime-gpu", "onnxruntime-training")
    by_name = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):  # not installed, such as a copied source tree
            by_name[name] = metadata.version(name)
    return {**by_name, "Python": ".".join(map(str, sys.version_info[:3]))}

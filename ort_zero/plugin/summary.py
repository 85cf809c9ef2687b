"""Print a table once the first training graph runs: active features, how to switch them, and the time for graphs.

:func:`table` returns the text; :func:`announce` prints it, once in a process, on rank 0. Later models have a line.
"""

from __future__ import annotations

import io
import logging
import shutil
import sys
import weakref
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from ort_zero import config, env, log
from ort_zero.cpu_memory import measures
from ort_zero.plugin import compile_progress
from ort_zero.runtimes import registry
from ort_zero.utils.random_state import random_state_kept
from ort_zero.utils.text import shortened

_MIN_WIDTH, _MAX_WIDTH = 60, 120
_printed: list[str] = []
"""The titles of the models that this process has announced."""
_unsettled: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""The runtimes of models that were announced without a share of operations."""
Row = tuple[str, ...]
"""Cells of a row: feature, state, and, for some, the setting that switches it."""


def table(
    status: Mapping[str, Any] | None,
    section: config.Config,
    versions: Mapping[str, str],
    plans: Sequence[tuple[str, str]] = (),
    *,
    in_effect: Sequence[str] = (),
    in_engine: bool = True,
    width: int = 80,
) -> str:
    """Return the features and costs of an engine's model, as a table.

    Args:
        status: the status of the engine's model; None where the section leaves the model in PyTorch.
        plans: operators that the backward computes again, and the memory that this saves.
        in_effect: the measures of ``"cpu_memory"`` that are in effect.
    """
    parts = _parts(section, in_effect, in_engine)
    in_torch = [("ONNX Runtime", "off", 'backend: "auto"'), *parts]
    rows: list[Row] = [
        ("feature", "state", 'to switch it, in "ort_zero"'),
        *(in_torch if status is None else _compiled(status, section, parts)),
        *((f"  {operators}", effect) for operators, effect in plans),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return _drawn(rows, max(width, _MIN_WIDTH))


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
    in_effect = measures.in_effect()
    width = min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 0)).columns)
    text = table(status, section, _versions(), plans, in_effect=in_effect, in_engine=in_engine, width=width)
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
        ("memory of CPUs", _state(memory) + done, _switch("cpu_memory", not memory)),
        ("sharded checkpoints", _state(save.sharded), _switch("checkpoint.sharded", not save.sharded)),
        ("asynchronous saving", _state(save.async_save), _switch("checkpoint.async_save", not save.async_save)),
        ("statistics", _state(collects), _switch("statistics.enabled", not collects)),
    ]
    return [row for row in rows if in_engine or not row[2].startswith("checkpoint")]


def _compiled(status: Mapping[str, Any], section: config.Config, parts: list[Row]) -> list[Row]:
    """Return the rows of a model whose units ONNX Runtime runs."""
    record = status["compiled"]
    is_settled = record["settled"]
    places = f"{status['sessions']} sessions"
    checks = ("checked against PyTorch", "the first run of each graph, by sizes", "always")
    if status["engine"] == "compile":
        places = f"{record['segments']} segments, {places}"
        checks = ("checked against PyTorch", section.compile.verify, 'compile.verify: "sampled", "always", "off"')
        if is_settled and record["segments_in_torch"]:
            places += f"; PyTorch runs {record['segments_in_torch']} of the segments"
    return [
        ("ONNX Runtime", _state(status["backend"] == "onnxruntime"), "enabled: false"),
        (
            "units",
            f"{len(status['units'])}: {shortened([unit or 'the model' for unit in status['units']], 2)}",
            'exclude: ["PATTERN"]',
        ),
        (
            "graphs",
            f"{record['graphs']}, made of {record['dynamo_graphs']} that Dynamo captured; "
            f"{len(record['recompilations'])} since an earlier one did not fit",
            "ort-zero explain SCRIPT",
        ),
        ("  run by", places, _other_place(status["engine"], section)),
        (
            "  share of operations",
            _share(status) if is_settled else "not settled yet, a line will say it",
            _other_place(status["engine"], section),
        ),
        checks,
        *parts,
        ("run by PyTorch", _kept(status), "has no ONNX form here, or is faster there"),
        *((f"  {path or 'the model'}", why) for path, why in status["failures"].items()),
        *((f"  segment {key}", why) for key, why in record.get("failed", {}).items()),
    ]


def _other_place(engine: str, section: config.Config) -> str:
    place = getattr(section, engine).place
    return f'{engine}.place: "{"ort" if place == "measured" else "measured"}"'


def _kept(status: Mapping[str, Any] | None) -> str:
    if status is None or status["fallback_reason"]:
        return "everything"
    names = [name.removesuffix(".default") for name in status["in_torch"]]
    return shortened(names, 1) or "nothing"


def _state(on: Any) -> str:
    return "on" if on else "off"


def _switch(key: str, to: bool) -> str:
    return f"{key}: {'true' if to else 'false'}"


def _drawn(rows: Sequence[Row], width: int) -> str:
    """Return the rows as a table no wider than `width` characters; the first row is its head."""
    with random_state_kept():
        from rich import box, console
        from rich import table as rich_table

    # the last column holds keys, which a user copies: no key is broken
    settings = [row[2] for row in rows if len(row) == 3]
    key = max(len(word) for text in settings for word in text.split())
    widths = None, None, min(max(map(len, settings)), max(key, width // 3))
    columns = [rich_table.Column(name, width=n, overflow="fold") for name, n in zip(rows[0], widths, strict=True)]
    drawn = rich_table.Table(*columns, box=box.ASCII, show_edge=False, pad_edge=False, header_style="")
    for row in rows[1:]:
        drawn.add_row(*row)
    text = io.StringIO()
    console.Console(file=text, width=width, markup=False, highlight=False, emoji=False, safe_box=False).print(drawn)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _versions() -> dict[str, str]:
    by_name = {}
    for name in ("ort_zero", "torch", "deepspeed", "onnxruntime", "onnxruntime-gpu", "onnxruntime-training"):
        try:
            by_name[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # not installed, such as a copied source tree
    return {**by_name, "Python": ".".join(map(str, sys.version_info[:3]))}

"""Format figures for metrics files: as JSON lines, or in the text format of Prometheus."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ort_zero.metrics.figures import FIGURES


def json_line(figures: Mapping[str, float], labels: Mapping[str, Any]) -> str:
    """Return one line of JSON: the labels first (time, step, rank, host, model), then the figures."""
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in figures.items()}
    return json.dumps({**labels, **rounded}) + "\n"


def prometheus_text(figures: Mapping[str, float], step: int, labels: Mapping[str, Any]) -> str:
    """Return a whole file for Prometheus' node exporter (text format 0.0.4).

    Names follow its rules: seconds and bytes end the name, counters end in ``_total``.

    Args:
        figures: figures of one rank by name.
        step: number of optimizer steps so far.
        labels: labels of each figure.
    """
    label = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    lines = [*_metric("ort_zero_step", "gauge", "Optimizer steps so far.", label, step)]
    for figure in FIGURES:
        if figure.name in figures:
            kind, end = ("counter", "_total") if figure.only_grows else ("gauge", "")
            lines += _metric(f"ort_zero_{figure.name}{end}", kind, figure.help, label, figures[figure.name])
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, text: str, label: str, value: float) -> tuple[str, str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{{{label}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

"""The picture of what memory costs: peak memory against the time of a step, predicted and measured."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from ort_zero.errors import ConfigError
from ort_zero.utils.sizes import size_in

_MIB = 2**20
_INK, _PALE, _PREDICTED, _MEASURED, _BUDGET = "#222222", "#8a8a8a", "#4c78a8", "#d1495b", "#2e7d4f"


def require() -> None:
    """Make sure that a picture can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise ConfigError("--plot needs matplotlib: pip install 'ort-zero[plot]'") from error


def svg(runs: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """Return the picture of some runs as SVG, the same for the same runs.

    Args:
        runs: see :meth:`.recompute.trial_report.TrialReport.as_dict`; the first with a path gives the predicted
            line.
        title: what was planned for.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require()
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text, and no random ids: a picture in a repository changes only where its figures do
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "ort_zero", "font.size": 10, "axes.edgecolor": _PALE,
             "axes.labelcolor": _INK, "text.color": _INK, "xtick.color": _INK, "ytick.color": _INK}  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        axes = figure.add_subplot()
        _draw(axes, runs)
        if title:
            axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=12)
        content = io.StringIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def _draw(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    base = next((run["seconds_per_step"] for run in runs if run["kind"] == "without recomputation"), None)
    start = base or 0.0
    planned = [run for run in runs if run["decision"] is not None]
    path: Sequence[Any] = next((run["decision"]["path"] for run in planned if run["decision"]["path"]), ())
    if path:
        x = [1000 * (start + seconds) for _, seconds, _ in path]
        axes.plot(x, [size / _MIB for size, *_ in path], "-o", color=_PREDICTED, linewidth=1.6, markersize=3.5,
                  label="predicted: recomputations, the cheapest first", zorder=2)  # fmt: skip
    measured = [run for run in runs if run["measured_bytes"] is not None and run["seconds_per_step"] is not None]
    if measured:
        times = [1000 * run["seconds_per_step"] for run in measured]
        axes.plot(times, [run["measured_bytes"] / _MIB for run in measured], "D", color=_MEASURED, markersize=7,
                  label="measured", zorder=4)  # fmt: skip
    for run in [run for run in planned if run not in measured and run["kind"] == "budget"]:
        point = (1000 * (start + run["decision"]["recompute_seconds"]), run["predicted_bytes"] / _MIB)
        axes.plot(*point, "D", color=_PREDICTED, markersize=7, zorder=4)
        _label(axes, run["name"], *point, _PREDICTED)
    middle = sum(axes.get_xlim()) / 2
    for run in measured:
        off = "" if run["off"] is None else f", predicted {run['predicted_bytes'] / _MIB:.0f}"
        name = "" if run["kind"] == "point" else f"{run['name']}: "
        text = f"{name}{size_in(run['measured_bytes'], 'MiB', 0)}{off}"
        x, y = 1000 * run["seconds_per_step"], run["measured_bytes"] / _MIB
        # points in between may lie close above a budget's
        _label(axes, text, x, y, _MEASURED, left=x > middle, below=run["kind"] == "budget")
    budgets = {(run["name"], run["decision"]["budget_bytes"]) for run in planned if run["decision"]["budget_bytes"]}
    top = axes.get_ylim()[1]
    for name, size in sorted(budgets):
        if size / _MIB <= 1.5 * top:  # one far above would leave nothing to see of the rest
            axes.axhline(size / _MIB, color=_BUDGET, linewidth=1.1, linestyle="--", zorder=1)
            text = f"{name}: {size_in(size, 'MiB', 0)}"
            # the predicted line falls: on the right it has left the place above a budget
            axes.annotate(text, (1, size / _MIB), xycoords=("axes fraction", "data"), xytext=(-5, 3), ha="right",
                          textcoords="offset points", color=_BUDGET, fontsize=9)  # fmt: skip
    axes.set_xlabel(
        "time of a step [ms]; predicted: that without recomputation, and the estimate of what is computed again"
        if base
        else "estimate of the time that recomputation takes in a step [ms]"
    )
    axes.set_ylabel("peak of a step, per rank [MiB]")
    axes.set_ylim(0, 1.12 * axes.get_ylim()[1])
    axes.margins(x=0.12)
    axes.grid(color="#e6e6e6", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if path or measured:
        axes.legend(loc="lower left", frameon=False, fontsize=9)


def _label(axes: Any, text: str, x: float, y: float, color: str, left: bool = False, below: bool = False) -> None:
    place = (-8 if left else 8, -14 if below else 6)
    axes.annotate(text, (x, y), xytext=place, textcoords="offset points", fontsize=8.5, color=color,
                  ha="right" if left else "left", zorder=5,
                  bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8})  # fmt: skip

"""Start the collection of statistics that a section asks for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ort_zero import config, log
from ort_zero.compat.torch_modules import modules_of
from ort_zero.plugin import collected_script
from ort_zero.runtimes import registry

_collecting: Counter[str | None] = Counter()
"""Number of models that collect statistics, by the output folder in the section."""


def note_onnxruntime(module: Any, running: Any) -> None:
    """Note that ONNX Runtime runs units of a module whose own forward PyTorch calls, and trace hooks added later."""
    from ort_zero.statistics.collect import subscribed_model

    subscribed_model.remember(module, backend="onnxruntime")
    if _trace_hooks not in subscribed_model.hooks_changed:
        subscribed_model.hooks_changed.append(_trace_hooks)
    if subscribed_model.subscribed_models_in(module):
        _mark(running)


def _trace_hooks(root: Any) -> None:
    """Have Dynamo trace the units of a module anew, whose hooks were added or removed."""
    parts = set(map(id, modules_of(root)))
    for running in registry.runtimes():
        if not parts.isdisjoint(map(id, running.unit_modules())):
            _mark(running)
            running.compile_again()


def _mark(running: Any) -> None:
    """Mark the units of a model, so that Dynamo captures the hooks of statistics in them."""
    from ort_zero.runtimes import observing
    from ort_zero.statistics.collect import graph_operators, subscribed_model

    observing.passes[:] = [graph_operators]
    for unit in running.unit_modules():
        subscribed_model.mark_places(unit)


def collect(model: Any, section: config.StatisticsConfig) -> Any:
    """Collect statistics of a model, and return the session, None if the section disables it. All ranks must call.

    A script that ``ort-zero stats run`` has started collects what the command asks for alone.
    """
    if not section.enabled or collected_script.request() is not None:
        return None
    from ort_zero.statistics.collect.subscribed_model import GlobalSubscriberManager
    from ort_zero.statistics.collect.subscriber import StatisticsSubscriber

    wanted = section.model_dump(exclude={"enabled"})
    # an actor and a critic may share one config: each engine gets a folder, in the order of construction
    before, _collecting[section.output_dir] = _collecting[section.output_dir], _collecting[section.output_dir] + 1
    if before:
        wanted["output_dir"] = f"{section.output_dir}_{before + 1}"
        log.get_logger().info("statistics of engine %d go to %s", before + 1, wanted["output_dir"])
    return GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(**wanted)])

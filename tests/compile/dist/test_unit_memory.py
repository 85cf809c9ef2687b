"""Between forward and backward no gathered weight is left under ZeRO-3, nor a view that keeps its memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparison import Run, compare, trained_alike
from launch_once import launched
from models import losses_of

MODELS = ("gpt2_sdpa", "resnet")
SETTINGS = {
    "bare": dict(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0),
    "some": dict(stage3_prefetch_bucket_size=5000, stage3_max_reuse_distance=0),
    "ahead": {},
    "bounded": dict(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0, options={"max_unit_elements": 3500}),
}
_GLOO_LETS_GO = 2.0
"""Seconds in which gloo's thread lets go of a collective's result."""

# -- what each rank runs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def released_storages() -> Iterator[list[tuple[str, int, weakref.ref]]]:
    """Note the memory of each weight at the moment when DeepSpeed lets go of it."""
    from deepspeed.runtime.zero import partition_parameters

    noted: list[tuple[str, int, weakref.ref]] = []
    original = partition_parameters.free_param

    def free_param(parameter: torch.nn.Parameter) -> None:
        storage = parameter.data.untyped_storage()
        noted.append((tuple(parameter.ds_shape), storage.nbytes(), weakref.ref(storage)))
        del storage
        original(parameter)

    partition_parameters.free_param = free_param
    try:
        yield noted
    finally:
        partition_parameters.free_param = original


def alive(noted: list[tuple[str, int, weakref.ref]]) -> dict[str, int]:
    """Return the bytes of memory that still lives, by the shape of its weight.

    Gloo's thread holds the result of a collective until shortly after the wait for it has returned; on a busy machine
    that takes milliseconds.
    """
    gc.collect()
    end = time.monotonic() + _GLOO_LETS_GO
    while True:
        found: dict[str, int] = {}
        for shape, size, storage in noted:
            if size and storage() is not None:
                found[str(shape)] = found.get(str(shape), 0) + size
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.001)


@contextlib.contextmanager
def peak_of(model: torch.nn.Module) -> Iterator[list[int]]:
    """Note the number of gathered elements after each fetch, without the weights that always stay whole."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

    noted: list[int] = []
    original = Coordinator.fetch_sub_module

    @functools.wraps(original)
    def fetch(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        weights = (p for p in model.parameters() if not p.ds_persist and p.ds_status.name != "NOT_AVAILABLE")
        noted.append(sum(p.ds_numel for p in weights))
        return result

    Coordinator.fetch_sub_module = fetch
    try:
        yield noted
    finally:
        Coordinator.fetch_sub_module = original


def measured(run: Run, name: str, setting: str) -> None:
    """Train three steps; look at weights and their memory after the last forward and after the step."""
    model, loss_of = losses_of(name, run.rank)
    run.start(model, **SETTINGS[setting])
    run.train(loss_of, 2)
    with released_storages() as noted, peak_of(model) as gathered:
        loss = loss_of(run.engine, 2)
        run.notes["whole"] = run.whole()
        run.notes["alive"] = alive(noted)
        run.notes["released"] = sum(size for _, size, _ in noted)
        run.step(loss)
        del loss
        run.notes["alive after"] = alive(noted)
        run.notes["whole after"] = run.whole()
    run.notes["peak"] = max(gathered)
    run.notes["largest"] = max(p.ds_numel for p in model.parameters())


def measure_all(folder: str) -> dict[str, Any]:
    """Measure each model without prefetch, and one with other settings."""
    pairs = [(name, "bare") for name in MODELS] + [("gpt2_sdpa", name) for name in SETTINGS if name != "bare"]
    named = {f"{name} {setting}": functools.partial(measured, name=name, setting=setting) for name, setting in pairs}
    return compare(named, folder)


# -- what comes of it --------------------------------------------------------------------------------------------------


def _notes(name: str) -> Iterator[tuple[dict, dict, dict]]:
    """Yield the notes of plain DeepSpeed and of ours on each rank, and the model's status."""
    for rank, reports in enumerate(launched(measure_all, 2)):
        trained_alike(reports[name], f"{name}, rank {rank}")
        yield (*reports[name]["notes"], reports[name]["models"][0])


@pytest.mark.parametrize("name", MODELS)
def test_no_weight_and_no_view_of_one_is_left_after_a_forward(name):
    for _, ours, _ in _notes(f"{name} bare"):
        assert ours["released"] > 0
        assert (ours["whole"], ours["alive"], ours["whole after"], ours["alive after"]) == ([], {}, [], {})


@pytest.mark.parametrize("name", [*(f"{name} bare" for name in MODELS), "gpt2_sdpa some", "gpt2_sdpa ahead"])
def test_no_more_weights_than_in_plain_deepspeed_are_gathered(name):
    for theirs, ours, status in _notes(name):
        assert status["units"]
        assert 0 < ours["peak"] <= theirs["peak"]
        assert len(ours["whole"]) <= len(theirs["whole"])


def test_the_section_bounds_what_is_gathered_together():
    for theirs, ours, status in _notes("gpt2_sdpa bounded"):
        assert len(status["units"]) > 3
        assert ours["peak"] <= max(SETTINGS["bounded"]["options"]["max_unit_elements"], theirs["peak"])
        assert (ours["whole"], ours["alive"]) == ([], {})

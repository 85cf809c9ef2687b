"""DeepSpeed's own checkpoints in an engine with the section; the damaged ones are in test_damaged_checkpoints.py."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpoint_engines import differences, engine_of, outcome, train, values_of
from rank_processes.ranks import run_on_ranks


class Unknown:
    """A class that nobody knows where the checkpoint is read."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown)


def load_clients(root: str) -> dict[str, dict[str, Any]]:
    """Save with a client's state of a known and of an unknown class; load both, also at another stage."""
    engine = engine_of(2, "bf16")
    train(engine, range(2))
    clients: dict[str, dict[str, Any]] = {"good": {"args": argparse.Namespace(lr=0.5)}, "unknown": {"mode": Unknown()}}
    for tag, client in clients.items():
        type(engine).save_checkpoint.__wrapped__(engine, root, tag=tag, client_state=client)
    engine.destroy()
    found = {}
    for stage in (2, 3):
        engine = engine_of(stage, "bf16", seed=1)
        train(engine, range(1))
        for tag, client in clients.items():
            before = values_of(engine)
            loaded: list[Any] = []
            report = outcome(lambda tag=tag, loaded=loaded: loaded.append(engine.load_checkpoint(root, tag)[1]))
            report["changed"] = differences(engine, before)
            report["client"] = [{key: each[key] for key in client} for each in loaded]
            found[f"{tag} at {stage}"] = report
            train(engine, range(1))
        engine.destroy()
    return found


class Sampler:
    """Stands for the sampler of curriculum learning, which needs an indexed data set: its state has these types."""

    def __init__(self, step: int):
        self.step, self.batch, self.random = step, [3, step], np.random.RandomState(step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "batch": self.batch, "np_rng_state": self.random.get_state(), "paths": ["a"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.batch = state["step"], state["batch"]
        self.random.set_state(state["np_rng_state"])


def with_data_efficiency(engine: Any, step: int) -> Any:
    """Give an engine the parts of DeepSpeed's data efficiency library that have a state."""
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler

    schedule = {"schedule_type": "fixed_linear", "min_value": 1, "max_value": 9, "schedule_config": {
        "require_steps": 9, "seq_per_step": 1}}  # fmt: skip
    layers = {"total_layer_num": 2, "random_ltd_layer_num": 1, "global_batch_size": 1, "random_ltd_schedule": schedule,
              "layer_token_lr_schedule": {"enabled": False}}  # fmt: skip
    engine.random_ltd_scheduler = RandomLTDScheduler(layers)
    engine.random_ltd_enabled = lambda: True
    engine.curriculum_learning_enabled = lambda: True
    engine.training_dataloader = SimpleNamespace(data_sampler=Sampler(step))
    for value in range(1, step):
        engine.random_ltd_scheduler.update_seq(value)
    return engine


def resume_data_efficiency(root: str) -> list[dict[str, Any]]:
    """Save in both formats, load each; return what sampler and scheduler held at the save and after each load."""
    engine = with_data_efficiency(engine_of(2), 5)
    engine.training_dataloader.data_sampler.random.rand(3)
    engine.save_checkpoint(f"{root}/ours")
    type(engine).save_checkpoint.__wrapped__(engine, f"{root}/theirs")
    found = [(engine.random_ltd_scheduler.state_dict(), engine.training_dataloader.data_sampler.random.rand())]
    del engine.random_ltd_enabled, engine.curriculum_learning_enabled
    losses = [train(engine, range(3))]
    engine.destroy()
    for name in ("ours", "theirs"):
        engine = with_data_efficiency(engine_of(2 if name == "ours" else 1, seed=1), 2)
        assert engine.random_ltd_scheduler.state_dict() != found[0][0]
        train(engine, range(2))
        engine.load_checkpoint(f"{root}/{name}")  # of step 0: the optimizer begins anew as well
        sampler = engine.training_dataloader.data_sampler
        assert (sampler.step, sampler.batch) == (5, [3, 5])
        found.append((engine.random_ltd_scheduler.state_dict(), sampler.random.rand()))
        del engine.random_ltd_enabled, engine.curriculum_learning_enabled
        losses.append(train(engine, range(3)))
        engine.destroy()
    assert losses[1:] == [pytest.approx(losses[0], abs=1e-6)] * 2, losses
    return found


def convert_and_load(root: str) -> dict[str, Any]:
    """Convert checkpoints of both formats; load each by DeepSpeed's own loader; return losses, and what differs."""
    from ort_zero.checkpoint import convert

    engine = engine_of(2)
    train(engine, range(4))
    engine.save_checkpoint(f"{root}/ours", tag="t", client_state={"epoch": 3})
    type(engine).save_checkpoint.__wrapped__(engine, f"{root}/theirs", tag="t", client_state={"epoch": 3})
    values = values_of(engine)
    found: dict[str, Any] = {"expected": train(engine, range(4, 7))}
    engine.destroy()
    plans = [(name, "deepspeed", stage) for name in ("ours", "theirs") for stage in (1, 2, 3)]
    plans += [("ours", "universal", 2), ("theirs", "universal", 3)]
    for name, to, stage in plans:
        place = f"{root}/{name} as {to} {stage}"
        if dist.get_rank() == 0:
            convert(f"{root}/{name}", place, to=to, stage=stage, progress=False)
        dist.barrier()
        engine = engine_of(stage, seed=1)
        engine._config.load_universal_checkpoint = to == "universal"
        with torch.no_grad():  # a universal checkpoint restores what the optimizer trains; DeepSpeed leaves the rest
            for owner, key in ((engine.module.frozen, "weight"), (engine.module.frozen, "bias")):
                if to == "universal" and stage < 3:
                    getattr(owner, key).copy_(values[f"parameter frozen.{key}"])
        path, client = type(engine).load_checkpoint.__wrapped__(engine, place)
        changed = differences(engine, values) if stage == 2 else []
        changed = [n for n in changed if to == "deepspeed" or not n.startswith("buffer")]
        assert path and client["epoch"] == 3 and engine.global_steps == 4, (place, path, client)
        if to == "deepspeed" or stage < 3:
            found[place.removeprefix(f"{root}/")] = train(engine, range(4, 7)), changed
        engine.destroy()
    return found


def load_edited(root: str) -> list[str]:
    """Load a checkpoint whose scheduler's state is another class's; return what changed in the engine."""
    engine = engine_of(2)
    train(engine, range(2))
    own = engine.lr_scheduler.state_dict
    engine.lr_scheduler.state_dict = lambda: {"another": "class"}
    engine.save_checkpoint(root, tag="edited")
    engine.lr_scheduler.state_dict = own
    train(engine, range(2, 3))
    before, rates = values_of(engine), [group["lr"] for group in engine.optimizer.param_groups]
    engine.optimizer.param_groups[0]["lr"] = rates[0] = 0.125
    report = outcome(lambda: engine.load_checkpoint(root, tag="edited"))
    changed = differences(engine, before)
    changed += [] if [group["lr"] for group in engine.optimizer.param_groups] == rates else ["lr"]
    changed += [] if engine.global_steps == 3 and engine.lr_scheduler.last_batch_iteration == 2 else ["counters"]
    return [str(report["type"]), *changed]


def resume_all(root: str) -> dict[str, Any]:
    """Run three of the functions above in one launch."""
    functions = resume_data_efficiency, convert_and_load, load_clients
    return {each.__name__: each(f"{root}/{each.__name__}") for each in functions}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank has found."""
    return run_on_ranks(resume_all, 2, str(tmp_path_factory.mktemp("resumed")), timeout=800)


def test_states_of_data_efficiency_come_back(ranks):
    for saved, *loaded in (rank["resume_data_efficiency"] for rank in ranks):
        assert loaded == [saved, saved]


def test_deepspeed_itself_loads_what_is_converted(ranks):
    for found in (rank["convert_and_load"] for rank in ranks):
        expected = found["expected"]
        assert len(found) == 8
        for name in found.keys() - {"expected"}:
            losses, changed = found[name]
            assert losses == pytest.approx(expected, abs=1e-6) and not changed, name


def test_a_scheduler_that_refuses_its_state_leaves_the_engine_as_it_was(one_rank, tmp_path):
    assert load_edited(str(tmp_path)) == ["KeyError"]


def test_an_unknown_class_goes_to_deepspeeds_own_loader_where_nothing_changes(ranks):
    for found in (rank["load_clients"] for rank in ranks):
        for stage in (2, 3):
            good = found[f"good at {stage}"]
            assert good["type"] is None and good["changed"], good
            assert good["client"] == [{"args": argparse.Namespace(lr=0.5)}]
        same, other = found["unknown at 2"], found["unknown at 3"]
        assert same["type"] is None and same["changed"] and same["client"] == [{"mode": Unknown()}], same
        assert other["type"] == "CheckpointError" and not other["changed"], other
        assert "Unknown" in other["text"] and "needs 2 ranks and ZeRO-2" in other["text"]

"""Engines, copies and wrapped models on two ranks: what is saved, copied, destroyed, and run without DeepSpeed."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from comparison import GRADIENT, Run, compare, section, trained_alike
from launch_once import launched
from models import losses_of
from stack_models import IN, OUT, Stack
from torch import nn
from torch.nn import functional as F

import ort_zero

# -- what each rank runs -----------------------------------------------------------------------------------------------


def moving_average(run: Run) -> None:
    """Follow the weights with a deep copy of the engine's module, and evaluate both."""
    model, loss_of = losses_of("gpt2_sdpa", run.rank)
    run.start(model, stage=1)
    run.train(loss_of, 2)
    average = copy.deepcopy(run.engine.module).eval().requires_grad_(False)
    run.losses.append(loss_of(average, 1).item())
    for step in range(2, 5):
        run.train(loss_of, range(step, step + 1))
        for mine, other in zip(average.parameters(), model.parameters()):
            mine.lerp_(other.detach(), 0.5)
        run.losses.append(loss_of(average, 1).item())
    run.evaluate(loss_of, 1)


def saved(run: Run) -> None:
    """Save the weights under ZeRO-3 as transformers does, and load them into another model."""
    model, loss_of = losses_of("gpt2_sdpa", run.rank)
    run.start(model, stage3_gather_16bit_weights_on_model_save=True)
    run.train(loss_of, 3)
    state = run.engine._zero3_consolidated_16bit_state_dict()
    run.seen["class"] = type(run.engine.module).__name__
    run.seen["names"] = list(model.state_dict())
    if run.rank == 0:
        model.save_pretrained(run.folder, state_dict=state)
    torch.distributed.barrier()
    loaded = type(model).from_pretrained(run.folder).eval()
    run.losses.append(loss_of(loaded, 0).item())
    run.evaluate(loss_of, 0)


def memory_of_tensors() -> int:
    """Return the bytes of all tensors that Python can reach."""
    gc.collect()
    kinds = (torch.Tensor, nn.Parameter)  # and none of the compiler's tensors without memory
    tensors = [each for each in gc.get_objects() if type(each) in kinds and each.device.type == "cpu"]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def destroyed(run: Run) -> None:
    """Destroy one engine after another; each leaves nothing behind, and the last one trains."""
    sizes = []
    for stage in (3, 3, 2):
        model, loss_of = losses_of("gpt2_sdpa", run.rank)
        run.start(model, stage=stage)
        run.train(loss_of, 2)
        run.evaluate(loss_of)
        alive = {
            "module": weakref.ref(model), "weight": weakref.ref(model.transformer.wte.weight),
            "engine": weakref.ref(run.engine), "optimizer": weakref.ref(run.engine.optimizer),
        }  # fmt: skip
        run.engine.destroy()
        run.engine = run.model = model = None
        run.gradients.clear()
        gc.collect()
        run.notes[f"alive {len(sizes)}"] = [name for name, ref in alive.items() if ref() is not None]
        run.notes[f"models {len(sizes)}"] = [each["gone"] for each in ort_zero.status()["models"]]
        sizes.append(memory_of_tensors())
    run.notes["grown"] = sizes[1] - sizes[0]
    model, loss_of = losses_of("gpt2_sdpa", run.rank)
    run.start(model)
    run.train(loss_of, 2)


SCENARIOS = (moving_average, saved, destroyed)


def sharded(model: nn.Module) -> nn.Module:
    """Shard a model and each of its blocks by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def trained_alone(wrapped: nn.Module, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train without an engine; return the losses and the last gradients."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        rows = 4 if rank == 0 else 3 + step % 2
        x, y = torch.randn(rows, IN, generator=generator), torch.randn(rows, OUT, generator=generator)
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole = [(name, getattr(p.grad, "full_tensor", p.grad.clone)()) for name, p in wrapped.named_parameters()]
    return losses, {name.removeprefix("module."): gradient for name, gradient in whole}


def all_engines(folder: str) -> dict[str, Any]:
    """Run the scenarios, then models that are wrapped without an engine."""
    reports = compare({scenario.__name__: scenario for scenario in SCENARIOS}, folder)
    torch.manual_seed(0)
    plain = Stack()
    rank = torch.distributed.get_rank()
    before, after = (copy.deepcopy(plain) for _ in range(2))
    models = sharded(copy.deepcopy(plain)), sharded(ort_zero.wrap(before, **section())), sharded(after)
    ort_zero.wrap(after, **section())
    reports["fsdp"] = [trained_alone(model, rank) for model in models]
    reports["sharded"] = [(each["graph_runs"], each["failures"]) for each in ort_zero.status()["models"][-2:]]
    return reports


# -- what comes of it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_an_engine_does_what_plain_deepspeed_does(name):
    for rank, reports in enumerate(launched(all_engines, 2)):
        trained_alike(reports[name], f"{name}, rank {rank}")


def test_a_destroyed_engine_leaves_nothing_behind():
    for reports in launched(all_engines, 2):
        notes = reports["destroyed"]["notes"][1]
        assert [notes[f"alive {number}"] for number in range(3)] == [[], [], []]
        assert [notes[f"models {number}"] for number in range(3)] == [[True]] * 3
        smallest = 32 * 4  # bytes of a bias; a few scalars of graphs stay with their code
        assert notes["grown"] < smallest


def test_a_wrapped_model_trains_sharded_by_fsdp2():
    for reports in launched(all_engines, 2):
        theirs, *both = reports["fsdp"]
        for losses, gradients in both:
            assert losses == pytest.approx(theirs[0], abs=1e-6)
            for name, gradient in theirs[1].items():
                assert (gradients[name] - gradient).abs().max() <= GRADIENT * gradient.abs().max()
        assert reports["sharded"] == [({"forward": 25, "backward": 25}, {})] * 2

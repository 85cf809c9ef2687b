"""What DeepSpeed's users do with ZeRO-3 leads to the same numbers when ORT runs the model.

Each test is one item of the list; its scenario stands in below under the name that the test gives.
A launch runs several scenarios, first in plain DeepSpeed, then in ORT: see ``GROUPS``.

Offload to NVMe needs DeepSpeed's ``async_io`` op, and that needs libaio's headers. Without them DeepSpeed's log says
"async_io requires the dev libaio .so object and headers but these were not found", and loading the op raises "Unable
to JIT load the async_io op due to it not being compatible due to hardware/software issue". The test then asserts just
that. It compares training where libaio-dev is installed, or where CFLAGS and LDFLAGS (which DeepSpeed reads) and CPATH
and LIBRARY_PATH (which the compiler reads) lead to a copy of it.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, full_parameters, start
from launch_once import once
from models import build
from rank_processes.ranks import run_on_ranks
from stack_models import (
    HIDDEN,
    IN,
    OUT,
    Actor,
    Block,
    CalledOften,
    Critic,
    Dangling,
    External,
    Grained,
    Stack,
    Switched,
    Tied,
)
from torch import nn
from torch.nn import functional as F

import ort_zero

# -- what each rank runs -----------------------------------------------------------------------------------------------


STEPS = 6


def make(kind: type[nn.Module] = Stack, *args: Any) -> nn.Module:
    """Return a model, the same on every rank and at every call."""
    torch.manual_seed(0)
    return kind(*args)


class Run:
    """One training of one scenario: what it was told to do, and what came out.

    Args:
        ort: whether ORT runs the model, or plain DeepSpeed.
        folder: for files; this run has it to itself.
    """

    def __init__(self, ort: bool, folder: Path):
        self.ort = ort
        self.folder = folder
        self.losses: list[float] = []
        self.seen: dict[str, Any] = {}
        self.runs: Counter = Counter()
        self.engine: Any = None
        self.others: list[Any] = []
        """Engines that are to live until the result is taken."""
        self.model: Any = None
        self.initial: dict[str, torch.Tensor] = {}

    def config(self, *, stage: int = 3, top: dict | None = None, gas: int = 1, **zero: Any) -> dict[str, Any]:
        """Return the DeepSpeed config of this run; every parameter is partitioned unless `zero` says otherwise."""
        if stage == 3:
            zero.setdefault("stage3_param_persistence_threshold", 0)
            if zero["stage3_param_persistence_threshold"] is None:
                del zero["stage3_param_persistence_threshold"]
        return {**ds_config(stage, ort=True if self.ort else None, gas=gas, **zero), **(top or {})}

    def start(self, model: nn.Module, config: dict | None = None, **changes: Any) -> Any:
        """Make an engine around `model`; return it."""
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config or self.config(**changes)
        )
        return self.adopt(model, engine)

    def adopt(self, model: nn.Module, engine: Any) -> Any:
        """Take an engine that somebody else made."""
        self.engine, self.model = engine, model
        self.initial = full_parameters(model)
        return engine

    def loss(self, i: int, *args: Any, engine: Any = None) -> torch.Tensor:
        """Return the loss of batch `i` of this rank."""
        engine = engine or self.engine
        generator = torch.Generator().manual_seed(1000 + 10 * (i % 2) + torch.distributed.get_rank())
        if torch.is_grad_enabled():
            self.runs["forward"] += 1
        if hasattr(self.model, "generate"):
            ids = torch.randint(0, 211, (4, 16), generator=generator)
            return engine(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        x, y = torch.randn(4, IN, generator=generator), torch.randn(4, OUT, generator=generator)
        return F.mse_loss(engine(x, *args), y)

    def backward(self, loss: torch.Tensor, forwards: int = 1, engine: Any = None) -> None:
        """Run the backward of a loss that `forwards` forwards led to."""
        self.runs["backward"] += forwards
        (engine or self.engine).backward(loss)

    def train(self, steps: int | range = STEPS, *args: Any, engine: Any = None) -> None:
        """Train; the losses are kept."""
        engine = engine or self.engine
        for i in range(steps) if isinstance(steps, int) else steps:
            loss = self.loss(i, *args, engine=engine)
            self.backward(loss, engine=engine)
            engine.step()
            self.losses.append(loss.item())

    def evaluate(self, i: int = 0, *args: Any) -> None:
        """Compute a loss in eval mode; it is kept with the others."""
        self.engine.eval()
        with torch.no_grad():
            self.losses.append(self.loss(i, *args).item())
        self.engine.train()

    def result(self) -> dict[str, Any]:
        """Return what the scenario led to, and end the engine."""
        gc.collect()
        result = {
            "losses": self.losses,
            "parameters": full_parameters(self.model),
            "initial": self.initial,
            "seen": self.seen,
            "runs": dict(self.runs),
            "status": ort_zero.status(),
        }
        self.end()
        return result

    def end(self) -> None:
        """Destroy every engine that is left."""
        for engine in (self.engine, *self.others):
            if engine is not None:
                engine.destroy()
        self.engine = self.model = None
        self.others.clear()


def compare(folder: str, names: list[str]) -> dict[str, Any]:
    """Run each scenario in plain DeepSpeed and in ORT; return by name what the tests assert on."""
    start()
    return {name: _compare(Path(folder) / name, name) for name in names}


def _compare(folder: Path, name: str) -> dict[str, Any]:
    results = {}
    for kind in ("torch", "ort"):
        run = Run(kind == "ort", folder / kind)
        try:
            globals()[name](run)
            results[kind] = run.result()
        except Exception:
            return {"error": f"{name} in {kind}:\n{traceback.format_exc()}"}
        finally:
            run.end()  # what a failed scenario leaves behind would make the next one fail too
            run = None
            gc.collect()
    theirs, ours = results["torch"], results["ort"]

    def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        return max((a[key] - b[key]).abs().max().item() for key in a)

    return {
        "reference": theirs["losses"],
        "losses": ours["losses"],
        "parameter_difference": apart(theirs["parameters"], ours["parameters"]),
        "same_names": list(theirs["parameters"]) == list(ours["parameters"]),
        "moved": apart(ours["initial"], ours["parameters"]),
        "seen": (theirs["seen"], ours["seen"]),
        "runs": ours["runs"],
        "models": ours["status"]["models"],
        "fallbacks": ours["status"]["fallbacks"],
        "plain_is_plain": not theirs["status"]["models"],
    }


def stack(run: Run) -> None:
    """Train six steps."""
    run.start(make())
    run.train()


def zero_init(run: Run) -> None:
    """Build the model under ``deepspeed.zero.Init``."""
    import deepspeed

    config = run.config()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = make()
    run.seen["partitioned at birth"] = all(p.numel() == 0 and hasattr(p, "ds_id") for p in model.parameters())
    run.start(model, config)
    run.train()


def zero3_init_flag(run: Run) -> None:
    """Build a transformers model from a config under Accelerate's ``zero3_init_flag``."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DummyOptim
    from transformers import AutoModelForCausalLM

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # what `accelerate launch` sets
    try:
        plugin = DeepSpeedPlugin(hf_ds_config=run.config(), zero3_init_flag=True)
        accelerator = Accelerator(deepspeed_plugin=plugin)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(build("gpt2_eager").config)
        run.seen["partitioned at birth"] = all(p.numel() == 0 and hasattr(p, "ds_id") for p in model.parameters())
        engine, _ = accelerator.prepare(model, DummyOptim(model.parameters(), lr=1e-3))
        run.adopt(model, engine)
        for i in range(STEPS):
            loss = run.loss(i)
            run.runs["backward"] += 1
            accelerator.backward(loss)
            run.losses.append(loss.item())
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
        AcceleratorState._reset_state(True)
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()


def from_pretrained(run: Run) -> None:
    """Load a local checkpoint by ``from_pretrained`` straight into partitioned weights."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    source = build("gpt2_eager")
    if torch.distributed.get_rank() == 0:
        source.save_pretrained(run.folder)
    torch.distributed.barrier()
    config = run.config()
    keep = HfDeepSpeedConfig(config)
    model = AutoModelForCausalLM.from_pretrained(run.folder)
    del keep
    run.seen["partitioned at birth"] = all(p.numel() == 0 and hasattr(p, "ds_id") for p in model.parameters())
    run.start(model, config)
    run.seen["as saved"] = all(torch.equal(run.initial[n], p.detach()) for n, p in source.named_parameters())
    model.train()
    run.train()


def _offload(run: Run, optimizer: bool, parameters: bool, cpu_adam: bool) -> None:
    zero: dict[str, Any] = {}
    if optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if parameters:
        zero["offload_param"] = {"device": "cpu"}
    config = run.config(**zero)
    if cpu_adam:
        del config["optimizer"]["params"]["torch_adam"]
    else:
        config["zero_force_ds_cpu_optimizer"] = False
    run.start(make(), config)
    run.seen["optimizer"] = type(run.engine.optimizer.optimizer).__name__
    run.train()


def offload_optimizer(run: Run) -> None:
    """Keep optimizer states on the CPU, with DeepSpeed's own Adam."""
    _offload(run, optimizer=True, parameters=False, cpu_adam=True)


def offload_optimizer_torch_adam(run: Run) -> None:
    """Keep optimizer states on the CPU, with torch's AdamW."""
    _offload(run, optimizer=True, parameters=False, cpu_adam=False)


def offload_parameters(run: Run) -> None:
    """Keep parameters on the CPU; DeepSpeed wants its own optimizer states there too."""
    _offload(run, optimizer=False, parameters=True, cpu_adam=False)


def offload_both(run: Run) -> None:
    """Keep parameters and optimizer states on the CPU."""
    _offload(run, optimizer=True, parameters=True, cpu_adam=True)


def offload_nvme(run: Run) -> None:
    """Keep parameters and optimizer states in files, if DeepSpeed can build its async_io op here."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    builder = AsyncIOBuilder()
    run.seen["op"] = builder.is_compatible(verbose=False)
    if not run.seen["op"]:
        try:
            builder.load(verbose=False)
        except RuntimeError as error:
            run.seen["refused"] = str(error)
        run.start(make())
        run.train()
        return
    place = {"device": "nvme", "nvme_path": str(run.folder), "buffer_size": 100_000}
    config = run.config(
        offload_optimizer={"device": "nvme", "nvme_path": str(run.folder)},
        offload_param=place,
    )
    del config["optimizer"]["params"]["torch_adam"]
    run.start(make(), config)
    run.train()


def persistence_none(run: Run) -> None:
    """Partition every weight."""
    run.start(make(), stage3_param_persistence_threshold=0)
    run.seen["whole"] = sum(p.ds_persist for p in run.model.parameters())
    run.train()


def persistence_default(run: Run) -> None:
    """Leave the persistence threshold at its default, so that all these small weights stay whole."""
    run.start(make(), stage3_param_persistence_threshold=None)
    run.seen["whole"] = sum(p.ds_persist for p in run.model.parameters())
    run.train()


def persistence_some(run: Run) -> None:
    """Keep biases whole and partition weights."""
    run.start(make(), stage3_param_persistence_threshold=50)
    run.seen["whole"] = sum(p.ds_persist for p in run.model.parameters())
    run.train()


def sub_groups(run: Run) -> None:
    """Step the optimizer over many small groups."""
    run.start(make(), sub_group_size=200)
    run.seen["groups"] = len(run.engine.optimizer.fp16_groups)
    run.train()


def tight_window(run: Run) -> None:
    """Leave little room for parameters that are whole, and for those that are gathered ahead."""
    run.start(
        make(), stage3_max_live_parameters=300, stage3_prefetch_bucket_size=200, stage3_max_reuse_distance=100,
        reduce_bucket_size=300,
    )  # fmt: skip
    run.train()


def overlap(run: Run) -> None:
    """Reduce while the backward runs."""
    run.start(make(), overlap_comm=True, contiguous_gradients=True)
    run.train()


def leaf_modules(run: Run) -> None:
    """Treat each block as one unit."""
    from deepspeed.utils import set_z3_leaf_modules

    model = make()
    run.seen["leaves"] = len(set_z3_leaf_modules(model, [Block]))
    run.start(model)
    run.train()
    run.evaluate()


def granularity(run: Run) -> None:
    """Have DeepSpeed choose the leaves by size."""
    from deepspeed.utils import get_z3_leaf_modules

    run.start(make(Grained), stage3_module_granularity_threshold=300)
    run.seen["leaves"] = [type(m).__name__ for m in get_z3_leaf_modules(run.model)]
    run.train()
    run.evaluate()


def external_unregistered(run: Run) -> None:
    """Use a weight outside of its module and tell nobody."""
    run.start(make(External))
    run.train()
    run.evaluate()


def external_registered(run: Run) -> None:
    """Use a weight outside of its module, registered as DeepSpeed asks for."""
    run.start(make(External, True))
    run.train()
    run.evaluate()


def external_returned(run: Run) -> None:
    """Return a weight from an inner module and use it outside."""
    run.start(make(Dangling))
    run.train()
    run.evaluate()


def tied(run: Run) -> None:
    """Share weights between modules."""
    run.start(make(Tied))
    run.train()
    run.evaluate()


def called_often(run: Run) -> None:
    """Call every module several times in one forward."""
    run.start(make(CalledOften))
    run.train()
    run.evaluate()


def switched_order(run: Run) -> None:
    """Turn the order of the modules round from step to step."""
    run.start(make(Switched))
    for i, backwards in enumerate((False, False, True, True, False, True)):
        run.train(range(i, i + 1), backwards)


def unused_modules(run: Run) -> None:
    """Leave a module out in some of the steps."""
    run.start(make(Switched))
    for i, skip in enumerate((False, True, True, False, True, False)):
        run.train(range(i, i + 1), False, skip)


def freezing(run: Run) -> None:
    """Freeze some layers in mid-training and set them free again."""
    run.start(make())
    run.train(range(0, 2))
    run.model.blocks[1].requires_grad_(False)
    run.model.last.bias.requires_grad_(False)
    run.train(range(2, 4))
    run.model.requires_grad_(True)
    run.train(range(4, 6))


def frozen_at_birth(run: Run) -> None:
    """Train with layers that never get a gradient, the first one among them."""
    import deepspeed

    model = make()
    model.first.requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=run.config())
    run.adopt(model, engine)
    run.train()


def gathered(run: Run) -> None:
    """Read and change weights in mid-training."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param

    run.start(make())
    run.train(range(0, 2))
    weight, bias = run.model.first.weight, run.model.last.bias
    with GatheredParameters([weight, bias]):
        run.seen["shape"] = tuple(weight.shape)
        run.losses += [weight.norm().item(), bias.norm().item()]
    run.seen["shape after"] = tuple(weight.shape)
    with GatheredParameters(weight, modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            weight.data.mul_(0.5)
    run.evaluate()
    run.train(range(2, 4))
    safe_set_full_fp32_param(run.model.last.weight, torch.full((OUT, HIDDEN), 0.25))
    run.evaluate()
    loss = run.loss(4)
    run.backward(loss)
    run.losses += [loss.item(), safe_get_full_grad(weight).norm().item()]
    run.engine.step()
    run.losses.append(safe_get_full_fp32_param(weight).norm().item())
    run.train(range(5, 6))


def accumulation(run: Run) -> None:
    """Step after three backwards each."""
    run.start(make(), gas=3)
    run.train(9)


def clipping(run: Run) -> None:
    """Clip gradients far below their norm."""
    run.start(make(), top={"gradient_clipping": 0.01}, gas=2)
    run.train(8)
    run.losses.append(float(run.engine.get_global_grad_norm()))


def no_sync_stage_1(run: Run) -> None:
    """Leave the reduction of one backward to the next one, under ZeRO-1."""
    run.start(make(), stage=1)
    for i in range(STEPS):
        with run.engine.no_sync():
            first = run.loss(i)
            run.backward(first)
        second = run.loss(i + 1)
        run.backward(second)
        run.engine.step()
        run.losses += [first.item(), second.item()]


def no_sync_stage_3(run: Run) -> None:
    """Ask for what DeepSpeed refuses under ZeRO-3, and train on."""
    run.start(make())
    run.train(range(0, 3))
    try:
        with run.engine.no_sync():
            pass
    except AssertionError as error:
        run.seen["refused"] = str(error)
    run.train(range(3, 6))


def coalesced(run: Run) -> None:
    """Reduce once for several backwards, as DeepSpeed offers for ZeRO-3."""
    run.start(make())
    for i in range(STEPS):
        with run.engine.coalesce_grad_reduction():
            for micro in range(2):
                loss = run.loss(i + micro)
                run.backward(loss)
                run.losses.append(loss.item())
        run.engine.step()


def eval_between(run: Run) -> None:
    """Evaluate after every other step, and without a gradient in train mode."""
    run.start(make())
    for i in range(0, STEPS, 2):
        run.train(range(i, i + 2))
        run.evaluate(i)
        with torch.no_grad():
            run.losses.append(run.loss(i + 1).item())


def mode_by_the_module(run: Run) -> None:
    """Switch modes on the user's module, which was in eval mode when the engine got it."""
    model = make().eval()
    run.start(model)
    model.train()
    for i in range(3):
        run.train(range(i, i + 1))
        model.eval()
        run.losses.append(run.loss(i + 1).item())
        with torch.no_grad():
            run.losses.append(run.loss(i + 1).item())
        model.train()


def generate_between(run: Run) -> None:
    """Generate text between steps, through the engine, the module, and TRL's way."""
    from deepspeed.runtime.zero import unwrap_model_for_generation

    run.start(build("gpt2_eager"))
    ids = torch.arange(8).reshape(2, 4) + torch.distributed.get_rank()
    arguments = dict(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    run.train(range(0, 3))
    run.engine.eval()
    with torch.no_grad():
        run.seen["engine"] = run.engine.module.generate(**arguments).tolist()
        run.seen["module"] = run.model.generate(**arguments).tolist()
        with unwrap_model_for_generation(run.engine) as unwrapped:
            run.seen["unwrapped"] = unwrapped.generate(**arguments).tolist()
    run.engine.train()
    run.train(range(3, 6))


def two_forwards(run: Run) -> None:
    """Run the backward of a sum of two forwards, with buckets so small that the first run's are reduced before."""
    run.start(make(), reduce_bucket_size=300)
    for i in range(STEPS):
        first, second = run.loss(i), run.loss(i + 1)
        run.backward(first + 2 * second, forwards=2)
        run.engine.step()
        run.losses += [first.item(), second.item()]


def two_forwards_two_backwards(run: Run) -> None:
    """Run two forwards, then their backwards one after the other, over a boundary of accumulation."""
    run.start(make(), gas=2)
    for i in range(STEPS):
        first, second = run.loss(i), run.loss(i + 1)
        for loss in (first, second):
            run.backward(loss)
            run.engine.step()
        run.losses += [first.item(), second.item()]


def forward_of_no_use(run: Run) -> None:
    """Drop some forwards without a backward, and run others without gradient before the backward."""
    run.start(make())
    for i in range(STEPS):
        run.losses.append(run.loss(i + 1).item())
        loss = run.loss(i)
        with torch.no_grad():
            run.losses.append(run.loss(i + 1).item())
        run.backward(loss)
        run.engine.step()
        run.losses.append(loss.item())


def other_structure_before_backward(run: Run) -> None:
    """Run a forward that takes another path before the backward of the first one."""
    run.start(make(Switched))
    for i in range(3):
        first, second = run.loss(i), run.loss(i + 1, i == 0, i > 0)
        gc.collect()  # a graph that was replaced must not be gone while its backward is to come
        run.backward(first + 2 * second, forwards=2)
        run.engine.step()
        run.losses += [first.item(), second.item()]


def gradient_hooks(run: Run) -> None:
    """Watch and change gradients through hooks of torch, put on before and after the engine was made."""
    model = make(Tied)
    calls: Counter = Counter()
    norms: list[float] = []

    def after(name: str):
        def hook(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            calls[name, "post", tuple(parameter.shape), None if gradient is None else tuple(gradient.shape)] += 1

        return hook

    def on_gradient(name: str):
        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            calls[name, "grad", tuple(gradient.shape)] += 1
            norms.append(gradient.norm().item())
            return gradient * 0.5 if "bias" in name else None

        return hook

    for name in ("first.bias", "tail.weight"):
        model.get_parameter(name).register_post_accumulate_grad_hook(after(f"early {name}"))
        model.get_parameter(name).register_hook(on_gradient(f"early {name}"))
    run.start(model)
    for name in ("first.weight", "last.bias", "head.weight"):
        model.get_parameter(name).register_post_accumulate_grad_hook(after(name))
        model.get_parameter(name).register_hook(on_gradient(name))
    run.train()
    run.seen["calls"] = dict(calls)
    run.losses += sorted(norms)


def actor_and_critic(run: Run) -> None:
    """Train two engines in turn; the second one learns from what the first one says."""
    critic_model = make(Critic)
    critic = run.start(critic_model)
    actor = run.start(make(Actor), stage3_prefetch_bucket_size=300)
    for i in range(STEPS):
        run.train(range(i, i + 1), engine=actor)
        with torch.no_grad():
            said = actor(torch.full((2, IN), 0.1 * i))
        loss = critic(torch.cat((said, said[:, :2]), dim=1)).square().mean()
        run.backward(loss, engine=critic)
        run.runs["forward"] += 1
        critic.step()
        run.losses.append(loss.item())
    run.seen["engines"] = 2
    run.losses += [p.norm().item() for p in full_parameters(critic_model).values()]
    run.runs = Counter({key: count // 2 for key, count in run.runs.items()})
    modules = [m["module"] for m in ort_zero.status()["models"]] if run.ort else ["Actor", "Critic"]
    run.seen["modules"] = sorted(modules)
    run.others.append(critic)


def both_engines_in_one_loss(run: Run) -> None:
    """Let the gradient of the second engine's loss flow through the first engine."""
    first = run.start(make(Actor))
    second = run.start(make(Critic))
    for i in range(STEPS):
        said = first(torch.full((2, IN), 0.1 * (i + 1)))
        loss = second(torch.cat((said, said[:, :2]), dim=1)).square().mean()
        run.runs["forward"] += 1
        run.backward(loss, engine=second)
        for engine in (first, second):
            engine.step()
        run.losses.append(loss.item())
    run.seen["engines"] = 2
    run.losses += [p.norm().item() for p in full_parameters(first.module).values()]
    run.others.append(first)


def initialized_again(run: Run) -> None:
    """Give the same module to a second engine after the first one was destroyed."""
    model = make()
    run.start(model)
    run.train(range(0, 3))
    run.engine.destroy()
    run.engine = None
    gc.collect()
    run.runs.clear()
    run.start(model)
    run.train(range(3, 6))


def destroyed(run: Run) -> None:
    """Destroy an engine; see who is still there."""
    from ort_zero.ortmodule.runtime.zero3 import gather_reduce

    engine = run.start(make(Actor))
    run.train(2)
    run.evaluate()
    gone = {
        "engine": weakref.ref(engine), "wrapper": weakref.ref(engine.module), "module": weakref.ref(run.model),
        "weight": weakref.ref(run.model.first.weight), "optimizer": weakref.ref(engine.optimizer),
    }  # fmt: skip
    engine.destroy()
    del engine
    run.engine = run.model = None
    gc.collect()
    run.seen["alive"] = [name for name, ref in gone.items() if ref() is not None]
    run.seen["tables"] = len(gather_reduce.executors)
    run.runs.clear()
    run.start(make(Critic))
    run.train()


def checkpoints(run: Run) -> None:
    """Save in mid-training, train on, go back, and go on in another engine too."""
    _checkpoints(run, None)


def deepspeed_checkpoints(run: Run) -> None:
    """Save in mid-training in DeepSpeed's own format, train on, and go back."""
    _checkpoints(run, {"sharded": False})


def _checkpoints(run: Run, section: dict | None) -> None:
    straight = Run(False, run.folder)
    straight.start(make())
    straight.train()
    run.seen["straight"] = straight.losses
    straight.end()

    config = run.config(stage3_gather_16bit_weights_on_model_save=True)
    if run.ort and section:
        config["ort_zero"]["checkpoint"] = section
    run.start(make(), config)
    run.train(range(0, 3))
    run.engine.save_checkpoint(str(run.folder), tag="middle", client_state={"epoch": 7})
    run.engine.save_16bit_model(str(run.folder), "model.bin")
    there = full_parameters(run.model)
    run.train(range(3, 6))
    torch.distributed.barrier()
    saved = torch.load(run.folder / "model.bin", weights_only=True)
    run.seen["16 bit model"] = all(torch.equal(saved[name], there[name]) for name in there)
    run.seen["client state"] = run.engine.load_checkpoint(str(run.folder), tag="middle")[1]["epoch"]
    run.train(range(3, 6))
    run.end()
    gc.collect()
    run.runs.clear()
    torch.manual_seed(1)
    run.start(Stack(), config)
    run.engine.load_checkpoint(str(run.folder), tag="middle")
    run.train(range(3, 6))


# -- what comes of it --------------------------------------------------------------------------------------------------


LOSS = 2e-4
PARAMETERS = 1e-4

GROUPS = [
    ["zero_init", "zero3_init_flag", "from_pretrained"],
    ["offload_optimizer", "offload_optimizer_torch_adam", "offload_parameters", "offload_both", "offload_nvme"],
    ["persistence_none", "persistence_some", "persistence_default", "sub_groups", "tight_window", "overlap",
     "leaf_modules", "granularity"],
    ["external_unregistered", "external_registered", "external_returned", "tied", "called_often", "switched_order",
     "unused_modules", "freezing", "frozen_at_birth", "gathered"],
    ["accumulation", "clipping", "no_sync_stage_1", "no_sync_stage_3", "coalesced"],
    ["eval_between", "mode_by_the_module", "generate_between", "two_forwards", "two_forwards_two_backwards",
     "forward_of_no_use"],
    ["other_structure_before_backward"],
    ["gradient_hooks", "actor_and_critic", "both_engines_in_one_loss", "initialized_again", "destroyed"],
    ["checkpoints", "deepspeed_checkpoints"],
]  # fmt: skip


def _build_operators() -> None:
    """Build what offloading uses, where DeepSpeed can: it takes minutes on a busy machine, and ranks have a limit."""
    for name in ("CPUAdamBuilder", "PinMemoryBuilder"):
        code = f"from deepspeed.accelerator import get_accelerator as a; a().create_op_builder({name!r}).load()"
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)  # whoever needs it, will say so


@once
def _launch(group: int) -> list[dict]:
    if any(name.startswith("offload") for name in GROUPS[group]):
        _build_operators()
    with tempfile.TemporaryDirectory(prefix="ort_zero_features_") as folder:
        return run_on_ranks(compare, 2, folder, GROUPS[group], timeout=800)


def _reports(name: str) -> list[dict]:
    """Return what scenario `name` led to, one report for each rank, after the assertions that all share."""
    reports = [report[name] for report in _launch(next(i for i, group in enumerate(GROUPS) if name in group))]
    for rank, report in enumerate(reports):
        _trained_alike(report, f"{name}, rank {rank}")
    return reports


def _trained_alike(report: dict, where: str) -> None:
    assert "error" not in report, report["error"]
    assert report["plain_is_plain"], f"{where}: the reference was not plain DeepSpeed"
    assert len(report["losses"]) == len(report["reference"]) > 0, where
    for i, (theirs, ours) in enumerate(zip(report["reference"], report["losses"], strict=True)):
        assert abs(theirs - ours) <= LOSS, f"{where}: value {i} is {ours}, plain DeepSpeed's {theirs}"
    assert report["same_names"] and report["parameter_difference"] <= PARAMETERS, where
    assert report["moved"] > 10 * PARAMETERS, f"{where}: the parameters did not move"
    assert report["fallbacks"] == 0, where
    for status in report["models"]:
        assert status["backend"] == "onnxruntime", where
        training = status["graphs"]["training"]
        assert training["runs"] == report["runs"], where
        if status["zero_stage"] == 3:
            assert training["gathers"] > 0 and training["reduces"] > 0, where
    assert len(report["models"]) == report["seen"][1].get("engines", 1), f"{where}: {report['models']}"


def _seen_alike(name: str) -> list[dict]:
    """Return what ORT's scenario saw on each rank, which is what plain DeepSpeed's saw."""
    result = []
    for report in _reports(name):
        theirs, ours = report["seen"]
        assert theirs == ours, name
        result.append(ours)
    return result


@pytest.mark.parametrize("name", ["zero_init", "zero3_init_flag"])
def test_a_model_that_is_built_partitioned(name):
    for seen in _seen_alike(name):
        assert seen["partitioned at birth"]


def test_from_pretrained_into_partitioned_weights():
    for seen in _seen_alike("from_pretrained"):
        assert seen["partitioned at birth"] and seen["as saved"]


def test_optimizer_states_on_the_cpu():
    for seen in _seen_alike("offload_optimizer"):
        assert seen["optimizer"] == "DeepSpeedCPUAdam"
    for seen in _seen_alike("offload_optimizer_torch_adam"):
        assert seen["optimizer"] == "AdamW"


def test_parameters_on_the_cpu():
    _seen_alike("offload_parameters")


def test_optimizer_states_and_parameters_on_the_cpu():
    for seen in _seen_alike("offload_both"):
        assert seen["optimizer"] == "DeepSpeedCPUAdam"


def test_optimizer_states_and_parameters_in_files():
    for seen in _seen_alike("offload_nvme"):
        assert seen["op"] or "Unable to JIT load the async_io op" in seen["refused"]


@pytest.mark.parametrize(
    ("name", "whole"), [("persistence_none", 0), ("persistence_some", 8), ("persistence_default", 16)]
)
def test_persistence_threshold(name, whole):
    for seen in _seen_alike(name):
        assert seen["whole"] == whole


def test_small_sub_groups():
    for seen in _seen_alike("sub_groups"):
        assert seen["groups"] > 5


def test_few_live_parameters_and_small_buckets():
    _seen_alike("tight_window")


def test_overlapping_communication():
    _seen_alike("overlap")


def test_leaf_modules():
    for seen in _seen_alike("leaf_modules"):
        assert seen["leaves"] == 3


def test_leaf_modules_by_granularity():
    for seen in _seen_alike("granularity"):
        assert seen["leaves"] == ["Block"] * 3


@pytest.mark.parametrize("name", ["external_unregistered", "external_registered", "external_returned"])
def test_weights_that_are_used_outside_of_their_module(name):
    _seen_alike(name)


def test_tied_weights_across_modules():
    _seen_alike("tied")


def test_modules_that_are_called_several_times():
    _seen_alike("called_often")


def test_order_of_modules_that_changes_from_step_to_step():
    _seen_alike("switched_order")


def test_modules_that_some_steps_leave_out():
    _seen_alike("unused_modules")


def test_freezing_and_unfreezing_in_mid_training():
    _seen_alike("freezing")


def test_layers_that_are_frozen_from_the_start():
    _seen_alike("frozen_at_birth")


def test_reading_and_changing_weights_in_mid_training():
    for seen in _seen_alike("gathered"):
        assert seen == {"shape": (18, 7), "shape after": (0,)}


def test_gradient_accumulation():
    _seen_alike("accumulation")


def test_gradient_clipping():
    _seen_alike("clipping")


def test_no_sync_under_zero_1():
    _seen_alike("no_sync_stage_1")


def test_no_sync_under_zero_3_is_refused_as_deepspeed_does():
    for seen in _seen_alike("no_sync_stage_3"):
        assert "incompatible with gradient partitioning" in seen["refused"]


def test_one_reduction_for_several_backwards():
    _seen_alike("coalesced")


def test_evaluation_in_between():
    for report in _reports("eval_between"):
        assert report["models"][-1]["graphs"]["inference"]["runs"] == {"forward": 6}


def test_train_and_eval_mode_set_on_the_module_itself():
    for report in _reports("mode_by_the_module"):
        done = report["models"][-1]["transitions"]
        built = [t["steps"].keys() for t in done if t["mode"] == "training" and t["transition"] == "export"]
        # one for each mode of the module; that in eval mode has the same trace
        assert ["export" in steps for steps in built] == [True, False] and "shared export" in built[1]
        assert report["models"][-1]["graphs"]["inference"]["runs"] == {"forward": 3}


def test_generation_in_between():
    for seen in _seen_alike("generate_between"):
        assert seen["engine"] == seen["module"] == seen["unwrapped"]


def test_backward_of_two_forwards():
    _seen_alike("two_forwards")


def test_two_forwards_and_then_their_backwards():
    _seen_alike("two_forwards_two_backwards")


def test_forwards_without_a_backward_and_without_gradients():
    for report in _reports("forward_of_no_use"):
        assert report["models"][-1]["graphs"]["inference"]["runs"] == {"forward": 6}


def test_a_forward_of_another_structure_before_the_backward():
    _seen_alike("other_structure_before_backward")


def test_gradient_hooks_are_called_as_in_plain_deepspeed():
    for seen in _seen_alike("gradient_hooks"):
        assert len(seen["calls"]) == 10 and set(seen["calls"].values()) == {6}


def test_actor_and_critic():
    for seen in _seen_alike("actor_and_critic"):
        assert seen["modules"] == ["Actor", "Critic"]


def test_a_loss_that_goes_through_two_engines():
    _seen_alike("both_engines_in_one_loss")


def test_a_module_whose_engine_was_destroyed_gets_another_one():
    _seen_alike("initialized_again")


def test_a_destroyed_engine_leaves_nothing_behind():
    for report in _reports("destroyed"):
        theirs, ours = report["seen"]
        if ours["alive"] and ours["alive"] == theirs["alive"]:
            pytest.fail(
                f"DeepSpeed itself keeps a destroyed engine's {', '.join(theirs['alive'])} alive", pytrace=False
            )
        assert ours == {"alive": [], "tables": 0}


@pytest.mark.parametrize("name", ["checkpoints", "deepspeed_checkpoints"])
def test_saving_in_mid_training_and_going_back(name):
    for report, seen in zip(_reports(name), _seen_alike(name), strict=True):
        losses = report["losses"]
        assert seen["16 bit model"] and seen["client state"] == 7
        assert max(abs(a - b) for a, b in zip(losses[:6], seen["straight"], strict=True)) <= LOSS
        assert losses[6:9] == pytest.approx(losses[3:6], abs=1e-6), "the same engine, loaded"
        assert losses[9:] == pytest.approx(losses[3:6], abs=1e-6), "another engine, loaded"


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_world_sizes(ranks, tmp_path):
    for rank, report in enumerate(run_on_ranks(compare, ranks, str(tmp_path), ["stack", "tied"])):
        for name in ("stack", "tied"):
            _trained_alike(report[name], f"{name}, rank {rank} of {ranks}")

"""Small training programs with a fault each, and healthy ones, for the check of one run."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import tiny_models
import torch
from torch import nn
from torch.nn import functional as F

from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber
from ort_zero.statistics.collect.subscribed_model import remember

STEPS = 8
WORDS = 60
FAULTS: dict[str, Fault] = {}
HEALTHY: dict[str, Callable[[Path], None]] = {}


@dataclass(frozen=True)
class Fault:
    """A program, and what the check must say of it."""

    run: Callable[[Path], None]
    kind: str
    text: str
    step: int
    module: str
    certain: bool


def fault(kind: str, text: str, step: int, module: str = "", certain: bool = True):
    """Add a program to :data:`FAULTS` with the finding's kind, a part of its text, the step, the end of the place."""

    def add(run: Callable[[Path], None]) -> Callable[[Path], None]:
        FAULTS[run.__name__] = Fault(run, kind, text, step, module, certain)
        return run

    return add


def healthy(run: Callable[[Path], None]) -> Callable[[Path], None]:
    """Add a program to :data:`HEALTHY`."""
    HEALTHY[run.__name__] = run
    return run


class Net(nn.Module):
    """Two hidden layers; `between` is called with the first one's values and the number of the call."""

    def __init__(self, between=None, dropout: float = 0.0, norm: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(16, 32), Middle(between), nn.Linear(32, 4)
        self.norm, self.drop = nn.BatchNorm1d(32) if norm else nn.Identity(), nn.Dropout(dropout)

    def forward(self, x):
        return self.last(self.drop(F.gelu(self.middle(self.norm(self.first(x))))))


class Middle(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.between, self.calls = between, -1
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        self.calls += 1
        x = self.linear(x)
        return x if self.between is None else self.between(x, self.calls)


def collect(model: nn.Module, folder: Path):
    return GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(folder))])


@contextlib.contextmanager
def collecting(model: nn.Module, folder: Path) -> Iterator[None]:
    """Collect statistics of a model within the block."""
    session = collect(model, folder)
    yield
    session.remove()


def batches(steps: int = STEPS) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        yield step, torch.randn(8, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def sentences(steps: int = STEPS) -> Iterator[dict[str, torch.Tensor]]:
    for step in range(steps):
        words = torch.randint(0, WORDS, (2, 12), generator=torch.Generator().manual_seed(step))
        yield {"input_ids": words, "labels": words.clone()}


def train(
    folder: Path, model: nn.Module, optimizer=None, after=None, before=None, steps: int = STEPS, loss_of=None,
    every: int = 1,
):  # fmt: skip
    """Train a :class:`Net`.

    `optimizer` may be a partial call that makes one. `before` is called before each step, `after` after each backward
    and after each update. The optimizer steps after `every` backwards.
    """
    if optimizer is None or isinstance(optimizer, functools.partial):
        optimizer = (optimizer or functools.partial(torch.optim.AdamW, lr=1e-3))(model.parameters())
    with collecting(model, folder):
        for step, x, y in batches(steps):
            if before is not None:
                x, y = before(step, x, y) or (x, y)
            loss = F.cross_entropy(model(x), y) if loss_of is None else loss_of(model(x), y)
            loss.backward()
            if after is not None:
                after(step)
            if step % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()


def evaluated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a model's result in evaluation mode without gradients; the model trains again afterwards."""
    model.eval()
    with torch.no_grad():
        result = model(x)
    model.train()
    return result


def train_language(folder: Path, model: nn.Module, optimizer=None, before=None, steps: int = STEPS):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    with collecting(model, folder):
        for step, batch in enumerate(sentences(steps)):
            if before is not None:
                before(step, batch)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def small(make: Callable[..., nn.Module], **options) -> nn.Module:
    """Return a language model of two layers, with the same values each time."""
    torch.manual_seed(0)
    return make(words=WORDS, hidden=32, layers=2, **options)


def gpt2(**options):
    return small(tiny_models.gpt2, heads=2, positions=16, **options)


# --- values -----------------------------------------------------------------------------------------------------------


@fault("not finite", "range of float16", 4, "middle")
def overflow_of_float16(folder):
    model = Net(lambda x, call: x * 10.0 ** (call * 1.5)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def in_half(step, x, y):
        return x.half(), y

    train(folder, model, optimizer, before=in_half, loss_of=lambda logits, y: logits.float().clamp(-1, 1).sum())


@fault("not finite", "not in the optimizer", 2)
def clipping_by_a_norm_of_zero(folder):
    model = Net()

    def clip(step):
        for parameter in model.parameters():
            if step == 2:
                parameter.grad /= torch.zeros(())

    train(folder, model, after=clip)


@fault("not finite", "a parameter has it", 3, "last.weight")
def update_that_is_not_finite(folder):
    model = Net()

    def spoil(step, x, y):
        if step == 3:
            with torch.no_grad():
                model.last.weight[0, 0] = float("nan")

    train(folder, model, before=spoil)


# --- updates ----------------------------------------------------------------------------------------------------------


@fault("no update", "no tensor in it has a gradient", 0)
def no_trainable_layer(folder):  # PyTorch forum 84911
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model.requires_grad_(False)
    train(folder, model, optimizer, before=lambda step, x, y: (x.requires_grad_(), y))


@fault("no update", "contains that of an earlier update", 1, "and 5 more")
def gradients_are_never_zeroed(folder):  # Stack Overflow 60335387
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    optimizer.zero_grad = lambda: None
    train(folder, model, optimizer)


@fault("no update", "contains that of an earlier update", 4)
def an_obsolete_graph_no_longer_zeroes(folder):  # PyTorch 115607
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    zero = optimizer.zero_grad
    seen = []
    optimizer.zero_grad = lambda: zero() if len(seen) < 4 else None
    train(folder, model, optimizer, after=seen.append)


@fault("no update", "another tensor than the model", 0, "and 1 more")
def layer_replaced_after_the_optimizer(folder):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.last = nn.Linear(32, 4)
    train(folder, model, optimizer)


@fault("no update", "another tensor than the model", 0, "wte.weight")
def vocabulary_resized_after_the_optimizer(folder):
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.config.vocab_size = WORDS + 8
    model.set_input_embeddings(nn.Embedding(WORDS + 8, 32))
    model.lm_head.weight = model.get_input_embeddings().weight
    train_language(folder, model, optimizer)


@fault("no update", "does not change", 2, "middle.linear.weight")
def weight_that_is_loaded_again_and_again(folder):
    model = Net()
    kept = model.middle.linear.weight.detach().clone()

    def load(step, x, y):
        model.middle.linear.weight.data.copy_(kept)

    train(folder, model, before=load)


@fault("no update", "frozen parameter changes", 4, "first")
def frozen_with_its_last_gradient(folder):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer.zero_grad = lambda: [p.grad.zero_() for p in model.parameters() if p.requires_grad]
    train(folder, model, optimizer, after=lambda step: model.first.requires_grad_(False) if step == 3 else None)


@fault("no update", "no optimizer holds it", 0, "and 1 more", certain=False)
def layer_forgotten_by_the_optimizer(folder):
    model = Net()
    train(folder, model, torch.optim.AdamW([*model.first.parameters(), *model.middle.parameters()], lr=1e-3))


@fault("no update", "lost in rounding", 2, certain=False)
def updates_lost_in_bfloat16(folder):
    model = Net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    train(folder, model, optimizer, before=lambda step, x, y: (x.bfloat16(), y))


def around(activation: nn.Module, bias: float) -> nn.Module:
    """Return a model whose activation ``act`` has inputs near `bias`."""
    torch.manual_seed(0)
    first, last = nn.Linear(16, 32), nn.Linear(32, 4)
    nn.init.constant_(first.bias, bias)
    return nn.Sequential(OrderedDict(first=first, act=activation, last=last))


# --- modes, data, ties ------------------------------------------------------------------------------------------------


@fault("mode", "goes on in evaluation mode", 4)
def train_is_not_called_after_an_evaluation(folder):
    model = Net(dropout=0.1)
    train(folder, model, before=lambda step, x, y: model.eval() and None if step == 4 else None)


@fault("mode", "no forward in training mode has computed", 0, "first")
def spectral_norm_before_any_training(folder):  # PyTorch 51800
    model = Net()
    model.first = nn.utils.spectral_norm(model.first)
    evaluate_only(folder, model)


def evaluate_only(folder: Path, model: nn.Module, same_batch: bool = False):
    session = collect(model.eval(), folder)
    with torch.no_grad():
        for _, x, _ in batches(4):
            model(torch.ones(4, 16) if same_batch else x)
    session.remove()


@fault("mode", "dropout is active in evaluation mode", 1, "middle")
def dropout_that_ignores_the_mode(folder):  # transformers 33844
    evaluate_only(folder, Net(lambda x, call: F.dropout(x, 0.5)))


@fault("mode", "dropout is active in evaluation mode", 1, "middle")
def attention_dropout_that_ignores_the_mode(folder):  # transformers 33844
    def attend(x, call):
        x = x.view(1, 8, 32)
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).view(8, 32)

    evaluate_only(folder, Net(attend))


@fault("mode", "another result", 1, certain=False)
def mean_over_masks_of_dropout(folder):
    evaluate_only(folder, Net(lambda x, call: F.dropout(x, 0.5)), same_batch=True)


@fault("mode", "which may be meant", 0, certain=False)
def evaluation_in_training_mode(folder):
    model = Net(dropout=0.5)
    with collecting(model, folder), torch.no_grad():
        for _, x, _ in batches(3):
            model(x)


class Drawn(torch.utils.data.Dataset):
    """Draws each sample from a generator of which every worker process gets a copy."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.generator.standard_normal(16, np.float32), index % 4


class Shared(torch.utils.data.IterableDataset):
    """Reads all samples in every worker process."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        return ((torch.randn(16, generator=generator), 0) for _ in range(32))


def train_on(folder: Path, dataset, **options):
    loaded = iter(torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=2, **options))
    train(folder, Net(), before=lambda step, x, y: next(loaded))


@fault("data", "workers of a data loader yield equal batches", 1)
def workers_that_draw_the_same_numbers(folder):  # Stack Overflow 67180955
    train_on(folder, Drawn())


@fault("data", "workers of a data loader yield equal batches", 1)
def workers_that_read_the_same_shard(folder):
    train_on(folder, Shared())


@fault("data", "follows itself", 1, certain=False)
def each_batch_twice(folder):
    every = list(batches())
    train(folder, Net(), before=lambda step, x, y: every[step // 2][1:])


@fault("untied", "were one tensor", 4, "wte.weight")
def untied_within_training(folder):
    model = gpt2()

    def load(step, batch):
        if step == 4:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

    train_language(folder, model, before=load)


@fault("untied", "configuration ties", 0)
def untied_before_training(folder):
    model = gpt2()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    train_language(folder, model)


# --- replicas: one process stands for two ranks -----------------------------------------------------------------------


def replicas(folder: Path, disturb=None, wrapped: bool = True, same_data: bool = False, sharded: bool = False) -> None:
    """Train two replicas with averaged gradients; `disturb` is called with step and models after the average.

    `sharded`: each model has other linear layers, as under tensor parallelism, and shares a norm alone.
    """
    models = [Net(), Net()]
    for rank, model in enumerate(models):
        if sharded:
            model.norm = nn.LayerNorm(32)
            for parameter in {*model.parameters()} - {*model.norm.parameters()}:
                parameter.tensor_model_parallel = True
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(rank))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    sessions = []
    for rank, model in enumerate(models):
        with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE="2"):
            remember(model, data_parallel=wrapped)
            sessions.append(collect(model, folder))
            model(torch.zeros(2, 16))  # opens the file
    for step in range(STEPS):
        for rank, model in enumerate(models):
            generator = torch.Generator().manual_seed(10 * step + (0 if same_data else rank))
            logits = model(torch.randn(8, 16, generator=generator))
            F.cross_entropy(logits, torch.randint(0, 4, (8,), generator=generator)).backward()
        for one, two in zip(*((model.norm if sharded else model).parameters() for model in models)):
            one.grad = (one.grad + two.grad) / 2
            two.grad = one.grad.clone()
        if disturb is not None:
            disturb(step, models)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for session in sessions:
        session.remove()


@fault("replicas apart", "gradient in the optimizer differs", 3, "and 5 more")
def step_without_the_wrapper(folder):  # PyTorch 104336, jxmnop
    def alone(step, models):
        if step == 2:
            for parameter in models[1].parameters():
                parameter.grad *= 0.9

    replicas(folder, alone)


@contextlib.contextmanager
def second_model(change):
    """Change the second model that is made in the block."""
    real, made = Net.__init__, []

    def differing(self):
        real(self)
        made.append(self)
        if len(made) == 2:
            change(self)

    with mock.patch.object(Net, "__init__", differing):
        yield


@fault("replicas apart", "parameter differs between", 0, "last.bias")
def replicas_that_begin_apart(folder):
    with second_model(lambda model: nn.init.ones_(model.last.bias)):
        replicas(folder)


@fault("replicas apart", "tensor-parallel ranks share", 3, "norm.weight")
def norms_out_of_step(folder):  # DeepSpeed 1801
    def clip(step, models):
        if step == 1:
            models[1].norm.weight.grad.mul_(0.5)

    replicas(folder, clip, wrapped=False, same_data=True, sharded=True)


@healthy
def pipeline_stages_that_get_the_same_batch(folder):
    def own_gradients(step, models):
        models[1].norm.weight.grad.mul_(0.5)

    with second_model(lambda model: model.add_module("head", nn.Linear(4, 4))):
        replicas(folder, own_gradients, wrapped=False, same_data=True, sharded=True)


@healthy
def two_models_without_a_wrapper(folder):
    def local(step, models):
        for number, model in enumerate(models):
            for parameter in model.parameters():
                parameter.grad *= 1 + number

    replicas(folder, local, wrapped=False)


# --- healthy runs -----------------------------------------------------------------------------------------------------


@healthy
def dropout_and_batch_norm_with_evaluations(folder):
    model = Net(dropout=0.1, norm=True)

    def evaluate(step, x, y):
        if step % 3 == 2:
            evaluated(model, x)

    train(folder, model, before=evaluate)


@healthy
def warm_up_from_zero_and_decay_to_zero(folder):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4 if step < 4 else max(0, 7 - step) / 4)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    train(folder, model, optimizer)


@healthy
def accumulation_and_clipping(folder):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=False)

    def clip(step):
        if step % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(folder, model, optimizer, after=clip, steps=12, every=3)


@healthy
def zero_grad_before_backward(folder):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with collecting(model, folder):
        for _, x, y in batches():
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()


@healthy
def frozen_backbone(folder):
    model = Net()
    model.first.requires_grad_(False)
    train(folder, model, torch.optim.AdamW(model.parameters(), lr=1e-3), steps=14)


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base.requires_grad_(False), nn.Linear(32, 4, False), nn.Linear(4, 32, False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_adapter() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    model.requires_grad_(False)
    model.middle.linear = LoRA(model.middle.linear)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@healthy
def adversarial(folder):
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)), Net()
    sessions = [collect(maker, folder / "maker"), collect(judge, folder / "judge")]
    of_maker, of_judge = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in (maker, judge))
    for step, x, _ in batches():
        judge.zero_grad()
        fake = maker(torch.randn(8, 8, generator=torch.Generator().manual_seed(step)))
        F.softplus(-judge(x)).mean().backward()
        F.softplus(judge(fake.detach())).mean().backward()
        of_judge.step()
        maker.zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        of_maker.step()
    for session in sessions:
        session.remove()


@healthy
def loss_scaler_that_skips_steps(folder):
    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    with collecting(model, folder):
        for _, x, y in batches(12):
            scaler.scale(8 * F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@healthy
def bfloat16_under_autocast(folder):
    model = Net()
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    train(folder, model, loss_of=lambda logits, y: F.cross_entropy(logits.float(), y))


@healthy
def sharpness_aware(folder):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def move(sign, moves):
        with torch.no_grad():
            for parameter, change in zip(model.parameters(), moves):
                parameter.add_(change, alpha=sign)

    with collecting(model, folder):
        for _, x, y in batches():
            F.cross_entropy(model(x), y).backward()
            moves = [0.01 * p.grad / (p.grad.norm() + 1e-12) for p in model.parameters()]
            move(1, moves)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            move(-1, moves)
            optimizer.step()
            optimizer.zero_grad()


@healthy
def two_optimizers_and_groups(folder):
    model = Net()
    first = torch.optim.SGD(
        [{"params": model.first.parameters(), "lr": 0.0}, {"params": model.last.parameters()}], lr=1e-2
    )
    second = torch.optim.AdamW(model.middle.parameters(), lr=1e-3)
    first.register_step_post_hook(lambda *_: second.step())
    first.register_step_post_hook(lambda *_: second.zero_grad())
    train(folder, model, first)


@healthy
def closure(folder):
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with collecting(model, folder):
        for _, x, y in batches(4):
            optimizer.step(functools.partial(closure, x, y))


@healthy
def branch_that_begins_at_zero(folder):
    model = Net()
    nn.init.zeros_(model.middle.linear.weight)
    nn.init.zeros_(model.middle.linear.bias)
    model.middle.between = lambda x, call: x + 1.0
    train(folder, model)


@healthy
def regularized_by_second_derivatives(folder):
    model, inputs = Net(), []

    def with_slope(result, y):
        loss = F.cross_entropy(result, y)
        (slope,) = torch.autograd.grad(loss, inputs[-1], create_graph=True)
        return loss + slope.square().sum()

    train(folder, model, before=lambda step, x, y: inputs.append(x.requires_grad_()), loss_of=with_slope)


@healthy
def residual_network(folder):
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    model = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=4)
    )
    train(folder, model, before=lambda step, x, y: (torch.randn(8, 3, 32, 32), y), loss_of=loss_of_logits)


@healthy
def vision_transformer(folder):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16)
    model = ViTForImageClassification(ViTConfig(**sizes, patch_size=4, num_labels=4))
    train(folder, model, before=lambda step, x, y: (torch.randn(8, 3, 16, 16), y), loss_of=loss_of_logits)


@healthy
def long_warm_up_of_a_layer_norm(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10000))
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    train(folder, model, optimizer)


@healthy
def linear_regression(folder):
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    line = {"before": lambda step, x, y: (x[:, :1], 3 * x[:, :1] + 2), "loss_of": F.mse_loss}
    train(folder, model, optimizer, **line)


@healthy
def workers_with_generators_of_their_own(folder):
    def seed(worker):
        torch.utils.data.get_worker_info().dataset.generator = np.random.default_rng(worker)

    train_on(folder, Drawn(), worker_init_fn=seed)


@healthy
def samples_drawn_in_evaluation(folder):
    evaluate_only(folder, Net(lambda x, call: x + torch.randn_like(x)))


@healthy
def baseline_before_training(folder):
    model = Net(norm=True)

    def evaluate(step, x, y):
        if step == 0:
            evaluated(model, x)

    train(folder, model, before=evaluate)


@healthy
def target_made_between_forward_and_backward(folder):
    model = Net(dropout=0.3)
    inputs = []

    def with_target(result, y):
        if len(inputs) < 4:
            return F.cross_entropy(result, y)
        target = evaluated(model, inputs[-1])
        return F.cross_entropy(result, y) + F.mse_loss(result, target)

    train(folder, model, before=lambda step, x, y: inputs.append(x), loss_of=with_target)


def loss_of_logits(result, y):
    return F.cross_entropy(result.logits, y)


def seeded(*parts: nn.Module) -> nn.Module:
    """Return parts one after the other, with the same values each time."""
    torch.manual_seed(0)
    for part in parts:
        for each in part.modules():
            getattr(each, "reset_parameters", lambda: None)()
    return nn.Sequential(*parts)


class LastOutput(nn.LSTM):
    def forward(self, x):
        return super().forward(x.view(8, 4, 4))[0][:, -1]


class Experts(nn.ModuleList):
    """Three layers, of which each call uses another one."""

    calls = -1

    def forward(self, x):
        self.calls += 1
        return self[self.calls % 3](x)


def masked_attention(x, call):
    scores = (x @ x.T).masked_fill(torch.eye(8, dtype=torch.bool), -torch.inf)
    return scores.softmax(-1) @ x


def ignored_labels(step, batch):
    if step == 2:
        batch["labels"].fill_(-100)


SIMPLE_FAULTS: dict[str, tuple[str, str, int, str, bool, Callable[[Path], None]]] = {
    "logarithm_of_a_negative_number": ("not finite", "arises in this module", 3, "middle", True,
        lambda folder: train(folder, Net(lambda x, call: x.log() if call == 3 else x))),
    "division_by_zero": ("not finite", "arises in this module", 2, "middle", True,
        lambda folder: train(folder, Net(lambda x, call: x / (x - x) if call == 2 else x))),
    "nan_in_the_data": ("not finite", "batch has it", 2, "", True,
        lambda folder: train(folder, Net(), before=lambda step, x, y: (x / 0 * 0 if step == 2 else x, y))),
    "root_at_zero": ("not finite", "gradient of this tensor", 3, "", True,
        lambda folder: train(folder, Net(lambda x, call: x + (x * 0).sqrt() if call == 3 else x))),
    "loss_that_does_not_depend_on_the_model": ("no update", "every gradient is zero", 0, "", True,
        lambda folder: train(folder, Net(), loss_of=lambda logits, y: (logits * 0).sum())),
    "optimizer_of_a_copy": ("no update", "no tensor in it has a gradient", 0, "", True,
        lambda folder: train(folder, Net(), torch.optim.Adam(Net().parameters()))),
    "learning_rate_too_large": ("out of proportion", "larger than the weights", 1, "", True,
        lambda folder: train(folder, Net(), functools.partial(torch.optim.Adam, lr=10.0))),
    "learning_rate_of_zero": ("out of proportion", "0 from the beginning", 4, "", True,
        lambda folder: train(folder, Net(), functools.partial(torch.optim.Adam, lr=0.0))),
    "dead_units": ("dead or saturated", "zero in every element", 4, "act output", True,
        lambda folder: train(folder, around(nn.ReLU(), -100.0))),
    "saturated_units": ("dead or saturated", "it may be saturated", 4, "act output", False,
        lambda folder: train(folder, around(nn.Tanh(), 100.0))),
    "batch_norm_before_any_training": ("mode", "no forward in training mode has computed", 0, "norm", True,
        lambda folder: evaluate_only(folder, Net(norm=True))),
    "labels_that_are_all_ignored": ("data", "every label of the batch is -100", 2, "", True,
        lambda folder: train_language(folder, gpt2(), before=ignored_labels)),
    # PyTorch 84803, 96600, Baichuan2 86
    "gradient_lost_on_the_way": ("replicas apart", "gradient in the optimizer differs", 4, "last.weight", True,
        lambda folder: replicas(folder, lambda step, m: m[1].last.weight.grad.zero_() if step == 3 else None)),
    "weights_of_unknown_replicas": ("replicas apart", "may have drifted apart", 3, "first.weight", False,
        lambda folder: replicas(folder, lambda step, m: m[1].first.weight.grad.mul_(2) if step == 1 else None,
                                wrapped=False)),
    "sampler_that_ignores_ranks": ("data", "train on the same batches", 3, "", True,
        lambda folder: replicas(folder, same_data=True)),
}  # fmt: skip
"""Kind, a part of the text, step, end of the place, whether it is certain, and the program."""
for name, (kind, text, step, module, certain, run) in SIMPLE_FAULTS.items():
    FAULTS[name] = Fault(run, kind, text, step, module, certain)
HEALTHY |= {
    "two_replicas": replicas,
    "tensor_parallel": lambda folder: replicas(folder, wrapped=False, same_data=True, sharded=True),
    "tensor_parallel_in_a_wrapper": lambda folder: replicas(folder, same_data=True, sharded=True),
    "plain": lambda folder: train(folder, Net(), steps=14),
    "language_model": lambda folder: train_language(folder, gpt2(), steps=12),
    "masked_language_model": lambda folder: train_language(folder, small(tiny_models.bert, heads=2, positions=16)),
    "encoder_and_decoder": lambda folder: train_language(folder, small(tiny_models.t5)),
    "low_rank_adapters": lambda folder: train(folder, *with_adapter()),
    "adapters_under_accumulation": lambda folder: train(folder, *with_adapter(), steps=24, every=8),
    "bias_before_batch_norm": lambda folder: train(folder, Net(norm=True), functools.partial(torch.optim.SGD, lr=0.01)),
    "mask_of_minus_infinity": lambda folder: train(folder, Net(masked_attention)),
    "recurrent": lambda folder: train(folder, seeded(LastOutput(4, 16, batch_first=True), nn.Linear(16, 4))),
    "experts_that_rest": lambda folder: train(folder, seeded(Experts(nn.Linear(16, 4) for _ in range(3))), steps=12),
    "pictures": lambda folder: train(
        folder, before=lambda step, x, y: (torch.randn(8, 3, 8, 8), y), model=seeded(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(128, 4))),
}  # fmt: skip

"""The verdict names the module, the direction and the rank of a fault, and accuses nobody of rounding."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from statistics_models import FAULTS, MODELS, bert, cnn, dropped_bias, gpt2, pictures, rounded, text, wrong_gradient
from statistics_tables import Collected, Precise, Run, train
from torch import nn

from ort_zero.statistics.compare.compare_runs import compare_runs
from ort_zero.statistics.compare.tolerance import EPSILON
from ort_zero.statistics.records import Phase


@functools.cache
def right(model: str, **options) -> Run:
    return train(*MODELS[model], **options)


def at(path: str, fault):
    return lambda model: fault(model.get_submodule(path))


@pytest.mark.parametrize(("model", "fault", "module"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
@pytest.mark.parametrize("precise", [False, True], ids=["same backend", "other backend"])
def test_a_fault_is_named(model, fault, module, precise):
    wrong = train(*MODELS[model], fault=at(module, fault), precise=precise)
    verdict = compare_runs(right(model), wrong).verdict
    assert not verdict.same
    direction = "backward" if fault is wrong_gradient else "forward"
    assert (verdict.module, verdict.direction) == (module, direction), verdict.text
    assert verdict.difference.step == 0 and verdict.difference.rank == 0
    assert verdict.difference.error > verdict.difference.tolerance or verdict.difference.kind == "nan"
    assert module in verdict.text and direction in verdict.text and "step 0, rank 0" in verdict.text


class Normalized(nn.Module):
    """A layer normalization behind values that are off by `noise`, or have a large mean."""

    def __init__(self, epsilon=1e-5, noise=0.0, offset=0.0, single_pass=False):
        super().__init__()
        self.norm = nn.LayerNorm(256, eps=epsilon)
        self.add, self.noise, self.offset = nn.Identity(), noise, offset
        self.add.forward = lambda x: x + self.noise * torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
        if single_pass:
            self.norm.forward = self._single_pass

    def _single_pass(self, x):
        mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(square - mean * mean + 1e-5) * self.norm.weight + self.norm.bias

    def forward(self, x):
        return (self.norm(self.add(x + self.offset)) ** 3).mean()


def numbers(step, rank):
    return dict(x=torch.randn(32, 256, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-6])
def test_another_epsilon_is_found_under_rounding_that_is_as_large(noise):
    a, clean, wrong = (
        train(lambda: Normalized(epsilon, size), numbers)
        for epsilon, size in ((1e-5, 0.0), (1e-5, noise), (1e-12, noise))
    )
    assert compare_runs(a, clean).verdict.same, compare_runs(a, clean).verdict.text
    verdict = compare_runs(a, wrong).verdict
    assert verdict.module == "norm", verdict.text
    # half of the epsilon over the variances, whose mean is near 1
    assert noise < 1e-6 or "the norm differs by 5.0e-06" in verdict.text


@pytest.mark.parametrize(("epsilons", "differs"), [(8, False), (32, True)])
def test_one_operator_may_be_off_by_some_epsilons_and_no_more(epsilons, differs):
    runs = [train(lambda: Normalized(noise=noise), numbers) for noise in (0.0, epsilons * EPSILON["float32"])]
    verdict = compare_runs(*runs).verdict
    assert verdict.same != differs, verdict.text
    if differs:
        assert (verdict.module, verdict.direction, verdict.difference.inherited) == ("add", "forward", 0.0)
        assert verdict.difference.error == pytest.approx(epsilons * EPSILON["float32"], rel=0.3)


class Rounded(nn.Module):
    """Hands a value on in float32 or in another dtype, and computes with it in float32."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.hand_on, self.last = nn.Linear(256, 64), nn.Identity(), nn.Linear(64, 8)
        self.hand_on.forward = lambda x: x.to(dtype)

    def forward(self, x):
        return (self.last(self.hand_on(self.first(x)).float()) ** 2).mean()


def test_a_coarser_dtype_in_one_run_alone_is_no_excuse():
    """Both runs are said to be float32: the one that rounds to bfloat16 in one place has a fault there."""
    runs = [train(lambda: Rounded(dtype), numbers) for dtype in (torch.float32, torch.bfloat16)]
    for pair in (runs, runs[::-1]):
        comparison = compare_runs(*pair)
        verdict = comparison.verdict
        assert not verdict.same, verdict.text
        assert (verdict.module, verdict.direction) == ("hand_on", "forward"), verdict.text
        # far above the tolerance of float32, and within that of bfloat16
        assert verdict.difference.tolerance < 1e-5 < verdict.difference.error < EPSILON["bfloat16"]
        assert comparison.counts["dtype"] >= 1
    runs[1].dtype = "bfloat16"
    assert compare_runs(*runs).verdict.same


@pytest.mark.parametrize("offset", [0.0, 3.0, 10.0])
def test_a_variance_computed_in_one_pass_is_no_fault(offset):
    runs = [train(lambda: Normalized(offset=offset, single_pass=single), numbers) for single in (False, True)]
    comparison = compare_runs(*runs)
    assert comparison.verdict.same, comparison.verdict.text


def large_scores():
    model = gpt2()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "c_attn.weight" in name:
                value.mul_(20)
    return model


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


CORRECT = {
    **{model: (*MODELS[model], dict(steps=5)) for model in MODELS},
    "gpt2 whose parameters drift": (*MODELS["gpt2"], dict(steps=10, optimizer=adam)),
    "cnn whose parameters drift": (*MODELS["cnn"], dict(steps=10, optimizer=adam)),
    "cnn under SGD": (*MODELS["cnn"], dict(steps=10, optimizer=sgd)),
    "large scores": (large_scores, text, dict(steps=2)),
    **{
        f"{model}, {sample} elements of each parameter": (*MODELS[model], dict(steps=4, optimizer=adam, sample=sample))
        for model in ("gpt2", "bert")
        for sample in (16, 256)
    },
}
"""Models, data and options of two runs of which one computes in other roundings."""


@pytest.mark.parametrize("name", CORRECT)
def test_rounding_is_no_fault(name):
    make, batch, options = CORRECT[name]
    comparison = compare_runs(*(train(make, batch, precise=precise, **options) for precise in (False, True)))
    assert comparison.verdict.same, comparison.verdict.text
    if name in MODELS:
        assert not comparison.differences and not comparison.counts and not comparison.notes


@pytest.mark.parametrize("model", ["bert", "cnn"])
def test_bfloat16_has_a_floor_of_its_own(model):
    make, batch = MODELS[model]

    def halves(step, rank):
        return {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch(step, rank).items()}

    runs = [train(lambda: make().bfloat16(), halves, steps=2, precise=precise) for precise in (False, True)]
    for run in runs:
        run.dtype = "bfloat16"
    comparison = compare_runs(*runs)
    assert comparison.verdict.same, comparison.verdict.text
    wrong = train(lambda: make().bfloat16(), halves, fault=lambda m: m.register_forward_pre_hook(_negate_first(m)))
    wrong.dtype = "bfloat16"
    assert not compare_runs(runs[0], wrong).verdict.same


def _negate_first(model):
    def hook(module, args):
        with torch.no_grad():
            next(iter(model.parameters())).neg_()

    return hook


def test_a_run_in_another_dtype_is_compared_at_the_coarser_one():
    wrong = train(lambda: gpt2().bfloat16(), text)
    wrong.dtype = "bfloat16"
    comparison = compare_runs(right("gpt2"), wrong)
    assert comparison.verdict.same, comparison.verdict.text
    assert comparison.counts["dtype"] > 100 and any("bfloat16" in note for note in comparison.notes)


class Flipping(nn.Module):
    """Values so near 0 that rounding moves some of them over ReLU's border."""

    def __init__(self, shift: float):
        super().__init__()
        torch.manual_seed(0)
        self.shift = shift
        self.first, self.act, self.last = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        noise = self.shift * (torch.arange(x.numel()).reshape(x.shape) % 2 - 0.5)
        near = torch.arange(x.numel()).reshape(x.shape) % 997 == 0
        return (self.last(self.act(torch.where(near, 0.0 * x, x) + noise)) ** 2).mean()


def test_an_element_that_crosses_the_border_of_relu_is_no_fault():
    def batch(step, rank):
        return dict(x=torch.randn(64, 64, generator=torch.Generator().manual_seed(step)))

    a, b = (train(lambda: Flipping(shift), batch) for shift in (1e-7, -1e-7))
    comparison = compare_runs(a, b)
    assert comparison.verdict.same, comparison.verdict.text
    table_a, table_b = a.steps[0][0], b.steps[0][0]
    gradients = [i for i, phase in enumerate(table_a.phase) if phase == 2]
    assert any(table_a.zero[i] != table_b.zero[i] for i in gradients), "nothing flipped, the test shows nothing"


def test_one_rank_with_other_data_is_named():
    def shuffled(step, rank):
        batch = text(step, rank)
        return {key: value.flip(0) for key, value in batch.items()} if rank == 1 else batch

    verdict = compare_runs(train(bert, text, ranks=2), train(bert, shuffled, ranks=2)).verdict
    assert (verdict.direction, verdict.module, verdict.difference.rank) == ("input", "", 1)
    assert verdict.difference.tensor == "input.input_ids" and "other ranks agree" in verdict.text


def test_a_fault_of_one_rank_alone_is_named():
    ranks = iter(range(2))

    def rounds_on_rank_1(model):
        if next(ranks) == 1:
            at("blocks.1.0", rounded)(model)

    verdict = compare_runs(
        train(cnn, pictures, ranks=2, steps=2), train(cnn, pictures, ranks=2, steps=2, fault=rounds_on_rank_1)
    ).verdict
    assert (verdict.module, verdict.direction) == ("blocks.1.0", "forward")
    assert (verdict.difference.rank, verdict.difference.step) == (1, 0)


def test_a_fault_of_a_later_step_is_named():
    def later(model, step):
        if step == 2:
            at("transformer.h.0.mlp.c_fc", dropped_bias)(model)

    wrong = train(gpt2, text, steps=4, precise=True, before=later)
    verdict = compare_runs(right("gpt2", steps=4), wrong).verdict
    assert (verdict.module, verdict.direction, verdict.difference.step) == ("transformer.h.0.mlp.c_fc", "forward", 2)


def test_dropout_is_named_and_explained():
    torch.manual_seed(1)
    runs = [train(lambda: bert(dropout=0.1), text, before=lambda m, s, n=n: torch.manual_seed(n)) for n in (1, 2)]
    verdict = compare_runs(*runs).verdict
    assert verdict.module == "bert.embeddings.dropout" and verdict.direction == "forward"
    assert "dropout draws different masks" in verdict.text and "p=0" in verdict.text


def test_nothing_in_place_of_something_is_no_rounding_error():
    def silenced(model):
        mlp = model.transformer.h[1].mlp
        original = mlp.forward
        mlp.forward = lambda x: original(x) * 0

    verdict = compare_runs(right("gpt2"), train(gpt2, text, fault=silenced)).verdict
    assert (verdict.module, verdict.direction) == ("transformer.h.1.mlp", "forward"), verdict.text


def test_who_returns_what_it_was_given_is_not_accused():
    """The gradient is lost behind a dropout of 0, which returns its very input."""

    def detached(model):
        mlp = model.transformer.h[1].mlp
        original = mlp.forward
        mlp.forward = lambda x: original(x).detach() + 0 * x

    verdict = compare_runs(right("gpt2"), train(gpt2, text, fault=detached)).verdict
    assert (verdict.module, verdict.direction) == ("transformer.h.1.mlp", "backward"), verdict.text


def test_other_parameters_at_the_start_are_named():
    def changed(model):
        with torch.no_grad():
            model.fc.weight[0] += 0.01

    verdict = compare_runs(right("cnn"), train(cnn, pictures, fault=changed)).verdict
    assert (verdict.module, verdict.direction, verdict.difference.tensor) == ("fc", "forward", "weight")
    assert "start from different parameters: 1 of 14" in verdict.text


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.AdamW(p, lr=1.1e-3), lambda p: torch.optim.SGD(p, lr=1e-3)],
    ids=["learning rate", "algorithm"],
)
@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_another_update_is_told_from_a_fault_of_a_module(model, optimizer):
    wrong = train(*MODELS[model], steps=3, optimizer=optimizer, precise=True)
    verdict = compare_runs(right(model, steps=3), wrong).verdict
    assert verdict.direction == "update" and verdict.difference.step == 1, verdict.text
    assert "changed differently from step 0 to 1" in verdict.text


def test_without_parameters_drift_is_assumed():
    a, b = (train(gpt2, text, steps=4, parameters=False, precise=precise, optimizer=adam) for precise in (False, True))
    comparison = compare_runs(a, b)
    assert comparison.verdict.same and any("parameters were not collected" in note for note in comparison.notes)
    wrong = train(gpt2, text, steps=3, parameters=False, fault=at("transformer.h.1.ln_2", rounded))
    assert compare_runs(a, wrong).verdict.module == "transformer.h.1.ln_2"


def test_a_number_as_tolerance():
    wrong = train(*MODELS["gpt2"], fault=at("transformer.h.1.mlp.c_proj", rounded))
    comparison = compare_runs(right("gpt2"), wrong, rtol=1e-4)
    assert comparison.verdict.module == "transformer.h.1.mlp.c_proj" and comparison.rtol == "0.0001"
    assert all(difference.error > 1e-4 for difference in comparison.differences)
    assert compare_runs(right("gpt2"), wrong, rtol=0.5).verdict.same
    passed = comparison.verdict.difference.error * 1.001  # a tolerance that only the error of later modules is above
    drift = compare_runs(right("gpt2"), wrong, rtol=passed).verdict
    assert not drift.same and "is where the error of its inputs passes the tolerance: " in drift.text


@pytest.mark.parametrize("model", MODELS)
def test_a_number_as_tolerance_accuses_no_noise(model):
    """The gradient of the bias of attention's keys is 0 but for rounding, which Adam makes whole steps of."""
    comparison = compare_runs(right(model, steps=3), train(*MODELS[model], steps=3, precise=True), rtol=1e-2)
    assert comparison.verdict.same, comparison.verdict.text


class Outside(nn.Module):
    """Returns what a loss is computed from elsewhere; the larger the scores, the less is left of the gradient."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.scale = nn.Linear(32, 32), scale

    def forward(self, x):
        return self.scale * x + self.body(x)


def of_outside(scale: float, precise: bool, gradient: float = 1.0) -> Run:
    labels = torch.randint(0, 32, (16,), generator=torch.Generator().manual_seed(3))
    model = Outside(scale)
    collected = Collected([model])
    with Precise() if precise else contextlib.nullcontext():
        loss = nn.functional.cross_entropy(model(nn.functional.one_hot(labels, 32).float()), labels)
    loss.backward(torch.tensor(gradient))
    return collected.run("run")


@pytest.mark.parametrize("scale", [1.0, 8.0, 14.0, 30.0])
def test_the_gradient_of_a_loss_computed_elsewhere(scale):
    comparison = compare_runs(of_outside(scale, False), of_outside(scale, True))
    assert comparison.verdict.same, comparison.verdict.text
    if scale == 14.0:
        errors = [r.error for series in comparison.series for r in series if r.phase == Phase.BACKWARD]
        assert max(errors) > 1e-4, "the loss is not small enough for this to show anything"


def test_a_wrong_loss_computed_elsewhere():
    verdict = compare_runs(of_outside(1.0, False), of_outside(1.0, True, gradient=1.05)).verdict
    assert (verdict.direction, verdict.module, verdict.difference.tensor) == ("backward", "", "output")

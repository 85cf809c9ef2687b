"""Gradients are wanted where autograd would record them, whatever the mode of the module; its mode decides the rest."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from tiny_models import bert, gpt2
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.runtime.operators import torch_fallback
from ort_zero.ortmodule.wrap import wrap_model

VOCAB = 64


def wrap(module: nn.Module, **section):
    """Return runtime, wrapped module and a copy that PyTorch runs."""
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(**section), stage=0)
    return runtime, wrapped, reference


def same(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


def gradients(module: nn.Module) -> dict:
    return {name: p.grad for name, p in module.named_parameters()}


def runs(runtime) -> dict:
    return {mode: graph["runs"] for mode, graph in runtime.status()["graphs"].items()}


def done(runtime) -> list[tuple[str, str]]:
    return [(t["mode"], t["transition"]) for t in runtime.status()["transitions"]]


def ids(batch: int = 2, length: int = 8, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


class Features(nn.Module):
    """Extracts features of images as those of perceptual losses do; its two kinds of layers depend on the mode."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.drop = nn.Conv2d(6, 4, 3, stride=2), nn.Dropout(0.5)
        with torch.no_grad():
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, image):
        return self.drop(self.second(F.relu(self.norm(self.first(image)))))


@pytest.mark.parametrize("make", [bert, gpt2])
def test_a_model_in_eval_mode_trains(make):
    torch.manual_seed(0)
    dropout = dict(hidden_dropout_prob=0.5) if make is bert else dict(resid_pdrop=0.5)
    module = make(words=VOCAB, hidden=16, heads=2, **dropout).eval()
    runtime, wrapped, reference = wrap(module)
    for turn in range(2):
        for m in (wrapped, reference):
            m.zero_grad()
            m(input_ids=ids(seed=turn), labels=ids(seed=turn)).loss.backward()
        same(gradients(module), gradients(reference))
        assert not any(part.training for part in module.modules())
    assert runs(runtime) == {"training": {"forward": 2, "backward": 2}} and runtime.status()["fallbacks"] == 0


def test_each_mode_has_a_graph_that_is_used_again():
    torch.manual_seed(0)
    module = gpt2(words=VOCAB, hidden=16, heads=2, resid_pdrop=0.5)
    runtime, wrapped, reference = wrap(module)
    x = ids()
    evaluated = reference.eval()(input_ids=x, labels=x).loss.item()
    for _ in range(2):
        wrapped.train()
        loss = wrapped(input_ids=x, labels=x).loss
        loss.backward()
        assert abs(loss.item() - evaluated) > 1e-4  # it drops
        wrapped.eval()
        loss = wrapped(input_ids=x, labels=x).loss
        loss.backward()
        assert abs(loss.item() - evaluated) < 2e-5
        for without in (torch.no_grad(), torch.inference_mode()):
            with without:
                loss = wrapped(input_ids=x, labels=x).loss
            assert not loss.requires_grad and abs(loss.item() - evaluated) < 2e-5
        wrapped.train()
        with torch.no_grad():
            assert abs(wrapped(input_ids=x, labels=x).loss.item() - evaluated) > 1e-4
    kinds = [("training", "export"), ("training", "export"), ("inference", "export"), ("inference", "export")]
    switches = [("training", "switch"), ("training", "switch"), ("inference", "switch"), ("inference", "switch")]
    assert done(runtime) == kinds + switches
    assert runs(runtime) == {"training": {"forward": 4, "backward": 4}, "inference": {"forward": 6}}
    assert "submodules to eval()" in runtime.status()["transitions"][1]["reasons"][0]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_frozen_model_gives_its_input_a_gradient(training):
    torch.manual_seed(0)
    module = Features().requires_grad_(False).train(training)
    module.drop.eval()
    runtime, wrapped, reference = wrap(module)
    for turn in range(2):
        mine = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(turn)).requires_grad_()
        theirs = mine.detach().clone().requires_grad_()
        for m, x in ((wrapped, mine), (reference, theirs)):
            (m(x * 2) - m(x).detach()).pow(2).sum().backward()
        same(mine.grad, theirs.grad)
    same(dict(module.named_buffers()), dict(reference.named_buffers()))
    assert all(p.grad is None for p in module.parameters())
    assert runs(runtime)["training"] == {"forward": 4, "backward": 2} and runtime.status()["fallbacks"] == 0


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_nothing_that_requires_grad_is_a_call_without_gradients(training):
    torch.manual_seed(0)
    module = Features().requires_grad_(False).train(training)
    module.drop.eval()
    runtime, wrapped, reference = wrap(module)
    image = torch.randn(2, 3, 8, 8)
    got = wrapped(image)
    assert not got.requires_grad
    same(got, reference(image))
    same(dict(module.named_buffers()), dict(reference.named_buffers()))
    assert runs(runtime) == {"inference": {"forward": 1}}
    # a layer that is put in while all is frozen is seen at once
    module.second = nn.Conv2d(6, 4, 1)
    reference.second = copy.deepcopy(module.second)
    for m in (wrapped, reference):
        m(image).sum().backward()
    same(gradients(module), gradients(reference))
    assert runs(runtime)["training"] == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_batchnorm_in_eval_mode_inside_of_a_model_that_trains(frozen):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4))
    module[1].eval().requires_grad_(not frozen)
    module[1].running_mean.normal_()
    runtime, wrapped, reference = wrap(module)
    for _ in range(2):
        x = torch.randn(4, 3, 8, 8)
        for m in (wrapped, reference):
            m.zero_grad()
            m(x)[..., 0].tanh().sum().backward()
        same(gradients(module), gradients(reference))
    same(dict(module.named_buffers()), dict(reference.named_buffers()))
    assert module[4].num_batches_tracked == 2 and module[1].num_batches_tracked == 0
    assert runs(runtime) == {"training": {"forward": 2, "backward": 2}}


def test_caches_are_returned_in_eval_mode_and_left_out_in_training():
    torch.manual_seed(0)
    module = gpt2(words=VOCAB, hidden=16, heads=2).eval()
    runtime, wrapped, reference = wrap(module)
    x = ids()
    results = []
    for m in (wrapped, reference):
        first = m(input_ids=x[:, :5], use_cache=True)
        last = m(input_ids=x[:, 5:], past_key_values=first.past_key_values, use_cache=True)
        last.logits.sum().backward()  # through both calls
        cache = last.past_key_values  # a tuple of the layers' states in transformers 4.44
        length = cache.get_seq_length() if hasattr(cache, "get_seq_length") else cache[0][0].shape[-2]
        results.append((first.logits, last.logits, length))
    same(*results)
    same(gradients(module), gradients(reference))
    assert runs(runtime) == {"training": {"forward": 2, "backward": 2}}
    if not isinstance(cache, tuple):
        assert wrapped.train()(input_ids=x, use_cache=True).past_key_values is None


def test_gradients_flow_through_one_model_into_another():
    torch.manual_seed(0)
    generator, critic = (
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 1)),
    )
    critic.eval()
    (g_runtime, g, g_reference), (c_runtime, c, c_reference) = wrap(generator), wrap(critic)
    for turn in range(4):
        noise = torch.randn(3, 4)
        for own, judge, inner in ((g, c, critic), (g_reference, c_reference, c_reference)):
            inner.requires_grad_(turn % 2 == 0)  # every second time the critic is frozen
            own.zero_grad()
            judge.zero_grad()
            fake = own(noise)
            (judge(fake).sum() + judge(fake.detach()).pow(2).sum()).backward()
        same(gradients(generator), gradients(g_reference))
        same(gradients(critic), gradients(c_reference))
    assert runs(g_runtime) == {"training": {"forward": 4, "backward": 4}}
    # frozen and without a gradient to give, a call needs none
    assert runs(c_runtime) == {"training": {"forward": 6, "backward": 6}, "inference": {"forward": 2}}


def test_a_frozen_submodule_in_eval_mode_lets_gradients_through():
    torch.manual_seed(0)
    module = nn.ModuleDict({"trained": nn.Conv2d(3, 3, 3, padding=1), "loss": Features()})
    module["loss"].eval().requires_grad_(False)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = module

        def forward(self, image):
            made = self.parts["trained"](image)
            return F.mse_loss(self.parts["loss"](made), self.parts["loss"](image).detach())

    runtime, wrapped, reference = wrap(Both())
    image = torch.randn(2, 3, 8, 8)
    for m in (wrapped, reference):
        m(image).backward()
    same(gradients(module["trained"]), gradients(reference.parts["trained"]))
    same(dict(module.named_buffers()), dict(reference.parts.named_buffers()))
    assert runs(runtime) == {"training": {"forward": 1, "backward": 1}}


def saved_for_backward() -> list:
    """Return what nodes that PyTorch runs hold for their backward."""
    return [one for one in gc.get_objects() if type(one) is torch_fallback._Recording and one.starts]


def test_calls_without_a_backward_keep_nothing():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Features().eval())  # its BatchNorm runs in PyTorch, inside of the graph
    image, levels = torch.randn(2, 3, 16, 16), []
    gc.collect()
    gc.freeze()  # what other tests have left may go meanwhile, and does not count
    try:
        for _ in range(4):
            got = wrapped(image)
            assert got.requires_grad
            del got
            gc.collect()
            # by type(): isinstance() would ask proxies of other tests, whose objects may be gone, for their class
            levels.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
            assert not saved_for_backward()
    finally:
        gc.unfreeze()
    assert levels[-1] == levels[1], levels
    # and what is kept for a backward is there when another call comes in between
    first, second = wrapped(image), wrapped(image * 2)
    assert len(saved_for_backward()) == 2
    (first.sum() + second.sum()).backward()
    (reference(image).sum() + reference(image * 2).sum()).backward()
    same(gradients(runtime.module), gradients(reference))


class Generated(nn.Module):
    """Scales by a buffer, which another model may compute, as hypernetworks do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.layer(x) * self.scale.tanh()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_buffer_that_requires_grad_gets_its_gradient(frozen):
    torch.manual_seed(0)
    module, hyper = Generated().requires_grad_(not frozen), nn.Linear(2, 4)
    runtime, wrapped, reference = wrap(module)
    other, x = copy.deepcopy(hyper), torch.randn(3, 4)
    for turn in range(4):
        for m, inner, source in ((wrapped, module, hyper), (reference, reference, other)):
            m.zero_grad(), source.zero_grad()
            scale = source(torch.ones(2) + turn)
            inner.scale = scale if turn != 1 else scale.detach()
            loss = m(x).pow(2).sum()
            if loss.requires_grad:
                loss.backward()
        same(gradients(module), gradients(reference))
        same(gradients(hyper), gradients(other))
        assert (hyper.weight.grad is not None) == (turn != 1)
    assert runs(runtime)["training"] == ({"forward": 3, "backward": 3} if frozen else {"forward": 4, "backward": 4})
    assert (
        done(runtime)[0] == ("training", "export") and sum(what == "export" for _, what in done(runtime)) == 1 + frozen
    )


def test_the_gradient_of_a_gradient_is_pytorchs_and_the_call_stays_in_onnx_runtime():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    runtime, wrapped, reference = wrap(module)
    for step in range(2):
        image = torch.randn(3 + step, 4, requires_grad=True)
        for score in (wrapped, reference):
            score.zero_grad()
            result = score(image)
            (slope,) = torch.autograd.grad(result.sum(), image, create_graph=True)
            (result.mean() + (slope.norm(dim=1) - 1).pow(2).mean()).backward()
        same(gradients(module), gradients(reference))
    status = runtime.status()
    assert status["called_in_torch"] == {"backward with create_graph=True": 2}
    assert status["graphs"]["training"]["runs"] == {"forward": 2, "backward": 2}


def test_the_gradient_of_a_gradient_is_refused_where_pytorch_would_draw_other_numbers():
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).train()
    _, wrapped, _ = wrap(module)
    image = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"draws random numbers \(Dropout\)"):
        torch.autograd.grad(wrapped(image).sum(), image, create_graph=True)


def _without_grad(module, x):
    with torch.no_grad():
        return module.used(x)


def _target(module, x):
    with torch.no_grad():
        target = module.stopped(x)
    return F.mse_loss(module.used(x), target)


RESULTS = {
    "numbers of classes": lambda module, x: module.used(x).argmax(-1),
    "without gradients inside": _without_grad,
    "detached": lambda module, x: module.used(x).detach(),
    "truth values": lambda module, x: module.used(x) > 0,
    "two heads, one of classes": lambda module, x: (module.used(x), module.stopped(x).argmax(-1)),
    "a target without gradients": _target,
}


class Result(nn.Module):
    """Has weights that no backward reaches, because of what its forward returns."""

    def __init__(self, of):
        super().__init__()
        self.used, self.stopped, self.of = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4), of

    def forward(self, x):
        return self.of(self, x)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", RESULTS)
def test_weights_that_no_backward_reaches_have_no_gradient(name, training):
    torch.manual_seed(0)
    module = Result(RESULTS[name]).train(training)
    runtime, wrapped, reference = wrap(module)
    for _ in range(2):
        x, found = torch.randn(3, 4), []
        for m in (wrapped, reference):
            m.zero_grad()
            results = m(x)
            results = results if isinstance(results, tuple) else (results,)
            differentiable = [result.sum() for result in results if result.requires_grad]
            if differentiable:
                sum(differentiable).backward()
            found.append(([result.requires_grad for result in results], [result.detach() for result in results]))
        same(*found)
        same(gradients(module), gradients(reference))
    same(dict(module.named_buffers()), dict(reference.named_buffers()))
    assert done(runtime) == [("training", "export")]
    assert runs(runtime)["training"]["forward"] == 2 and runtime.status()["in_torch"].keys() <= {"aten::batch_norm"}

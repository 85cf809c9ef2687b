"""Modules of many kinds in ORT, in one process: equal to torch in outputs, losses and gradients, without fallback."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict

import pytest
import torch
from models import BATCH, SEQ, VOCAB, build
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model


def wrap(module: nn.Module):
    """Return (runtime, ORTModule, reference in torch)."""
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), 0)
    return runtime, wrapped, reference


def assert_gradients_equal(module: nn.Module, reference: nn.Module) -> None:
    """Compare the gradients of all parameters."""
    expected = dict(reference.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-5, msg=lambda m: name + m)
    assert any(p.grad.abs().max() > 0 for p in expected.values())


def assert_ran(runtime, training: tuple[int, int] | None = None, inference: int | None = None) -> None:
    """Assert the number of runs (forward, backward) and that nothing fell back."""
    status = runtime.status()
    assert (status["fallbacks"], status["fallback_reason"], status["backend"]) == (0, None, "onnxruntime")
    runs = {mode: graph["runs"] for mode, graph in status["graphs"].items()}
    expected = {}
    if training:
        expected["training"] = {k: n for k, n in zip(("forward", "backward"), training, strict=True) if n}
    if inference:
        expected["inference"] = {"forward": inference}
    assert runs == expected


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and an attention mask that hides something."""
    ids = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    return ids, mask


def keys_and_values(cache) -> list[torch.Tensor]:
    """Return the keys and values of each layer in a cache.

    transformers before 4.54 has two lists of them, and its decoders before 4.48 return a tuple for each layer.
    """
    if isinstance(cache, tuple):
        return [tensor for layer in cache for tensor in layer]
    if hasattr(cache, "layers"):
        return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return [*cache.key_cache, *cache.value_cache]


def test_a_decoder_with_its_default_cache_with_and_without_a_mask():
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    model = build("llama")
    assert model.config.use_cache is True
    runtime, wrapped, reference = wrap(model)
    for step in range(4):
        ids, mask = batch(step)
        inputs = {"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if step % 2 else {})
        ours, theirs = wrapped(**inputs), reference(**inputs)
        assert type(ours) is CausalLMOutputWithPast
        assert ours.past_key_values is None
        assert ours.hidden_states is None
        torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours["logits"], theirs.logits, rtol=1e-5, atol=1e-5)
        assert ours[0] is ours.loss
        for result in (ours, theirs):
            result.loss.backward()
        assert_gradients_equal(model, reference)
    assert_ran(runtime, training=(4, 4))

    wrapped.eval()
    reference.eval()
    ids, mask = batch(9)
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids, attention_mask=mask) for m in (wrapped, reference))
    assert type(ours.past_key_values) is type(theirs.past_key_values)
    assert isinstance(ours.past_key_values, (DynamicCache, tuple))
    assert all(tensor.shape[-2] == SEQ for tensor in keys_and_values(ours.past_key_values))
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    got, expected = (keys_and_values(result.past_key_values) for result in (ours, theirs))
    assert len(got) == 2 * 2
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert_ran(runtime, training=(4, 4), inference=1)


def test_an_encoder_returns_its_own_type():
    from transformers.modeling_outputs import MaskedLMOutput

    model = build("bert")
    runtime, wrapped, reference = wrap(model)
    ids, mask = batch()
    ours, theirs = (m(input_ids=ids, attention_mask=mask, labels=ids) for m in (wrapped, reference))
    assert type(ours) is MaskedLMOutput
    assert list(ours.keys()) == list(theirs.keys()) == ["loss", "logits"]
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=1e-5)
    ours.loss.backward()
    theirs.loss.backward()
    assert_gradients_equal(model, reference)
    assert_ran(runtime, training=(1, 1))


class Differences(nn.Module):
    """Differences of an activation and of booleans made of it."""

    def __init__(self, **options):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(7))
        self.options = options

    def forward(self, x, before, after):
        y = x * self.scale
        around = {name: {"before": before, "after": after}.get(v, v) for name, v in self.options.items()}
        as_bool = {name: v > 0 if isinstance(v, torch.Tensor) else v for name, v in around.items()}
        return torch.diff(y, **around), torch.diff(x > 0, **as_bool), y.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2},
        {"n": 3, "dim": 0},
        {"dim": 0},
        {"prepend": "before"},
        {"n": 2, "prepend": "before"},
        {"append": "after"},
        {"n": 2, "prepend": "before", "append": "after"},
    ],
    ids=lambda o: " ".join(f"{k}={v}" for k, v in o.items()) or "plain",
)
def test_differences_of_floats_and_booleans(options):
    torch.manual_seed(0)
    module = Differences(**options)
    runtime, wrapped, reference = wrap(module)
    for _ in range(2):
        inputs = torch.randn(5, 7), torch.randn(5, 1), torch.randn(5, 2)
        ours, theirs = wrapped(*inputs), reference(*inputs)
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        assert ours[1].dtype == torch.bool
        assert torch.equal(ours[1], theirs[1])
        assert ours[1].any()
        for floats, _, total in (ours, theirs):
            (floats.pow(2).sum() + total).backward()
    assert_gradients_equal(module, reference)
    assert_ran(runtime, training=(2, 2))


def test_a_decoder_with_shared_heads_and_without_a_mask_gives_torchs_gradients():
    model = build("llama")
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    runtime, wrapped, reference = wrap(model)
    ids, _ = batch()
    ours, theirs = wrapped(ids, labels=ids).loss, reference(ids, labels=ids).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours.backward()
    theirs.backward()
    assert_gradients_equal(model, reference)
    assert_ran(runtime, training=(1, 1))


@dataclasses.dataclass
class Heads:
    """What :class:`Structured` returns."""

    main: torch.Tensor
    extra: dict
    label: str = "unset"


class Structured(nn.Module):
    """Returns a dataclass in a dict in a tuple, with values that are no tensors."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.b = nn.Linear(5, 4)

    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        heads = Heads(self.b(hidden), OrderedDict(squared=[hidden**2, None], name="h"), label="set")
        return {"heads": heads, "pair": (hidden.mean(), 3)}, hidden


def test_nested_outputs_come_back_as_the_types_that_the_module_returned():
    torch.manual_seed(0)
    module = Structured()
    runtime, wrapped, reference = wrap(module)
    for mode in ("train", "eval"):
        getattr(wrapped, mode)()
        x = torch.randn(3, 6)
        with torch.set_grad_enabled(mode == "train"):
            (ours, hidden), (theirs, expected_hidden) = wrapped(x), reference(x)
        heads, expected = ours["heads"], theirs["heads"]
        assert type(heads) is Heads
        assert heads.label == "set"
        assert type(heads.extra) is OrderedDict
        assert (heads.extra["name"], heads.extra["squared"][1], ours["pair"][1]) == ("h", None, 3)
        assert type(ours["pair"]) is tuple
        for got, want in (
            (heads.main, expected.main),
            (heads.extra["squared"][0], expected.extra["squared"][0]),
            (ours["pair"][0], theirs["pair"][0]),
            (hidden, expected_hidden),
        ):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        if mode == "train":
            for result in (ours, theirs):
                total = result["heads"].main.sum() + result["heads"].extra["squared"][0].sum() + result["pair"][0]
                total.backward()
            assert_gradients_equal(module, reference)
    assert_ran(runtime, training=(1, 1), inference=1)


class Hiding(nn.Module):
    """Returns an object that holds a tensor."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 5)

    def forward(self, x):
        return torch.distributions.Normal(self.a(x), 1.0)


def test_an_object_of_any_class_is_returned_as_that_object():
    module = Hiding()
    runtime, wrapped, reference = wrap(module)
    for rows in (2, 3):
        x = torch.randn(rows, 6)
        actions = torch.randn(rows, 5)
        ours, theirs = wrapped(x), reference(x)
        assert type(ours) is torch.distributions.Normal
        for distribution in (ours, theirs):
            distribution.log_prob(actions).sum().backward()
        torch.testing.assert_close(ours.loc, theirs.loc)
    assert_gradients_equal(module, reference)
    assert_ran(runtime, training=(2, 2))


class Policy(nn.Module):
    """Returns a distribution, which holds sizes, and a value."""

    def __init__(self):
        super().__init__()
        self.body, self.actions, self.value = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        states = torch.tanh(self.body(x))
        return torch.distributions.Categorical(logits=self.actions(states)), self.value(states).squeeze(-1)


def test_sizes_among_the_results_that_are_the_same_at_every_step():
    """A number of classes comes from a weight: ONNX Runtime knows it ahead."""
    module = Policy()
    runtime, wrapped, reference = wrap(module)
    for rows in (2, 3):
        x, actions = torch.randn(rows, 6), torch.arange(rows)
        for model in (wrapped, reference):
            policy, value = model(x)
            assert policy.param_shape == (rows, 3) and policy.entropy().shape == (rows,)
            (policy.log_prob(actions) + policy.entropy() + value).sum().backward()
    assert_gradients_equal(module, reference)
    assert_ran(runtime, training=(2, 2))


class Unordered(nn.Module):
    """Returns tensors in a set."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 5)

    def forward(self, x):
        return {self.a(x)}


def test_an_output_that_cannot_be_taken_apart_is_refused_by_its_class():
    from ort_zero.errors import ExportError

    _, wrapped = wrap_model(Unordered(), config.OrtModuleConfig(split="off"), 0)
    with pytest.raises(ExportError, match="Unordered cannot run.*builtins.set, which holds tensors"):
        wrapped(torch.randn(2, 6))


def test_batchnorm_trains_while_the_checks_of_every_call_stay_on():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    runtime, wrapped, reference = wrap(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, reference)]
    for _ in range(3):
        x = torch.randn(8, 6)
        losses = [m(x).pow(2).mean() for m in (wrapped, reference)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        assert_gradients_equal(module, reference)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(dict(module.named_buffers()), dict(reference.named_buffers()))
    assert_ran(runtime, training=(3, 3))
    assert runtime.status()["graphs"]["training"]["exports"] == 1


def test_batchnorm_keeps_the_statistics_that_torch_keeps():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
    _, wrapped, reference = wrap(module)
    x = torch.randn(8, 6)
    for m in (wrapped, reference):
        m(x).sum().backward()
    torch.testing.assert_close(dict(module.named_buffers()), dict(reference.named_buffers()))


def test_batchnorm_as_the_last_layer_moves_its_statistics():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))
    _, wrapped, reference = wrap(module)
    x = torch.randn(8, 6)
    for m in (wrapped, reference):
        m(x).pow(2).sum().backward()
    torch.testing.assert_close(module[1].running_mean, reference[1].running_mean, rtol=1e-5, atol=1e-5)


def test_inputs_of_another_kind_export_anew_instead_of_running_the_old_graph():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(nn.Linear(6, 5))
    for shape in ((4, 6), (3, 6), (2, 3, 6), (4, 6)):
        x = torch.randn(shape)
        torch.testing.assert_close(wrapped(x), reference(x), rtol=1e-5, atol=1e-5)
    assert_ran(runtime, training=(4, 0))
    assert [t["transition"] for t in runtime.status()["transitions"]] == ["export", "export", "switch"]


class Attention(nn.Module):
    """Attention by the functional form, which drops whenever its probability is not 0."""

    def __init__(self, dropout: float):
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.dropout = dropout

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, dim=-1)
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)


def test_attention_with_dropout_drops_in_training_and_has_gradients():
    torch.manual_seed(1)  # ORT draws the same for its seeds 0 and 1, so 0 would repeat the first mask
    module = Attention(0.5)
    runtime, wrapped, reference = wrap(module)
    reference.eval()  # without dropout
    x = torch.randn(4, 12, 16)
    outputs = [wrapped(x) for _ in range(100)]
    assert not torch.allclose(outputs[0], outputs[1])
    # dropout keeps the mean: the average of many draws is near to what there is without it. ORT's CPU kernel seeds a
    # linear congruential generator with consecutive numbers, so that about one mask bit in a hundred hardly changes
    # within a hundred draws; which ones depends on the seed
    apart = (torch.stack(outputs).mean(0) - reference(x)).abs()
    assert (apart > 0.25).float().mean() < 0.02 and apart.mean() < 0.06
    outputs[-1].pow(2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in module.parameters())
    wrapped.eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), reference(x), rtol=1e-5, atol=1e-5)
    assert_ran(runtime, training=(100, 1), inference=1)


def test_attention_without_dropout_equals_torchs():
    torch.manual_seed(0)
    module = Attention(0.0)
    runtime, wrapped, reference = wrap(module)
    x = torch.randn(4, 12, 16)
    ours, theirs = wrapped(x), reference(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours.pow(2).sum().backward()
    theirs.pow(2).sum().backward()
    assert_gradients_equal(module, reference)
    assert_ran(runtime, training=(1, 1))

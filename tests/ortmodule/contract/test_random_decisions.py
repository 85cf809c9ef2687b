"""Python code that decides by chance: drawn at every step, in PyTorch inside the graph, and named in the status."""

from __future__ import annotations

import inspect
import os
import random
import secrets
import time
from collections import Counter
from time import perf_counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper import modeling_whisper

from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model

STEPS = 12
HERE = os.path.basename(__file__)
OF_THE_FILE = np.random.RandomState(3)


class Part(nn.Module):
    """A submodule whose forward decides by chance."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(0)
        self.python = random.Random(5)
        self.parts = {"draw": [np.random.default_rng(1).random]}
        self.register_buffer("rate", torch.tensor(0.5))


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(6, 6), part(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.part(self.first(x))).pow(2).mean()


def seed() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0), OF_THE_FILE.seed(3)


def losses(model, *args, **kwargs):
    """Return the loss of each step at learning rate 0, whatever the model returns it in."""
    found = []
    for _ in range(STEPS):
        result = model(*args, **kwargs)
        loss = getattr(result, "loss", result)
        loss.backward()
        found.append(loss.item())
    return found


def distinct(found) -> int:
    return len({round(loss, 5) for loss in found})


def both(part):
    """Return the losses in PyTorch, those in ONNX Runtime, and the status."""
    seed()
    reference = Whole(part)
    seed()
    runtime, wrapped = wrap_model(Whole(part), config.OrtModuleConfig(), stage=0)
    x = torch.arange(4.0)[:, None] * torch.ones(4, 6)
    seed()
    expected = losses(reference, x)
    seed()
    got = losses(wrapped, x)
    status = runtime.status()
    assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0
    assert status["graphs"]["training"]["runs"]["backward"] == STEPS
    return expected, got, status


def cases(*functions):
    def part(forward):
        return type(forward.__name__, (Part,), {"forward": forward})

    return [pytest.param(part(function), id=function.__name__) for function in functions]


def of_rand(self, x):
    return self.linear(x) if torch.rand([]) < 0.5 else x


def of_rand_and_buffer(self, x):
    return self.linear(x) if torch.rand([]) < self.rate else x


def of_randint(self, x):
    return [self.linear, nn.Identity()][torch.randint(0, 2, ())](x)


def of_randperm(self, x):
    return self.linear(x) * sum(i * n for i, n in enumerate(torch.randperm(4).tolist()))


def of_bernoulli(self, x):
    return self.linear(x) if torch.bernoulli(torch.full((1,), 0.5)).item() else x


def of_uniform_in_place(self, x):
    return self.linear(x) if x.new_empty(1).uniform_() < 0.5 else x


def of_rand_like(self, x):
    return self.linear(x) if torch.rand_like(x).mean() < 0.5 else x


def of_normal(self, x):
    return self.linear(x) * float(torch.normal(0.0, 1.0, (1,)))


def of_multinomial(self, x):
    return self.linear(x) * int(torch.multinomial(torch.ones(5), 1))


def of_dropout_mask(self, x):
    return self.linear(x) if F.dropout(torch.ones(1), 0.5).any() else x


def of_equal(self, x):
    return self.linear(x) if torch.equal(torch.randint(0, 2, (1,)), torch.zeros(1, dtype=torch.long)) else x


def of_an_array(self, x):
    return self.linear(x) * float(np.asarray(torch.rand(2))[0])


def of_a_distribution(self, x):
    return self.linear(x) * torch.distributions.Beta(0.4, 0.4).sample().item()


def of_a_rate_of_dropout(self, x):
    return F.dropout(self.linear(x), p=torch.rand(()))


def of_python(self, x):
    return self.linear(x) if random.random() < 0.5 else x


def of_numpy(self, x):
    mixed, order = np.random.beta(0.4, 0.4), torch.randperm(x.size(0))
    return self.linear(mixed * x + (1 - mixed) * x[order])


def of_python_for_dropout(self, x):
    return F.dropout(self.linear(x), p=random.uniform(0.1, 0.9))


def of_own_generator(self, x):
    return self.linear(x) if torch.rand([], generator=self.generator) < 0.5 else x


def of_own_numpy(self, x):
    return self.linear(x) if self.numpy.random() < 0.5 else x


def of_own_python(self, x):
    return self.linear(x) * self.python.choice([1, 2, 3])


def of_a_bound_method(self, x):
    return self.linear(x) * self.parts["draw"][0]()


def of_a_global(self, x):
    return self.linear(x) * OF_THE_FILE.rand()


def of_a_late_generator(self, x):
    if not hasattr(self, "late"):
        self.late = random.Random(7)
    return self.linear(x) if self.late.random() < 0.5 else x


@pytest.mark.parametrize(
    "part",
    cases(
        of_rand, of_rand_and_buffer, of_randint, of_randperm, of_bernoulli, of_uniform_in_place, of_rand_like,
        of_normal, of_multinomial, of_dropout_mask, of_equal, of_an_array, of_a_distribution, of_a_rate_of_dropout,
        of_python, of_numpy, of_python_for_dropout, of_own_generator, of_own_numpy, of_own_python, of_a_bound_method,
        of_a_global,
    ),
)  # fmt: skip
def test_decisions_are_drawn_at_every_step_as_in_pytorch(part):
    expected, got, status = both(part)
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert distinct(got) > 1 and status["graphs"]["training"]["exports"] == 1
    assert HERE in status["in_torch"]["part"] and f"in {part.__name__}" in status["in_torch"]["part"]
    assert status["graphs"]["training"]["nodes"] > status["graphs"]["training"]["python_ops"] == 1


def test_a_generator_that_the_first_forward_makes_counts_too():
    expected, got, status = both(type("Late", (Part,), {"forward": of_a_late_generator}))
    assert distinct(got) == distinct(expected) == 2 and "random.Random" in status["in_torch"]["part"]


def of_weights_and_chance(self, x):
    chosen = torch.multinomial(self.linear.weight.abs()[0], 1)
    return self.linear(x) * (chosen.item() + 1)


def test_chance_together_with_weights_is_a_guard_until_it_fails_once():
    expected, got, status = both(type("Gate", (Part,), {"forward": of_weights_and_chance}))
    assert got == pytest.approx(expected, rel=1e-5) and distinct(got) > 2
    assert status["graphs"]["training"]["exports"] == 2
    assert "takes a tensor for a Python number" in status["in_torch"]["part"]


def fresh_generator(self, x):
    return self.linear(x) * np.random.default_rng().random()


def unseeded_python(self, x):
    return self.linear(x) * random.Random().random()


def system_bytes(self, x):
    return self.linear(x) * (1 + os.urandom(2)[0] + secrets.randbelow(1000))


def clock(self, x):
    return self.linear(x) * (perf_counter() % 1)


def whole_clock(self, x):
    return self.linear(x) * (int(time.time() * 1e7) % 1000)


def nanoseconds(self, x):
    return self.linear(x) if time.perf_counter_ns() // 100 % 2 else x


@pytest.mark.parametrize("part", cases(fresh_generator, unseeded_python, system_bytes, clock, whole_clock, nanoseconds))
def test_what_no_seed_repeats_is_not_frozen_either(part):
    _, got, status = both(part)
    assert distinct(got) > 1 and f"{HERE}:" in status["in_torch"]["part"]


def seeded(self, x):
    torch.manual_seed(4)
    return self.linear(x) + torch.randn(x.shape)


def forked(self, x):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return self.linear(x) + torch.randn(x.shape)


def generated(self, x):
    return self.linear(x) + torch.randn(x.shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("part", cases(seeded, forked, generated))
def test_seeds_repeat_noise_as_in_pytorch(part):
    expected, got, status = both(part)
    assert got == pytest.approx(expected, rel=1e-5) and distinct(got) == 1 and "part" in status["in_torch"]


def noise(self, x):
    return self.linear(x) + torch.randn_like(x) * torch.rand(x.shape[0], 1)


def permuted(self, x):
    return self.linear(x)[torch.randperm(x.shape[0])] * torch.arange(1, x.shape[0] + 1)[:, None]


def shortened(self, x):
    return self.linear(x)[: torch.randint(1, 4, ())]


def stochastic_depth(self, x):
    return x + self.linear(x) * x.new_empty(x.shape[0], 1).bernoulli_(0.5)


def sampled(self, x):
    return self.linear(x) * torch.distributions.Beta(0.4, 0.4).sample()


def checked_dropout(self, x):
    x = F.dropout(self.linear(x), 0.5)
    if torch.isnan(x).any():
        raise ValueError("not a number")
    return x


@pytest.mark.parametrize("part", cases(noise, permuted, shortened, stochastic_depth, sampled, checked_dropout))
def test_random_tensors_stay_in_the_graph_and_are_drawn_at_every_step(part):
    _, got, status = both(part)
    assert distinct(got) > 2 and "part" not in status["in_torch"]
    assert status["graphs"]["training"]["exports"] == 1


def seeded_in_place(self, x):
    return self.linear(x) * np.random.default_rng(3).random() * random.Random(3).random()


def timed(self, x):
    start = time.time()
    y = self.linear(x)
    self.seconds = getattr(self, "seconds", 0.0) + time.time() - start
    self.text = f"{self.seconds:.3f} s"
    return y


@pytest.mark.parametrize("part", cases(seeded_in_place, timed))
def test_what_is_always_the_same_and_measured_times_are_no_decisions(part):
    expected, got, status = both(part)
    assert got == pytest.approx(expected, rel=1e-5) and status["in_torch"] == {}


class Coin(nn.Module):
    """Has neither weights nor arguments."""

    def forward(self):
        return torch.tensor(1.0 if random.random() < 0.5 else 2.0)


class Tosses(Part):
    def __init__(self):
        super().__init__()
        self.coin = Coin()

    def forward(self, x):
        return self.linear(x) * self.coin() * self.coin()


def test_two_equal_calls_of_a_module_draw_twice():
    expected, got, status = both(Tosses)
    assert got == pytest.approx(expected, rel=1e-5) and distinct(got) == 3
    assert set(status["in_torch"]) == {"part.coin"}


class Scaled(torch.autograd.Function):
    """Draws inside of a node that PyTorch runs."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = random.random()
        return x * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


def of_a_function(self, x):
    return Scaled.apply(self.linear(x))


def test_an_autograd_function_may_draw_without_its_module():
    expected, got, status = both(type("Functional", (Part,), {"forward": of_a_function}))
    assert got == pytest.approx(expected, rel=1e-5) and distinct(got) == STEPS
    assert "part" not in status["in_torch"] and any("Scaled" in name for name in status["in_torch"])


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) if torch.rand([]) < 0.5 else x


class Gate(Dropped):
    def forward(self, x):
        return self.linear(x) * (1 + torch.multinomial(self.linear.weight.abs()[0], 1).item())


def test_the_export_cache_keeps_no_decision_and_remembers_that_a_guard_is_random(tmp_path):
    statuses = []
    for part in (Dropped, Dropped, Gate, Gate):
        seed()
        runtime, wrapped = wrap_model(Whole(part), config.OrtModuleConfig(cache_dir=str(tmp_path)), stage=0)
        assert distinct(losses(wrapped, torch.ones(4, 6))) > 1
        statuses.append(runtime.status())
    said = [[done["cache"] or "" for done in status["transitions"]] for status in statuses]
    assert all("not kept: part stays in PyTorch" in texts[-1] for texts in said)
    assert "hit" in said[3][0] and not any("hit" in text for texts in said[:3] for text in texts)
    assert [status["graphs"]["training"]["exports"] for status in statuses] == [1, 1, 2, 1]


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = x * 2
        share = np.random.beta(0.4, 0.4)
        return self.linear(x * share).sum()


def test_a_decision_of_the_model_itself_is_refused_with_its_line():
    _, wrapped = wrap_model(Own(), config.OrtModuleConfig(split="off"), stage=0)
    line = Own.forward.__code__.co_firstlineno + 2
    with pytest.raises(ExportError, match=rf"draws random numbers from numpy.random \(.*{HERE}:{line} in forward\)"):
        wrapped(torch.ones(2, 6))


def test_an_export_leaves_the_users_generators_where_they_were():
    model = Whole(type("Held", (Part,), {"forward": noise}))
    part = model.part
    _, wrapped = wrap_model(model, config.OrtModuleConfig(), stage=0)

    def states():
        own = part.generator.get_state().tolist(), part.python.getstate(), part.numpy.bit_generator.state
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[2], own

    before = states()
    wrapped(torch.ones(4, 6)).backward()
    assert states() == before

    class Failing(Part):
        def forward(self, x):
            self.python.random(), torch.rand([], generator=self.generator), random.random(), self.numpy.random()
            raise ValueError("a mistake of the user's")

    part = Failing()
    _, wrapped = wrap_model(part, config.OrtModuleConfig(), stage=0)
    before = states()
    with pytest.raises(ValueError, match="a mistake of the user's"):
        wrapped(torch.ones(4, 6))
    assert states() == before


class Collecting(Part):
    """Returns as many tensors as it has layers that chance has left in."""

    def forward(self, x):
        return tuple(self.linear(x) for _ in range(random.randint(1, 3)))


class Summing(nn.Module):
    def __init__(self):
        super().__init__()
        self.collecting = Collecting()

    def forward(self, x):
        return sum(self.collecting(x))


def test_results_of_another_structure_bring_the_module_around_to_pytorch():
    expected, got, status = both(Summing)
    assert got == pytest.approx(expected, rel=1e-5) and distinct(got) == 3
    assert {"part", "part.collecting"} <= set(status["in_torch"])
    assert "calls part.collecting, which returns" in status["in_torch"]["part"]


# -- models of transformers --------------------------------------------------------------------------------------------

IDS = torch.arange(3, 17).view(2, 7)
NARROW = {"vocab_size": 50, "max_position_embeddings": 32, "dropout": 0.0}


def wav2vec2(masked: float):
    made = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, vocab_size=10,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, layerdrop=0.5, hidden_dropout=0.0,
        activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        mask_time_prob=masked, mask_time_length=2, apply_spec_augment=masked > 0,
        ctc_loss_reduction="mean",  # a sum of 136 has an error of 2e-5 by its last bit alone
    )  # fmt: skip
    sound = torch.randn(2, 800, generator=torch.Generator().manual_seed(1))
    return Wav2Vec2ForCTC(made), {"input_values": sound, "labels": IDS[:, :4] % 9 + 1}


def whisper():
    made = WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=20, max_target_positions=20,
        vocab_size=NARROW["vocab_size"], pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        dropout=0.0, apply_spec_augment=True, mask_time_prob=0.4, mask_time_length=3, mask_feature_prob=0.3,
        mask_feature_length=2,
    )  # fmt: skip
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
    return WhisperForConditionalGeneration(made), {"input_features": features, "labels": IDS[:2]}


def bart():
    made = BartConfig(
        d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_layerdrop=0.4, decoder_layerdrop=0.4, **NARROW,
    )  # fmt: skip
    return BartForConditionalGeneration(made), {"input_ids": IDS, "labels": IDS}


def opt():
    made = OPTConfig(hidden_size=16, num_hidden_layers=3, ffn_dim=32, num_attention_heads=2, layerdrop=0.4,
                     word_embed_proj_dim=16, **NARROW)  # fmt: skip
    return OPTForCausalLM(made), {"input_ids": IDS, "labels": IDS}


def run_in_parts(status, path: str = "") -> dict[str, int]:
    """Return how many forwards of training ONNX Runtime has run of each submodule with a graph of its own."""
    runs = {path: status["graphs"]["training"]["runs"]["forward"]} if "submodules" not in status else {}
    for name, part in status.get("submodules", {}).items():
        runs.update(run_in_parts(part, f"{path}.{name}" if path else name))
    return runs


WAV2VEC2 = {"Wav2Vec2ForCTC.forward", "wav2vec2", "wav2vec2.encoder"}
BART = {"BartForConditionalGeneration.forward", "model", "model.encoder", "model.decoder"}
MASKS_OF = "transformers.models.{0}.modeling_{0}._compute_mask_indices()"


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: wav2vec2(0.0), WAV2VEC2),
        (lambda: wav2vec2(0.3), WAV2VEC2),
        (whisper, {MASKS_OF.format("whisper")}),
        (bart, BART),
        (opt, {"OPTForCausalLM.forward", "model.decoder"}),
    ],
    ids=["wav2vec2", "wav2vec2 with SpecAugment", "whisper", "bart", "opt"],
)
def test_layerdrop_and_masks_of_transformers(make, kept):
    """Where a stack of layers decides by chance which of them run, its own code stays in PyTorch, and no layer does."""
    found, called_layers = [], Counter()
    for wraps in (False, True):
        seed()
        model, arguments = make()
        model.train()
        runtime, called = wrap_model(model, config.OrtModuleConfig(), stage=0) if wraps else (None, model)
        for path, module in model.named_modules():
            if not wraps and ".layers." in path and path.rpartition(".")[2].isdigit():
                module.register_forward_hook(lambda *about, path=path: called_layers.update([path]))
        seed()
        found.append((losses(called, **arguments), {n: p.grad for n, p in model.named_parameters()}))
    assert runtime is not None
    status = runtime.status()
    (expected, gradients), (got, ours) = found
    assert got == pytest.approx(expected, abs=2e-5) and distinct(got) == distinct(expected) > 1
    for name, gradient in gradients.items():
        if gradient is not None:
            torch.testing.assert_close(ours[name], gradient, atol=2e-4, rtol=1e-3)
    assert status["backend"] == "onnxruntime"
    # its stacks decided by a random tensor themselves, also where no layer is dropped
    if make is whisper and "self.layerdrop > 0" not in inspect.getsource(modeling_whisper):
        kept = {*kept, "WhisperForConditionalGeneration.forward", "model", "model.encoder", "model.decoder"}
        assert kept >= {name for name in status["in_torch"] if "::" not in name}
        return
    assert kept == {name for name in status["in_torch"] if "::" not in name}
    if make is whisper:
        assert status["graphs"]["training"]["runs"] == {"forward": STEPS, "backward": STEPS}
        assert status["graphs"]["training"]["exports"] == 1
    else:
        ran = {path: count for path, count in run_in_parts(status).items() if path in called_layers}
        assert ran == called_layers and len(set(ran.values()) - {STEPS}) > 0


def test_a_stack_that_decides_by_chance_stays_in_pytorch_where_models_are_not_to_be_divided():
    found = []
    for wraps in (False, True):
        seed()
        model, arguments = wav2vec2(0.3)
        runtime, called = wrap_model(model, config.OrtModuleConfig(split="off"), 0) if wraps else (None, model)
        seed()
        found.append(losses(called, **arguments))
    status = runtime.status()
    assert found[1] == pytest.approx(found[0], abs=2e-5) and len(set(found[0])) > 1
    assert {name for name in status["in_torch"] if "::" not in name} == {
        "wav2vec2.encoder",
        MASKS_OF.format("wav2vec2"),
    }
    assert status["graphs"]["training"]["runs"] == {"forward": STEPS, "backward": STEPS}
    assert status["graphs"]["training"]["exports"] == 1


# -- functions that make arrays of what they draw ----------------------------------------------------------------------


def mask_of(rows, columns, rate):
    """Return a mask [rows, columns] of bool."""
    return np.array([[random.random() < rate for _ in range(columns)] for _ in range(rows)])


def spans_of(rows, columns):
    """Return a mask [rows, columns] of bool, about half of each row; NumPy takes the number only as an int."""
    count = columns // 2 + (random.random() < 0.5)
    mask = np.zeros((rows, columns), dtype=bool)
    for row in mask:
        row[np.random.choice(np.arange(columns), count, replace=False)] = True
    return mask


def noise_for(x, scale):
    """Return a tensor like `x`, which takes part in its gradient."""
    return x * torch.from_numpy(np.random.rand(*x.shape).astype(np.float32)) * scale


def changed_in_place(x):
    """Return `x`, which has other values now."""
    x += torch.from_numpy(np.random.rand(*x.shape).astype(np.float32))
    return x


def chosen(part):
    """Return a number that decides."""
    return random.random() < 0.5


class FromArray(Part):
    def forward(self, x):
        return self.linear(x) * torch.tensor(mask_of(x.shape[0], x.size(1), 0.5), dtype=x.dtype)


class FromArrayWithoutCopy(Part):
    def forward(self, x):
        mask = torch.from_numpy(mask_of(*x.shape, rate=0.5))
        x = self.linear(x)
        x[mask] = 0.5
        return x


class FailsWhereSizesAreTensors(Part):
    def forward(self, x):
        return self.linear(x) * torch.tensor(spans_of(*x.shape), dtype=x.dtype)


class FromTensor(Part):
    def forward(self, x):
        return self.linear(x) + noise_for(self.linear(x), 0.3)


class OfTwoFunctions(Part):
    def forward(self, x):
        return noise_for(self.linear(x), 0.3) * torch.as_tensor(mask_of(*x.shape, rate=0.5)).float()


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (FromArray, {"mask_of"}),
        (FromArrayWithoutCopy, {"mask_of"}),
        (FailsWhereSizesAreTensors, {"spans_of"}),
        (FromTensor, {"noise_for"}),
        (OfTwoFunctions, {"mask_of", "noise_for"}),
    ],
)
def test_a_function_that_draws_is_all_that_leaves_the_graph(part, names):
    expected, got, status = both(part)
    assert got == pytest.approx(expected, abs=1e-5) and distinct(got) > STEPS // 2
    kept = {name.rpartition(".")[2] for name in status["in_torch"] if "::" not in name}
    assert kept == {f"{name}()" for name in names}
    assert status["graphs"]["training"]["exports"] == 1


class UsedAsArray(Part):
    def forward(self, x):
        mask = mask_of(*x.shape, rate=0.5)
        return self.linear(x) * torch.from_numpy((mask * mask.mean()).astype(np.float32))


class ChangesItsArgument(Part):
    def forward(self, x):
        return self.linear(changed_in_place(x * 1.0))


class DecidesByNumber(Part):
    def forward(self, x):
        return self.linear(x) if chosen(self) else x


@pytest.mark.parametrize("part", [UsedAsArray, ChangesItsArgument, DecidesByNumber])
def test_what_else_such_a_function_does_keeps_its_module_in_pytorch(part):
    expected, got, status = both(part)
    assert got == pytest.approx(expected, abs=1e-5) and distinct(got) > 1
    assert "part" in status["in_torch"]


class Copies(nn.Module):
    """Makes tensors of tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return (y * torch.tensor(y.mean()) + torch.as_tensor(y, dtype=torch.float64).float()).pow(2).mean()


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_tensor_made_of_a_tensor_is_no_constant():
    torch.manual_seed(0)
    reference = Copies()
    torch.manual_seed(0)
    runtime, wrapped = wrap_model(Copies(), config.OrtModuleConfig(), stage=0)
    for scale in (1.0, 3.0, -2.0):
        x = scale * torch.arange(24.0).reshape(4, 6)
        expected, got = reference(x), wrapped(x)
        torch.testing.assert_close(got, expected)
        expected.backward()
        got.backward()
        torch.testing.assert_close(wrapped.linear.weight.grad, reference.linear.weight.grad)
        reference.zero_grad(), wrapped.zero_grad()
    assert runtime.status()["graphs"]["training"]["exports"] == 1

"""Real graphs through ORTModule: what exports, what re-processes, what is used again, and what is told."""

from __future__ import annotations

import collections
import copy
import dataclasses
import logging
import os
import subprocess
import sys

import pytest
import torch
from older_versions import older
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import ModelOutput

from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model

VOCAB = 64


def wrap(module: nn.Module, **section):
    """Return runtime, wrapped module and a copy that PyTorch runs."""
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(**section), stage=0)
    return runtime, wrapped, reference


def same(got, expected) -> None:
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


def train(wrapped, reference, module, *args, **kwargs) -> None:
    """Run forward and backward of both, and compare losses and gradients."""
    losses = []
    for m in (wrapped, reference):
        m.zero_grad()
        losses.append(m(*args, **kwargs).loss)
        losses[-1].backward()
    same(losses[0], losses[1])
    expected = {name: p.grad for name, p in reference.named_parameters()}
    same({name: p.grad for name, p in module.named_parameters()}, expected)


def done(runtime, mode: str = "training") -> list[str]:
    return [t["transition"] for t in runtime.status()["transitions"] if t["mode"] == mode]


def reasons(runtime) -> list[str]:
    return runtime.status()["transitions"][-1]["reasons"]


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def t5() -> nn.Module:
    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0,
    ))  # fmt: skip


@pytest.mark.parametrize("make", [bert, gpt2, t5], ids=["bert", "gpt2", "t5"])
def test_training_evaluating_generating_and_lengths_export_once_each(make):
    torch.manual_seed(0)
    module = make()
    runtime, wrapped, reference = wrap(module)
    for turn, (batch, length) in enumerate([(2, 8), (3, 5), (1, 12), (2, 8)]):
        x = ids(batch, length, turn)
        labels = ids(batch, length, turn + 10)
        for m in (wrapped, reference):
            m.train()
        train(wrapped, reference, module, input_ids=x, labels=labels)
        for m in (wrapped, reference):
            m.eval()
        with torch.no_grad():
            same(wrapped(input_ids=x, labels=labels).loss, reference(input_ids=x, labels=labels).loss)
        if make is not bert:
            short = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
            assert torch.equal(wrapped.generate(x, **short), reference.generate(x, **short))
    status = runtime.status()
    # the training graph's serves evaluation and generation
    assert {mode: graph["exports"] for mode, graph in status["graphs"].items()} == {"training": 1, "inference": 0}
    assert status["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}
    assert status["graphs"]["inference"]["runs"]["forward"] == 4
    assert done(runtime) == done(runtime, "inference") == ["export"] and status["fallbacks"] == 0


@pytest.mark.parametrize("make", [bert, gpt2, t5], ids=["bert", "gpt2", "t5"])
def test_structures_that_alternate_are_exported_once_each(make):
    torch.manual_seed(0)
    module = make()
    runtime, wrapped, reference = wrap(module)
    x, labels, mask = ids(2, 8), ids(2, 8, 1), torch.ones(2, 8, dtype=torch.int64)
    mask[0, 5:] = 0
    for _ in range(3):
        train(wrapped, reference, module, input_ids=x, labels=labels)
        train(wrapped, reference, module, input_ids=x, attention_mask=mask, labels=labels)
    assert done(runtime) == ["export", "export", "switch", "switch", "switch", "switch"]
    assert reasons(runtime) == ['input "attention_mask" appeared']
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 6, "backward": 6}


@pytest.mark.smoke
def test_freezing_re_processes_and_setting_free_uses_the_earlier_graph_again():
    torch.manual_seed(0)
    module = gpt2()
    runtime, wrapped, reference = wrap(module)
    x = ids(2, 8)

    def freeze(value: bool) -> None:
        for m in (module, reference):
            m.transformer.h[0].requires_grad_(not value)

    for value in (False, True, False, True):
        freeze(value)
        train(wrapped, reference, module, input_ids=x, labels=x)
        assert (module.transformer.h[0].ln_1.weight.grad is None) == value
    assert done(runtime) == ["export", "re-process", "switch", "switch"]
    assert runtime.status()["graphs"]["training"]["exports"] == 1


class Stopped(nn.Module):
    """Stops the gradient of what may be frozen: a trace made while it is frozen must know of the stop."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.first(x)
        return ModelOutput(loss=self.last(h * h.detach()).pow(2).mean())


def test_what_was_frozen_at_export_has_right_gradients_when_set_free():
    torch.manual_seed(0)
    module = Stopped()
    module.first.requires_grad_(False)
    runtime, wrapped, reference = wrap(module)
    x = torch.randn(4, 6)
    train(wrapped, reference, module, x)
    for m in (module, reference):
        m.first.requires_grad_(True)
    train(wrapped, reference, module, x)
    assert module.first.weight.grad.abs().sum() > 0 and done(runtime) == ["export", "re-process"]


def test_an_argument_that_wants_a_gradient_re_processes():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Stopped())
    x = torch.randn(4, 6)
    train(wrapped, reference, runtime.module, x)
    mine, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    wrapped(mine).loss.backward()
    reference(expected).loss.backward()
    same(mine.grad, expected.grad)
    assert done(runtime) == ["export", "re-process"] and reasons(runtime) == ['input "x": requires_grad False -> True']
    train(wrapped, reference, runtime.module, x)
    assert done(runtime)[-1] == "switch"


class Loss(nn.Module):
    """PyTorch has no gradient of this loss for the target."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, target):
        return nn.functional.soft_margin_loss(self.linear(x), target)


def test_an_input_that_has_no_gradient_is_traced_without():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Loss())
    x, target = torch.randn(4, 6), torch.randn(4, 6).sign()
    same(wrapped(x, target), reference(x, target))
    x.requires_grad_()
    wrapped(x, target).backward()
    mine, x.grad = x.grad, None
    reference(x, target).backward()
    same(mine, x.grad)
    assert done(runtime) == ["export", "export"]


class Options(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, how=None):
        y = self.linear(x)
        if how is None:
            return y
        return y * 2 if isinstance(how, bool) and how else y - len(str(how))


def test_constants_export_once_each_and_come_back():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Options())
    x = torch.randn(3, 4)
    values = (True, False, 3, 2.5, "abc", None)
    for _ in range(2):
        for how in values:
            same(wrapped(x, how), reference(x, how))
    assert done(runtime) == ["export"] * len(values) + ["switch"] * len(values)
    shared = [t["shared_export"] for t in runtime.status()["transitions"] if "shared export" in t["steps"]]
    assert shared == ["yes: that of graph 4"]  # "abc" and "2.5" have as many characters
    assert runtime.status()["graphs"]["training"]["exports"] == len(values) - 1


def test_the_least_recently_used_graph_makes_room():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Options(), graph_cache_size=2)
    x = torch.randn(3, 4)
    for how in (1, 2, 1, 3, 1, 2):
        same(wrapped(x, how), reference(x, how))
    assert done(runtime) == ["export", "export", "switch", "export", "switch", "export"]
    assert runtime.status()["graphs"]["training"]["kept"] == 2


def test_a_backward_of_a_graph_that_made_room_still_runs():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Options(), graph_cache_size=1)
    x = torch.randn(3, 4)
    for m in (wrapped, reference):
        (m(x, 1).pow(2).sum() + m(x, 2).pow(3).sum()).backward()
    same(runtime.module.linear.weight.grad, reference.linear.weight.grad)
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 2, "backward": 2}


@pytest.mark.skipif(older("torch", "2.6"), reason="this torch does not tell whether a backward keeps its graph")
def test_a_second_backward_that_kept_no_graph_is_pytorchs_error():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Options())
    x = torch.randn(3, 4)
    for m in (wrapped, reference):
        loss = m(x).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    same(wrapped(x), reference(x))


def test_a_replaced_layer_is_noticed():
    torch.manual_seed(0)
    module = gpt2()
    runtime, wrapped, reference = wrap(module)
    x = ids(2, 8)
    train(wrapped, reference, module, input_ids=x, labels=x)
    new = nn.LayerNorm(16)
    nn.init.constant_(new.weight, 0.5)
    module.transformer.ln_f, reference.transformer.ln_f = new, copy.deepcopy(new)
    train(wrapped, reference, module, input_ids=x, labels=x)
    assert done(runtime) == ["export", "export"]
    assert reasons(runtime) == ['layer "transformer.ln_f" was replaced (LayerNorm -> LayerNorm)']
    assert runtime.status()["graphs"]["training"]["kept"] == 1


def test_a_submodule_in_another_mode_is_noticed():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.9), nn.BatchNorm1d(6))
    runtime, wrapped, reference = wrap(module)
    x = torch.randn(8, 6)
    wrapped(x)
    for m in (module, reference):
        m[1].eval()
        m[2].eval()
    reference.load_state_dict(module.state_dict())
    same(wrapped(x), reference(x))
    assert reasons(runtime) == ["2 submodules to eval()"]
    module[1].train()
    module[2].train()
    wrapped(x)
    assert done(runtime) == ["export", "export", "switch"]


def test_a_buffer_that_is_replaced_is_read_anew():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x):
            return self.linear(x) * self.scale

    runtime, wrapped, reference = wrap(Scaled())
    x = torch.randn(2, 4)
    same(wrapped(x), reference(x))
    runtime.module.scale = reference.scale = torch.arange(4.0)
    same(wrapped(x), reference(x))
    assert done(runtime) == ["export"]


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    note: str
    inner: dict


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *rest, pair, flag=None, **more):
        y = self.linear(x)
        for other in rest:
            y = y + other
        return Result(
            value=y * pair.second["scale"],
            note="a note",
            inner={"pair": Pair(y, [None, 3, (pair.first + 1,)]), "flag": flag, "more": sorted(more),
                   "output": ModelOutput(loss=y.sum(), logits=None)},
        )  # fmt: skip


def test_results_are_of_the_very_types():
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Nested())
    x = torch.randn(2, 4)
    pair = Pair(torch.randn(2), {"scale": torch.tensor(2.0)})
    for args, more in (((x, x), {"extra": None}), ((x, x, torch.randn(2, 4)), {"extra": x, "b": 1})):
        for _ in range(2):
            got, expected = (m(*args, pair=pair, **more) for m in (wrapped, reference))
            assert type(got) is Result and type(got.inner["pair"]) is Pair and type(got.inner["output"]) is ModelOutput
            same(got.value, expected.value)
            same(got.inner["pair"].second[2][0], expected.inner["pair"].second[2][0])
            assert (got.note, got.inner["more"], got.inner["flag"]) == ("a note", sorted(more), None)
            assert list(got.inner["output"]) == list(expected.inner["output"])
    assert done(runtime) == ["export", "export"]


def test_an_argument_that_is_changed_in_place_is_changed_for_the_caller():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, state):
            state.add_(1)
            return self.linear(x) + state

    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(InPlace())
    x = torch.randn(2, 4)
    mine, expected = torch.zeros(2, 4), torch.zeros(2, 4)
    for _ in range(3):
        same(wrapped(x, mine), reference(x, expected))
        same(mine, expected)
    assert done(runtime) == ["export"]


MEMORY = """
import torch
from torch import nn
from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
    def forward(self, x, factor):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * factor
        return x.mean()
torch.set_num_threads(1)
_, wrapped = wrap_model(Wide(), config.OrtModuleConfig(), stage=0)
wrapped(torch.ones(2, 64), 1).backward()
x, levels = torch.randn(80000, 64), [anonymous()]
for factor in (1, 2, 3, 4):
    wrapped(x, factor).backward()
    levels.append(anonymous())
print(*levels)
"""


def test_graphs_that_take_turns_share_their_memory():
    # the exporter's trace runs in PyTorch, and what glibc keeps of that afterwards hangs on addresses: up to 400 MiB
    alone = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=800, env=alone)
    assert done.returncode == 0, done.stderr
    before, first, second, _, last = map(float, done.stdout.split()[-5:])
    assert first - before > 100, "the activations must be worth measuring, in MiB"
    assert last - second < 0.2 * (first - before), done.stdout


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, kind="good"):
        y = self.linear(x)
        if kind == "generator":
            return (part for part in [y])
        if kind == "error":
            raise ValueError("no such kind of thing")
        if kind == "no weight":
            return x + 1
        return y


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [("generator", ExportError, "generator"), ("error", ValueError, "no such kind of thing")],
)
def test_a_re_export_that_fails_keeps_the_graph_that_worked(kind, error, words):
    torch.manual_seed(0)
    runtime, wrapped, reference = wrap(Odd(), split="off")
    x = torch.randn(2, 4)
    same(wrapped(x), reference(x))
    with pytest.raises(error, match=words) as caught:
        wrapped(x, kind)
    if error is ExportError:
        assert f"arg 1: not given -> '{kind}'" in str(caught.value) and "kept" in str(caught.value)
    same(wrapped(x), reference(x))
    assert done(runtime) == ["export"] and runtime.status()["graphs"]["training"]["runs"] == {"forward": 2}


def test_a_generator_among_the_arguments_is_refused_by_name():
    runtime, wrapped, reference = wrap(Nested())
    x, pair = torch.randn(2, 4), Pair(torch.randn(2), {"scale": torch.tensor(2.0)})
    with pytest.raises(TypeError, match=r"argument flag is a builtins.generator.*pass a list"):
        wrapped(x, pair=pair, flag=(part for part in [x]))
    same(wrapped(x, pair=pair).value, reference(x, pair=pair).value)
    assert done(runtime) == ["export"]


def test_each_transition_is_one_line_with_its_reasons(caplog):
    torch.manual_seed(0)
    module = Options()
    logger = logging.getLogger("ort_zero")
    logger.addHandler(caplog.handler)
    try:
        _, wrapped, _ = wrap(module)
        x = torch.randn(3, 4)
        for how in (True, True, False, True, False, True):
            wrapped(x, how)
        module.linear.bias.requires_grad_(False)
        wrapped(x[:2], True)
    finally:
        logger.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert [line.partition(" in ")[0] for line in lines] == [
        "Options training graph 1: exported",
        "Options training graph 2: exported",
        "Options training graph 1: used again (arg 1: bool False -> True)",
        "Options training graph 2: used again (arg 1: bool True -> False)",
        "Options training graph 3: re-processed",
    ]
    assert "s (first call); " in lines[0] and "s (arg 1: bool True -> False); " in lines[1]
    assert 's (parameter "linear.bias" frozen); ' in lines[4]

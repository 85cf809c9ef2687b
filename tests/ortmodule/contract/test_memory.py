"""What graphs of onnxruntime-training compute again: the kept bytes fall as the table says, and no number changes."""

from __future__ import annotations

import json
import logging

import onnx
import pytest
import torch
import transformers as hf

import ort_zero
from ort_zero import config
from ort_zero.errors import ConfigError
from ort_zero.ortmodule import memory

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def gpt2():
    sizes = {"vocab_size": 90, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=0, eos_token_id=0, use_cache=False, **sizes))


def bert():
    return hf.BertForMaskedLM(hf.BertConfig(vocab_size=90, intermediate_size=256, **SIZES))


def trained(build, **memory_section):
    """Return the losses and gradients of three steps, and the status."""
    torch.manual_seed(0)
    model = build()
    ort_zero.wrap(model, backend="ortmodule", log_level="ERROR", ortmodule={"place": "ort"}, memory=memory_section)
    losses = []
    for step in range(3):
        ids = torch.randint(0, 90, (4, 32), generator=torch.Generator().manual_seed(step))
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return losses, gradients, ort_zero.status()["models"][-1]


@pytest.mark.parametrize("build", [gpt2, bert])
def test_the_bytes_that_are_kept_fall_by_what_the_table_says(build):
    losses, gradients, plain = trained(build)
    assert plain["memory"] == []
    for wanted in ({"recompute": "all"}, {"recompute": "auto", "budget": "90%"}):
        again, again_gradients, status = trained(build, **wanted)
        assert again == pytest.approx(losses, rel=1e-6) and not status["failures"]
        for name, gradient in gradients.items():
            torch.testing.assert_close(again_gradients[name], gradient, rtol=1e-4, atol=1e-6)
        (of_block, *_) = status["memory"]
        assert of_block["kept"] == of_block["kept_without"] - sum(each["saved_bytes"] for each in of_block["entries"])
        gelu = "FastGelu+:1:-1" if build is gpt2 else "BiasGelu+:1:-1"  # the largest value of a block
        assert gelu in [entry["configuration"] for entry in of_block["entries"]]
        before, now = (each["compiled"]["kept_bytes"] for each in (plain, status))
        told = sum(each["kept_without"] - each["kept"] for each in status["memory"])
        assert told > 0.05 * before and now == pytest.approx(before - told, rel=0.05)  # measured in the newest forward
    _, _, least = trained(build, recompute="all")
    assert least["compiled"]["kept_bytes"] <= now


def test_a_plan_is_applied_as_upstream_takes_one(tmp_path):
    (tmp_path / "plan.json").write_text(json.dumps(["BiasGelu+:1:-1"]))
    for plan in (["BiasGelu+:1:-1"], "BiasGelu+:1:-1", str(tmp_path / "plan.json")):
        _, _, status = trained(bert, recompute=plan)
        names = [entry["configuration"] for each in status["memory"] for entry in each["entries"]]
        assert set(names) == {"BiasGelu+:1:-1"}


def test_a_plan_without_a_configuration_of_a_graph_is_said(caplog):
    plan = memory.Wanted(plan=("Nope+:1:-1",))
    with caplog.at_level(logging.WARNING, "ort_zero"):
        memory.choose("Block", plan, {"BiasGelu+:1:-1": 2}, lambda _: onnx.ModelProto(), lambda _: 0)
    assert "no configuration of a graph of Block; the graph has BiasGelu+:1:-1" in caplog.text


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"recompute": "auto", "budget": "2GiB"}, 'must be a percentage with "backend": "ortmodule"'),
        ({"recompute": "auto", "budget": "much"}, "ort_zero.memory.budget: 'much' is not a size"),
        ({"recompute": "some"}, "must be off, all, auto, a configuration such as"),
        ({"recompute": "gone.json"}, "gone.json cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_words(section, words):
    with pytest.raises(ConfigError, match=words):
        memory.wanted_by(config.MemoryConfig.model_validate(section))

"""Adapters, merged LoRA and other names of tensors, against sums that torch computes whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import checkpoint_files
import pytest
import torch
from damage import flipped
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate
from ort_zero.checkpoint.aggregation import streaming
from ort_zero.cli import main as cli
from ort_zero.errors import CheckpointError, CorruptCheckpointError

P = "base_model.model."
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "base_model_name_or_path": "x"}


def tensors(dtype: torch.dtype = torch.bfloat16, adapter: str = "default") -> dict[tuple[str, str], torch.Tensor]:
    """Return a model with LoRA on a linear layer and an embedding, and a head that is trained whole."""
    make = torch.Generator().manual_seed(0)
    base = {"q.base_layer.weight": (5, 7), "q.base_layer.bias": (5,), "emb.base_layer.weight": (11, 3),
            "norm.weight": (7,), "head.original_module.weight": (4, 5)}  # fmt: skip
    trained = {
        f"q.lora_A.{adapter}.weight": (2, 7),
        f"q.lora_B.{adapter}.weight": (5, 2),
        f"emb.lora_embedding_A.{adapter}": (2, 11),
        f"emb.lora_embedding_B.{adapter}": (3, 2),
        f"head.modules_to_save.{adapter}.weight": (4, 5),
    }
    found = {("weight", f"{P}{name}"): torch.randn(shape, generator=make).to(dtype) for name, shape in base.items()}
    return found | {("master", f"{P}{n}"): torch.randn(shape, generator=make) for n, shape in trained.items()}


def save(path: Path, values: dict, config: dict[str, Any] | None = CONFIG) -> Path:
    texts = {} if config is None else {"adapter_config.json": json.dumps(config), "config.json": '{"model_type": "x"}'}
    checkpoint_files.write(path, values, ranks=3, optimizer=None, aliases={}, config=texts)
    return path


def merged(path: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    aggregate(path, out, merge_lora=True, progress=False, **options)
    return load_file(out / "model.safetensors")


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK", 4 * 7 * 2)


@pytest.mark.parametrize("dtype", ["keep", "fp32", "fp16"])
@pytest.mark.parametrize("rslora", [False, True])
def test_merged_weights_are_summed_in_float32_and_rounded_once(tmp_path, dtype, rslora):
    values = tensors()
    path = save(tmp_path / "c", values, {**CONFIG, "use_rslora": rslora, "alpha_pattern": {"emb": 10}})
    found = merged(path, tmp_path / "out", dtype=dtype)
    of = {name.removeprefix(P): value.float() for (_, name), value in values.items()}
    kind = {"keep": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype]
    root = math.sqrt(2) if rslora else 2
    delta = 6 / root * of["q.lora_B.default.weight"] @ of["q.lora_A.default.weight"]
    embedding = 10 / root * (of["emb.lora_embedding_B.default"] @ of["emb.lora_embedding_A.default"]).T
    expected = {
        "q.weight": (of["q.base_layer.weight"] + delta).to(kind),
        "q.bias": of["q.base_layer.bias"].to(kind),
        "emb.weight": (of["emb.base_layer.weight"] + embedding).to(kind),
        "norm.weight": of["norm.weight"].to(kind),
        "head.weight": of["head.modules_to_save.default.weight"].to(torch.float32 if dtype == "keep" else kind),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=1e-6 if value.dtype == torch.float32 else 1e-2, atol=1e-6)
    assert not (tmp_path / "out" / "adapter_config.json").exists() and (tmp_path / "out" / "config.json").exists()
    state = aggregate(path, tmp_path / "bin", merge_lora=True, format="torch", dtype=dtype, progress=False)
    whole = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert state.tensors == 5 and all(torch.equal(whole[name], found[name]) for name in found)


def test_fan_in_fan_out_also_where_only_the_shapes_tell(tmp_path):
    values = tensors(torch.float32)
    key = ("weight", f"{P}q.base_layer.weight")
    straight = merged(save(tmp_path / "a", values), tmp_path / "out_a")["q.weight"]
    values[key] = values[key].T.contiguous()
    for number, flag in enumerate((True, False)):
        path = save(tmp_path / f"b{number}", values, {**CONFIG, "fan_in_fan_out": flag})
        torch.testing.assert_close(merged(path, tmp_path / f"out_b{number}")["q.weight"], straight.T)


@pytest.mark.parametrize(("change", "message"), [
    ({"use_dora": True}, "DoRA cannot be merged"),
    ({"peft_type": "IA3"}, "type IA3, only LORA can be merged"),
    ({"lora_bias": True}, "biases of LoRA cannot be merged"),
    ({"r": 4}, "has rank 2, adapter_config.json says 4"),
    (None, "no adapter_config.json is in or beside"),
])  # fmt: skip
def test_what_cannot_be_merged_is_refused_by_name(tmp_path, change, message):
    path = save(tmp_path / "c", tensors(), None if change is None else {**CONFIG, **change})
    with pytest.raises(CheckpointError, match=message):
        merged(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dora_conv_and_tied_weights_are_refused(tmp_path):
    values = tensors() | {("master", f"{P}q.lora_magnitude_vector.default.weight"): torch.ones(5)}
    with pytest.raises(CheckpointError, match="DoRA cannot be merged"):
        merged(save(tmp_path / "c", values), tmp_path / "out")
    values = tensors()
    values["weight", f"{P}q.base_layer.weight"] = torch.zeros(5, 7, 3, 3)
    with pytest.raises(CheckpointError, match="LoRA of q cannot be merged, shapes"):
        merged(save(tmp_path / "d", values), tmp_path / "out")
    fields = {"optimizer": None, "config": {"adapter_config.json": json.dumps(CONFIG)}}
    checkpoint_files.write(tmp_path / "e", tensors(), aliases={f"{P}head2": f"{P}emb.base_layer.weight"}, **fields)
    with pytest.raises(CheckpointError, match="is tied to"):
        merged(tmp_path / "e", tmp_path / "out")


def test_a_damaged_adapter_is_not_merged(tmp_path):
    values = tensors()
    path = save(tmp_path / "c", values)
    part = checkpoint_files.raw(values["master", f"{P}q.lora_A.default.weight"])[20:36]
    flipped("rank_00001_master.safetensors", part)(path)
    with pytest.raises(CorruptCheckpointError, match="lora_A"):
        merged(path, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_the_adapter_alone_has_pefts_names(tmp_path):
    values = tensors() | {("master", f"{P}q.lora_magnitude_vector.default.weight"): torch.ones(5)}
    report = aggregate(save(tmp_path / "c", values), tmp_path / "out", what="adapter", progress=False)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = {"q.lora_A.weight", "q.lora_B.weight", "emb.lora_embedding_A", "emb.lora_embedding_B", "head.weight",
             "q.lora_magnitude_vector"}  # fmt: skip
    assert found.keys() == {f"{P}{name}" for name in names}
    assert torch.equal(found[f"{P}q.lora_A.weight"], values["master", f"{P}q.lora_A.default.weight"])
    assert set(report.files) == {"adapter_model.safetensors", "adapter_config.json"} and not report.warnings
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == CONFIG


def test_one_of_several_adapters(tmp_path):
    path = save(tmp_path / "c", tensors() | {k: v + 1 for k, v in tensors(adapter="other").items() if k[0] == "master"})
    with pytest.raises(CheckpointError, match="several adapters, give one by --adapter: default, other"):
        aggregate(path, tmp_path / "out", what="adapter", progress=False)
    aggregate(path, tmp_path / "out", what="adapter", adapter="other", progress=False)
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(found) == 5
    expected = tensors()["master", f"{P}q.lora_A.default.weight"] + 1
    assert torch.equal(found[f"{P}q.lora_A.weight"], expected)
    with pytest.raises(CheckpointError, match="no adapter 'third'; there are: default, other"):
        aggregate(path, tmp_path / "none", what="adapter", adapter="third", progress=False)
    with pytest.raises(CheckpointError, match="holds no adapter of PEFT"):
        checkpoint_files.write(tmp_path / "d")
        aggregate(tmp_path / "d", tmp_path / "none", merge_lora=True, progress=False)


def test_names_without_wrappers(tmp_path, capsys):
    values = {("master", f"_forward_module.model._orig_mod.{n}.weight"): torch.ones(3) for n in ("a", "b")}
    values |= {("exp_avg", name): value for (_, name), value in values.items()}
    fields = {
        "aliases": {"_forward_module.model._orig_mod.c": "_forward_module.model._orig_mod.a.weight"},
        "config": {},
    }
    checkpoint_files.write(tmp_path / "c", values, **fields)
    command = ["aggregate", str(tmp_path / "c"), str(tmp_path / "out")]
    assert cli.main([*command, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "--strip-prefix _forward_module." in out and r"--rename '_orig_mod\.='" in out
    command += ["--strip-prefix", "_forward_module.", "--rename", r"_orig_mod\.=", "--what", "weights+optimizer"]
    assert cli.main([*command, "--dry-run"]) == 0
    assert "--strip-prefix model." in capsys.readouterr().out
    assert cli.main([*command, "--strip-prefix", "model.", "--rename", r"^(\w)\.weight$=layers.\1.weight"]) == 0
    assert "hint" not in capsys.readouterr().out
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"layers.a.weight", "layers.b.weight"}
    moments = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert moments.keys() == {"exp_avg/layers.a.weight", "exp_avg/layers.b.weight"}
    about = json.loads((tmp_path / "out" / "optimizer.json").read_text())
    assert about["groups"][0]["names"] == ["layers.a.weight", "layers.b.weight"]
    assert about["aliases"] == {"c": "layers.a.weight"}


@pytest.mark.parametrize(("options", "message"), [
    ({"strip_prefix": ["nothing."]}, "no name of a tensor in .* has 'nothing.'; names there: a.bias"),
    ({"rename": ["nothing"]}, "is not FROM=TO"),
    ({"rename": ["(=x"]}, "no regular expression"),
    ({"rename": [r"a=\3"]}, "no regular expression"),
    ({"rename": ["^.+=same"]}, "the same name 'same'"),
    ({"strip_prefix": ["scale"]}, "leaves nothing of the name 'scale'"),
    ({"merge_lora": True, "what": "adapter"}, "does not go with"),
])  # fmt: skip
def test_wrong_names_are_refused(tmp_path, options, message):
    checkpoint_files.write(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        aggregate(tmp_path / "c", tmp_path / "out", progress=False, **options)

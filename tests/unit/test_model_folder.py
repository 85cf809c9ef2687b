"""What is aggregated is complete: transformers loads model, tokenizer and processor from the folder, offline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoint_files
import pytest
import tiny_models
import torch
import transformers
from older_versions import older
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Processor,
)

from ort_zero.checkpoint import aggregate
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.model_files import config_files
from ort_zero.checkpoint.model_files.config_files import keep_beside
from ort_zero.cli import main as cli

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return tiny_models.gpt2(words=9, hidden=8, layers=1, heads=2, positions=8)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(("<unk>", "hello", "world", "<pad>"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", chat_template=TEMPLATE
    )  # fmt: skip


def save(folder: Path, model: Any, **changes: Any) -> Path:
    """Write a checkpoint of `model` as the Trainer lays it out, its config in ``checkpoint-4`` only."""
    tensors = {("master", name): p.detach().clone() for name, p in model.named_parameters()}
    tied = {"lm_head.weight": "transformer.wte.weight"} if isinstance(model, GPT2LMHeadModel) else {}
    fields = {"tag": "global_step4", "step": 4, "aliases": tied, "config": {}, "optimizer": None, **changes}
    checkpoint_files.write(folder / "checkpoint-4" / "global_step4", tensors, ranks=2, **fields)
    (folder / "checkpoint-4" / "latest").write_text("global_step4")
    return folder / "checkpoint-4"


def test_model_and_tokenizer_load_with_the_template(tmp_path):
    model = gpt2()
    run = save(tmp_path / "run", model)
    model.config.save_pretrained(run)
    model.generation_config.save_pretrained(run)
    tokenizer().save_pretrained(run)
    apart = (run / "chat_template.jinja").exists()
    assert apart or older("transformers", "5"), "what this test is about"
    (run / "credentials.json").write_text('{"token": "hf_secret"}')
    (run / "train.py").write_text("print('not named by anybody')")
    report = aggregate(tmp_path / "run", tmp_path / "out", progress=False)
    assert not report.warnings
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), loaded.parameters(), strict=True))
    text = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert text("hello world")["input_ids"] == [1, 2] and text.chat_template == TEMPLATE
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", *(["chat_template.jinja"] if apart else []),
        *(["special_tokens_map.json"] if older("transformers", "5") else []),
    }  # fmt: skip


def test_a_processor_loads(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "A": 5}))
    processor = Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")))
    run = save(tmp_path / "run", gpt2())
    processor.save_pretrained(run)
    aggregate(run, tmp_path / "out", progress=False)
    loaded = AutoProcessor.from_pretrained(tmp_path / "out")
    assert type(loaded) is Wav2Vec2Processor and loaded.tokenizer.convert_tokens_to_ids(["A", "|"]) == [5, 4]
    assert loaded.feature_extractor.sampling_rate == 16000


@pytest.mark.parametrize("deciding", ["video_preprocessor_config.json", "preprocessor_config.json", "tekken.json"])
def test_files_of_processors_and_of_other_tokenizers(tmp_path, deciding):
    run = save(tmp_path / "run", gpt2())
    names = {"video_preprocessor_config.json", "preprocessor_config.json", "tekken.json", "source.spm", "spm.model",
             "qwen.tiktoken", "chat_template.jinja", "normalizer.json"}  # fmt: skip
    for name in names:
        (run / name).write_text('{"password": "secret"}')
    assert not aggregate(run, tmp_path / "none", progress=False).copied
    (run / deciding).write_text(json.dumps({"processor_class": "AProcessor", "vocab": []}))
    assert set(aggregate(run, tmp_path / "out", progress=False).copied) == names


def test_a_sentence_transformer_is_one_model_under_the_names_of_its_transformer(tmp_path):
    inner = gpt2().transformer
    run = save(tmp_path / "run", torch.nn.ModuleDict({"0": torch.nn.ModuleDict({"auto_model": inner})}))
    inner.config.save_pretrained(run)
    (run / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "Transformer"}]))
    report = aggregate(run, tmp_path / "out", strip_prefix=["0.auto_model."], progress=False)
    assert len(report.warnings) == 1 and "--strip-prefix '0.auto_model.'" in report.warnings[0]
    loaded = transformers.AutoModel.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in inner.state_dict().items())


def test_python_code_is_named_and_not_copied(tmp_path, capsys):
    run = save(tmp_path / "run", torch.nn.Linear(3, 3))
    (run / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "modeling_tiny.TinyModel"}}))
    (run / "modeling_tiny.py").write_text("raise SystemExit")
    assert cli.main(["aggregate", str(run), str(tmp_path / "out")]) == 0
    assert "names Python code (auto_map)" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("*.py"))


def test_our_format_keeps_what_the_trainer_wrote_beside_it(tmp_path, monkeypatch):
    model = gpt2()
    run = save(tmp_path / "run", model)
    tokenizer().save_pretrained(run)
    model.config.save_pretrained(run)
    (run / "notes.txt").write_text("private")
    with monkeypatch.context() as patch:
        patch.setattr(config_files, "MAX_BYTES", 10)  # a file that is too large stops no save
        keep_beside(open_folder(run), open_folder(run / "global_step4"), {}, "t")
    assert not (run / "global_step4" / "tokenizer.json").exists()
    keep_beside(open_folder(run), open_folder(run / "global_step4"), {"config.json": "{}"}, "t")
    (run / "global_step4").rename(tmp_path / "alone")
    assert not (tmp_path / "alone" / "notes.txt").exists() and not (tmp_path / "alone" / "config.json").exists()
    aggregate(tmp_path / "alone", tmp_path / "out", progress=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("world")["input_ids"] == [2]


def test_files_between_the_checkpoint_and_what_the_user_named(tmp_path):
    model = gpt2()
    run = save(tmp_path / "run", model)
    (run / "latest").unlink()
    tokenizer().save_pretrained(tmp_path / "run")
    tokenizer().save_pretrained(tmp_path)
    assert "tokenizer.json" not in aggregate(run, tmp_path / "a", progress=False).copied
    report = aggregate(tmp_path / "run", tmp_path / "b", progress=False)
    assert report.copied["tokenizer.json"] == str(tmp_path / "run")

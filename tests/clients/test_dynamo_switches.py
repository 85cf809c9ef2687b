"""Programs that ask for the backend by their library's own switch of torch.compile, without the section.

``python test_dynamo_switches.py PROGRAM`` trains in eager PyTorch, then in ONNX Runtime, and prints what comes of both.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TOLERANCE, distance
from small_data import VOCABULARY, images, padded, sentence_pairs, small_bert, tokens
from torch import nn
from torch.nn import functional as F

PACKAGES = ("lightning", "accelerate", "transformers", "trl", "peft", "timm", "diffusers", "sentence-transformers")
pytestmark = pytest.mark.clients

# -- what each program runs --------------------------------------------------------------------------------------------


def compiled(module: nn.Module, name: str) -> Any:
    """Return a module as a script compiles it by name; the module itself without a name."""
    return torch.compile(module, backend=name) if name else module


def fitted(model: nn.Module, batches: list[tuple], loss_of: Callable[..., torch.Tensor]) -> list[float]:
    """Train with SGD, and return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 1e-2), []
    for batch in batches:
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def arguments(name: str, **more: Any) -> dict[str, Any]:
    """Return the arguments of a Trainer, with its switch if there is a name."""
    switch = {"torch_compile": True, "torch_compile_backend": name} if name else {}
    common = {
        "output_dir": tempfile.mkdtemp(), "max_steps": 5, "per_device_train_batch_size": 4, "logging_steps": 1,
        "learning_rate": 1e-3, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return {**common, **switch, **more}


def logged(trainer: Any) -> list[float]:
    """Train, and return the losses that a Trainer logs."""
    trainer.train()
    return [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row]


def lightning_module(name: str) -> list[float]:
    """Fit a compiled LightningModule."""
    import lightning

    losses: list[float] = []

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

        def training_step(self, batch, number):
            loss = F.mse_loss(self.layers(batch), batch.sum(1, keepdim=True))
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=5, accelerator="cpu", **quiet)
    trainer.fit(compiled(Regression(), name), torch.utils.data.DataLoader(torch.randn(20, 8), batch_size=4))
    return losses


def nlp_example(name: str) -> list[float]:
    """Classify sentence pairs as accelerate's nlp_example does; ``accelerate launch`` has the switch."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = torch.utils.data.DataLoader(sentence_pairs(24), batch_size=4, collate_fn=padded)
    model = small_bert()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        return [*losses, *(model(**batch).loss.item() for batch in loader)]


def trl_sft(name: str) -> list[float]:
    """Fine-tune with SFTTrainer."""
    from test_trl import llama, rows, texts, tokenizer
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**arguments(name, bf16=False, gradient_checkpointing=False, max_length=32))
    data = rows(text=texts(20))
    return logged(SFTTrainer(llama(), args=config, train_dataset=data, processing_class=tokenizer()))


def peft_lora(name: str) -> list[float]:
    """Train LoRA with a Trainer."""
    from peft import LoraConfig, get_peft_model
    from test_peft import llama
    from transformers import Trainer, TrainingArguments

    adapter = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(llama(), adapter)
    return logged(Trainer(model, TrainingArguments(**arguments(name, learning_rate=1e-2)), train_dataset=tokens(20)))


def trainer_with_evaluation(name: str) -> list[float]:
    """Train a ViT with a Trainer that evaluates every other step."""
    from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=4, **sizes, **rates))
    rows = [{"pixel_values": row["image"], "labels": row["label"]} for row in images(24, size=16)]
    more = {"eval_strategy": "steps", "eval_steps": 2, "remove_unused_columns": False}
    made = TrainingArguments(**arguments(name, **more))
    return logged(Trainer(model, made, train_dataset=rows[:20], eval_dataset=rows[20:]))


def trainer_with_generation(name: str) -> list[float]:
    """Train a T5 with a Seq2SeqTrainer, and have it generate."""
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))
    made = Seq2SeqTrainingArguments(**arguments(name, learning_rate=0.1, predict_with_generate=True))
    trainer = Seq2SeqTrainer(model, made, train_dataset=tokens(20))
    return [*logged(trainer), *trainer.predict(tokens(4, seed=1)).predictions.flatten().tolist()]


def sentence_transformer(name: str) -> list[float]:
    """Train with SentenceTransformerTrainer."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import CosineSimilarityLoss
    from test_sentence_transformers import bert_of, sentence

    model = bert_of(Path(tempfile.mkdtemp()))
    pairs = {"a": [sentence(i) for i in range(20)], "b": [sentence(i + 1) for i in range(20)]}
    data = Dataset.from_dict({**pairs, "score": [i % 2 / 1 for i in range(20)]})
    made = SentenceTransformerTrainingArguments(**arguments(name))
    return logged(SentenceTransformerTrainer(model, made, train_dataset=data, loss=CosineSimilarityLoss(model)))


def timm_model(name: str) -> list[float]:
    """Train a ResNet of timm."""
    import timm

    model = compiled(timm.create_model("resnet18", num_classes=4, block_args={}), name)
    batches = [(images(4, seed=seed),) for seed in range(5)]

    def loss_of(model: nn.Module, rows: list[dict]) -> torch.Tensor:
        scores = model(torch.stack([row["image"] for row in rows]))
        return F.cross_entropy(scores, torch.stack([row["label"] for row in rows]))

    return fitted(model, batches, loss_of)


def diffusers_unet(name: str) -> list[float]:
    """Train a UNet with states of a text encoder."""
    from test_diffusers import text_states, text_unet

    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(4, 3, 8, 8, generator=generator)  # noqa: E731
    batches = [(draw(), torch.randint(0, 100, (4,)), text_states(4, generator), draw()) for _ in range(5)]
    return fitted(
        compiled(text_unet(), name), batches, lambda model, x, t, states, y: F.mse_loss(model(x, t, states).sample, y)
    )


def gan(name: str) -> list[float]:
    """Train a generator against a critic, both compiled."""
    generator = compiled(nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 12), nn.Tanh()), name)
    critic = compiled(nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)), name)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3) for each in (generator, critic)]
    ones, zeros, losses = torch.ones(4, 1), torch.zeros(4, 1), []
    for _ in range(5):
        real, false = torch.randn(4, 12), generator(torch.randn(4, 8))
        seen = critic(torch.cat([real, false.detach()]))
        loss = F.binary_cross_entropy_with_logits(seen, torch.cat([ones, zeros]))
        fooled = F.binary_cross_entropy_with_logits(critic(false), ones)
        for optimizer, each in zip(optimizers, (fooled, loss)):
            optimizer.zero_grad()
            each.backward(inputs=[p for group in optimizer.param_groups for p in group["params"]])
        for optimizer in optimizers:
            optimizer.step()
        losses += [loss.item(), fooled.item()]
    return losses


def main(program: str, *names: str) -> None:
    """Run a program with each name of a backend, ``""`` for eager PyTorch; print the losses and what ran."""
    importlib.import_module("torchvision_operators")
    import ort_zero

    results = []
    for name in names:
        torch.manual_seed(0)
        results.append(globals()[program](name))
    from ort_zero.compile.sessions import _sessions

    models = ort_zero.status()["models"]
    report = {key: models[0][key] for key in ("backend", "graph_runs", "failures")} if models else {}
    ran = {"runs": sum(session.runs for session in _sessions.values()), **report}
    print("\nREPORT", json.dumps({"losses": results, **ran}))


# -- what comes of it --------------------------------------------------------------------------------------------------

LAUNCH = "-m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend"
PROGRAMS = {  # Accelerate and the trainers take the names of Accelerate's list alone
    lightning_module: "onnxrt", trl_sft: "onnxrt", peft_lora: "onnxrt", trainer_with_evaluation: "onnxrt",
    trainer_with_generation: "onnxrt", sentence_transformer: "onnxrt", timm_model: "ort_zero",
    diffusers_unet: "onnxrt", gan: "ort_zero", nlp_example: "onnxrt",
}  # fmt: skip


def run(folder: Path, program: str, *names: str, launcher: str = "") -> dict[str, Any]:
    """Run this file in a process of its own, and return its report."""
    command = [sys.executable, *launcher.split(), __file__, program, *names]
    env = {**os.environ, "ORT_ZERO_CACHE_DIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("\nREPORT ")[2].splitlines()[0])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_switch_runs_the_program_in_onnx_runtime(tmp_path: Path, program: Callable[[str], list[float]]):
    if program is nlp_example:
        eager = run(tmp_path, "nlp_example", "", launcher=f"{LAUNCH} no")
        ours = run(tmp_path, "nlp_example", "", launcher=f"{LAUNCH} {PROGRAMS[program]}")
        assert eager["runs"] == 0
        losses = [*eager["losses"], *ours["losses"]]
    else:
        ours = run(tmp_path, program.__name__, "", PROGRAMS[program])
        losses = ours["losses"]
    assert ours["backend"] == "onnxruntime" and ours["failures"] == {}
    assert ours["runs"] > 0 and ours["graph_runs"]["forward"] >= 5 and ours["graph_runs"]["backward"] >= 5
    assert len(losses[0]) == len(losses[1]) >= 5 and len(set(losses[0])) > 1
    assert max(map(distance, *losses)) <= TOLERANCE, losses


if __name__ == "__main__":
    main(*sys.argv[1:])

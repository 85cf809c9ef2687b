"""Accelerate's examples.

The same models, loops and features as in its folder of examples.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from harness import Result, Run, programs
from small_data import padded, sentence_pairs, small_bert, small_gpt2, tokens

PACKAGES = ("accelerate", "transformers")
pytestmark = pytest.mark.clients


def make_accelerator(**more: Any) -> Any:
    """Return an Accelerator that knows of both ranks: without an accelerator it has to be given the backend's name."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")], **more)
    assert accelerator.num_processes == 2 and accelerator.distributed_type == "DEEPSPEED"
    return accelerator


def loaders(batch: int = 4) -> tuple[torch.utils.data.DataLoader, torch.utils.data.DataLoader]:
    """Return loaders for training and evaluation; the last batch of the latter is smaller."""
    train, evaluation = sentence_pairs(32), sentence_pairs(21, seed=1)
    return (
        torch.utils.data.DataLoader(train, shuffle=True, collate_fn=padded, batch_size=batch, drop_last=True),
        torch.utils.data.DataLoader(evaluation, shuffle=False, collate_fn=padded, batch_size=batch),
    )


def evaluated(accelerator: Any, model: torch.nn.Module, loader: Any) -> dict[str, float]:
    """Return the accuracy and the mean loss over all ranks."""
    model.eval()
    right, rows, losses = 0, 0, []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        predictions, labels = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
        right, rows = right + int((predictions == labels).sum()), rows + len(labels)
        losses.append(accelerator.gather(outputs.loss.detach().reshape(1)).mean().item())
    model.train()
    return {"accuracy": right / rows, "rows": rows, "loss": sum(losses) / len(losses)}


def stepped(accelerator: Any, loss: torch.Tensor, *stepping: Any) -> float:
    """Run the backward of a loss, and the steps of an optimizer and of a schedule; return the loss."""
    accelerator.backward(loss)
    for each in stepping:
        each.step()
    stepping[0].zero_grad()
    return loss.item()


def nlp_example(run: Run) -> Result:
    """nlp_example: BERT on sentence pairs, linear schedule with warm-up, `gather_for_metrics`"""
    from accelerate.utils import set_seed
    from transformers import get_linear_schedule_with_warmup

    accelerator = make_accelerator()
    set_seed(42)
    model = small_bert().to(accelerator.device)
    train_loader, eval_loader = loaders()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=len(train_loader) * 2)
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    losses, epochs = [], []
    for _ in range(2):
        model.train()
        for batch in train_loader:
            losses.append(stepped(accelerator, model(**batch).loss, optimizer, schedule))
        epochs.append(evaluated(accelerator, model, eval_loader))
    assert epochs[0]["rows"] == 21
    return Result(losses, alive=model, values={"epochs": epochs, "rate": schedule.get_last_lr()})


def complete_nlp_example(run: Run) -> Result:
    """complete_nlp_example: accumulation, a tracker, `save_state` each epoch, `load_state` and a resumed epoch"""
    from accelerate.tracking import GeneralTracker
    from accelerate.utils import DataLoaderConfiguration

    class JsonLines(GeneralTracker):
        name = "json_lines"
        requires_logging_directory = False
        main_process_only = False
        tracker = None

        def __init__(self):
            super().__init__()
            self.rows = []

        def store_init_configuration(self, values):
            self.rows.append(values)

        def log(self, values, step=None, **kwargs):
            self.rows.append({"step": step, **values})

    data = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = make_accelerator(
        dataloader_config=data,
        gradient_accumulation_steps=2, log_with=JsonLines(), project_dir=str(run.folder),
    )  # fmt: skip
    accelerator.init_trackers("complete", {"lr": 2e-3})
    torch.manual_seed(42)
    model = small_bert()
    train_loader, eval_loader = loaders(2)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, train_loader, eval_loader, schedule = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, schedule
    )
    accelerator.register_for_checkpointing(schedule)

    def epoch(number: int, skip: int = 0) -> list[float]:
        model.train()
        losses = []
        batches = accelerator.skip_first_batches(train_loader, skip) if skip else train_loader
        batches.set_epoch(number)
        for step, batch in enumerate(batches, start=skip):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if number == 1 and step == 3 and not skip:
                accelerator.save_state(str(run.folder / "step_4"))
        accelerator.log({"train_loss": sum(losses) / len(losses)}, step=number)
        return losses

    first = epoch(0)
    accelerator.save_state(str(run.folder / "epoch_0"))
    second = epoch(1)
    before = evaluated(accelerator, model, eval_loader)
    accelerator.load_state(str(run.folder / "step_4"))
    resumed = epoch(1, skip=4)
    assert resumed == pytest.approx(second[4:], abs=1e-5), (resumed, second)
    after = evaluated(accelerator, model, eval_loader)
    assert after["loss"] == pytest.approx(before["loss"], abs=1e-5)
    rows = accelerator.get_tracker("json_lines", unwrap=False).rows if accelerator.is_main_process else []
    return Result(first + second + resumed, alive=model, values={"epochs": [before, after], "tracked": rows})


def deepspeed_with_config_support(run: Run) -> Result:
    """deepspeed_with_config_support: optimizer and schedule of the JSON, `unwrap_model(...).save_pretrained`"""
    from accelerate.utils import DummyOptim, DummyScheduler
    from safetensors.torch import load_file
    from transformers import GPT2LMHeadModel

    # the JSON of this example has an optimizer and a scheduler of its own
    parts = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
    }
    with open(run.config_path, "w") as file:
        json.dump({**run.config, **parts}, file)
    accelerator = make_accelerator()
    model = small_gpt2()
    decay = [p for n, p in model.named_parameters() if "bias" not in n]
    other = [p for n, p in model.named_parameters() if "bias" in n]
    optimizer = DummyOptim([{"params": decay, "weight_decay": 0.01}, {"params": other, "weight_decay": 0.0}], lr=2e-3)
    schedule = DummyScheduler(optimizer, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(tokens(32), shuffle=True, batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, perplexities = [], []
    for _ in range(2):
        for batch in loader:
            losses.append(stepped(accelerator, model(**batch).loss, optimizer, schedule))
        model.eval()
        with torch.no_grad():
            perplexities.append(torch.exp(model(**batch).loss).item())
        model.train()
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    assert isinstance(unwrapped, GPT2LMHeadModel)
    unwrapped.save_pretrained(
        str(run.folder / "model"), is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    accelerator.wait_for_everyone()
    saved = {name: weight.norm().item() for name, weight in load_file(run.folder / "model/model.safetensors").items()}
    return Result(losses, alive=model, values={"perplexities": perplexities, "saved": saved})


test_programs = programs(
    nlp_example, complete_nlp_example, deepspeed_with_config_support, launcher="accelerate"
)  # fmt: skip

"""`ort_zero.wrap` without DeepSpeed: Lightning, Accelerate and a plain loop, with DDP.

The program is the same in PyTorch but for the one line that wraps the model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Result, Run, programs, wrapped
from small_data import images, padded, sentence_pairs, small_bert, small_convnet
from torch.nn import functional as F

PACKAGES = ("lightning", "transformers")
pytestmark = pytest.mark.clients


def lightning_with_ddp(run: Run) -> Result:
    """Lightning's Trainer with DDP: accumulation, clipping, a schedule, validation, a checkpoint that is loaded"""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = wrapped(run, small_convnet())
            self.losses: list[float] = []
            self.validated: list[float] = []

        def training_step(self, batch, index):
            loss = F.cross_entropy(self.model(batch["image"]), batch["label"])
            self.losses.append(loss.item())
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.validated.append(F.cross_entropy(self.model(batch["image"]), batch["label"]).item())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def trainer(epochs: int) -> Any:
        return lightning.Trainer(
            accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=epochs,
            accumulate_grad_batches=2, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
        )  # fmt: skip

    train = torch.utils.data.DataLoader(images(32, size=16), batch_size=4)
    evaluation = torch.utils.data.DataLoader(images(8, size=16, seed=1), batch_size=4)
    classifier = Classifier()
    first = trainer(1)
    first.fit(classifier, train, evaluation)
    first.save_checkpoint(str(run.folder / "first.ckpt"))
    other = Classifier()
    trainer(2).fit(other, train, evaluation, ckpt_path=str(run.folder / "first.ckpt"))
    values = {"validated": classifier.validated + other.validated}
    return Result(classifier.losses + other.losses, alive=(classifier, other), values=values)


def loop_with_ddp(run: Run) -> Result:
    """A plain loop: `DistributedDataParallel(ort_zero.wrap(model))`, `no_sync`, evaluation, `state_dict`"""
    from torch.nn.parallel import DistributedDataParallel

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model = wrapped(run, small_bert())
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=2e-3)
    rows, rank, losses = sentence_pairs(64), torch.distributed.get_rank(), []
    for step in range(6):
        batch = padded(rows[8 * step + 4 * rank :][:4], 12)
        if step % 2:
            loss = parallel(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with parallel.no_sync():
                loss = parallel(**batch).loss
                loss.backward()
        losses.append(loss.item())
    parallel.eval()
    with torch.no_grad():
        logits = parallel(**batch).logits
    names = sorted(model.state_dict())
    return Result(losses, alive=parallel, values={"logits": logits, "names": names})


def lightning_conversion(run: Run) -> Result:
    """Lightning's `convert_zero_checkpoint_to_fp32_state_dict` on a checkpoint with what Lightning keeps in one"""
    import deepspeed
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    deepspeed.init_distributed("gloo", verbose=False)
    model = small_convnet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=run.deepspeed_config(4))
    rows, rank, losses = images(32, size=16), torch.distributed.get_rank(), []
    for step in range(4):
        mine = rows[8 * step + 4 * rank :][:4]
        scores = engine(torch.stack([row["image"] for row in mine]))
        loss = F.cross_entropy(scores, torch.stack([row["label"] for row in mine]))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    kept = {"epoch": 1, "hyper_parameters": {"rate": 1e-2}, "loops": {"batches": [1, 2]}, "callbacks": {}}
    engine.save_checkpoint(str(run.folder / "saved"), client_state=kept)
    torch.distributed.barrier()
    found = convert_zero_checkpoint_to_fp32_state_dict(str(run.folder / "saved"), str(run.folder / f"{rank}.pt"))
    norms = {name: weight.float().norm().item() for name, weight in found["state_dict"].items()}
    return Result(losses, alive=engine, values={"norms": norms, "kept": {name: found[name] for name in kept}})


test_programs_without_deepspeed = programs(lightning_with_ddp, loop_with_ddp, stages=[0])
test_programs_under_zero3 = programs(lightning_conversion, stages=[3])

"""A head that leaves its logits to the loss trains under ZeRO as in plain DeepSpeed, and one rank alone may read them.

Each function up to the tests is a scenario, which runs in plain DeepSpeed first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparison import Run, compare, trained_alike
from launch_once import launched

CLASSES = 4096


def model_of(tied: bool = True) -> Any:
    """Return a GPT-2 with a head of many classes, the same on every rank and at every call."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=CLASSES, n_embd=16, n_layer=2, n_head=2, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return one of two batches of this rank; ranks have different numbers of labels."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(1000 + 10 * (step % 2) + rank)
    ids = torch.randint(0, CLASSES, (3, 17), generator=generator)
    share = torch.rand(ids.shape, generator=generator)
    return {"input_ids": ids, "labels": torch.where(share < (0.2, 0.8)[rank], ids, -100)}


def loss_of(engine: Any, step: int) -> torch.Tensor:
    """Return the loss of a batch."""
    return engine(**batch(step)).loss


def stage_2(run: Run) -> None:
    """Accumulate gradients under ZeRO-2, with the head's weight in the embedding."""
    run.start(model_of(), run.config(2, gas=2))
    run.train(loss_of, 6)


def stage_3(run: Run) -> None:
    """Train and evaluate under ZeRO-3, with a weight of the head's own, and look for weights that were not released."""
    run.start(model_of(tied=False), stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=0)
    run.train(loss_of)
    run.evaluate(loss_of)
    run.seen["whole"] = run.whole()


def read_on_one_rank(run: Run) -> None:
    """Read the logits under ZeRO-3, one rank alone, at two of five steps and after the optimizer's step."""
    run.start(model_of())
    for step in range(5):
        outputs = run.engine(**batch(step))
        run.step(outputs.loss)
        if run.rank == 0 and step % 2:
            run.losses.append(outputs.logits.detach().float().norm().item() / 100)


SCENARIOS = {each.__name__: each for each in (stage_2, stage_3, read_on_one_rank)}


def compare_all(folder: str) -> dict[str, Any]:
    """Run all scenarios."""
    return compare(SCENARIOS, folder)


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_is_that_of_plain_deepspeed(name):
    for rank, reports in enumerate(launched(compare_all, 2)):
        report = reports[name]
        trained_alike(report, f"{name}, rank {rank}")
        assert max(report["parameters"].values()) <= 1e-4
        losses = report["models"][0]["compiled"]["losses_in_chunks"]
        assert losses == {"stage_2": 6, "read_on_one_rank": 5}.get(name, 4)
        assert name != "stage_3" or report["seen"][1]["whole"] == []

"""Evaluation with the export of the training graph under ZeRO: the same gathers on all ranks, PyTorch's results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_setup import ds_config, start
from rank_processes.ranks import run_on_ranks
from tiny_models import gpt2

import ort_zero

WORDS = 64


def words(seed: int, length: int = 8) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + torch.distributed.get_rank())
    ids = torch.randint(1, WORDS, (2, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def evaluated(stage: int, ort: bool, **section: Any) -> tuple[list[float], list[list[torch.Tensor]], Any]:
    """Train three steps with an evaluation behind each; return its losses, its caches, and the status of ort_zero."""
    import deepspeed

    torch.manual_seed(0)
    model = gpt2(words=WORDS, hidden=16, heads=2, use_cache=True)
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    config = ds_config(stage, ort=ort, lr=1e-2, **zero)
    config["ort_zero"]["ortmodule"] |= section
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    losses, caches = [], []
    for step in range(3):
        engine.train()
        engine.backward(engine(**words(step)).loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            result = engine(**words(50 + step, 8 + step))
        losses.append(result.loss.item())
        caches.append([x for layer in result.past_key_values.layers for x in (layer.keys, layer.values)])
    status = ort_zero.status()["models"][-1] if ort else None
    engine.destroy()
    return losses, caches, status


def sharing(stage: int, folder: str, case: str) -> dict[str, Any]:
    """Return what came of a run in ONNX Runtime beside one in PyTorch; rank 1 may have lost what it had kept."""
    rank = start()
    own = Path(folder) / str(rank)
    expected, theirs, _ = evaluated(stage, ort=False)
    if case != "no cache":
        evaluated(stage, ort=True, cache_dir=str(own))
        for path in own.glob("*inference*"):
            path.unlink()
        if case == "one rank's is lost" and rank == 1:
            shutil.rmtree(own)
    losses, caches, status = evaluated(stage, ort=True, cache_dir=None if case == "no cache" else str(own))
    for got, wanted in zip(caches, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=1e-5)
    built = [t for t in status["transitions"] if t["transition"] == "export"]
    return {
        "losses": losses,
        "expected": expected,
        "backend": (status["backend"], status["fallbacks"]),
        "steps": {t["mode"]: sorted(t["steps"]) for t in built},
        "shared": [t["shared_export"] for t in built if t["mode"] == "inference"],
        "gathers": status["graphs"]["inference"].get("gathers", 0),
    }


@pytest.mark.parametrize(("stage", "case"), [(2, "no cache"), (3, "no cache"), (3, "cache"), (3, "one rank's is lost")])
def test_evaluation_shares_the_training_export_on_all_ranks(tmp_path, stage, case):
    reports = run_on_ranks(sharing, 2, stage, str(tmp_path), case)
    for rank, report in enumerate(reports):
        assert report["losses"] == pytest.approx(report["expected"], rel=2e-4)
        assert report["backend"] == ("onnxruntime", 0)
        assert report["shared"] == ["yes: that of graph 1"]
        assert "shared export" in report["steps"]["inference"] and "export" not in report["steps"]["inference"]
        loaded = case == "cache" or (case == "one rank's is lost" and rank == 0)
        assert ("export" not in report["steps"]["training"]) is loaded
    assert len({report["gathers"] for report in reports}) == 1 and (reports[0]["gathers"] > 0) is (stage == 3)


def other_sizes(sizes: list[int]) -> dict[str, Any]:
    """Train a BART, and evaluate it with another number of rows on each rank; return what came of it."""
    import deepspeed
    from transformers import BartConfig, BartForConditionalGeneration

    rank = start()
    results = []
    for ort in (False, True):
        torch.manual_seed(0)
        layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        widths = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32}
        without = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
        model = BartForConditionalGeneration(BartConfig(vocab_size=WORDS, **layers, **widths, **without))
        zero = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        config = ds_config(3, ort=ort, lr=1e-2, **zero)
        config["ort_zero"]["ortmodule"]["cache_dir"] = None
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        engine.backward(engine(**words(0)).loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            ids = words(7)["input_ids"][: sizes[rank]]
            results.append([engine(input_ids=ids, labels=ids).loss.item() for _ in range(2)])
        status = ort_zero.status()["models"][-1] if ort else {}
        engine.destroy()
    built = [t for t in status["transitions"] if t["mode"] == "inference" and t["transition"] == "export"]
    return {
        "losses": results,
        "backend": (status["backend"], status["fallbacks"]),
        "built": [("shared export" in t["steps"], t["reasons"]) for t in built],
    }


def test_ranks_whose_traces_differ_export_evaluation_by_themselves():
    alike = run_on_ranks(other_sizes, 2, [2, 2])
    assert [report["built"] for report in alike] == [[(True, ["first call"])]] * 2
    one, two = reports = run_on_ranks(other_sizes, 2, [1, 2])
    for report in (*alike, *reports):
        assert report["losses"][0] == pytest.approx(report["losses"][1], rel=2e-4)
        assert report["backend"] == ("onnxruntime", 0)
    # a batch of one row is another trace; the order of gathers that comes of its own export must be the other rank's
    assert one["built"] == [(False, ["first call"])]
    assert two["built"] == [
        (True, ["first call"]),
        (False, ["another rank's graph has its collectives in another order"]),
    ]

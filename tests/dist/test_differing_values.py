"""What no master tells: weights that a program put into the module before a save, and buffers that differ by rank."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_engines import engine_of, train, values_of
from launch_once import once
from rank_processes.ranks import run_on_ranks
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, convert, diff, list_checkpoints, verify, wait

PLANS: dict[str, dict[str, Any]] = {
    "fp32": {"stage": 1},
    "bf16": {"stage": 2, "precision": "bf16"},
    "bf16_1": {"stage": 1, "precision": "bf16", "accumulate": "fp32"},
    "fp16": {"stage": 1, "precision": "fp16"},
    "offload": {"stage": 2, "precision": "bf16", "offload": True},
    "async": {"stage": 2, "precision": "bf16", "checkpoint": {"async_save": True}},
    "zero3": {"stage": 3, "precision": "bf16"},
}
WAYS: dict[str, dict[str, bool]] = {
    "full": {},
    "module": {"load_module_only": True},
    "weights": {"load_optimizer_states": False},
}
TRAINED = ("embed.weight", "norm.weight", "norm.bias", "hidden.weight", "hidden.bias", "gain")


def edit(engine: Any, kind: str) -> None:
    """Put other weights into the module: all, one, some elements of one, or one on one rank alone."""
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if name in TRAINED:
                if kind == "all":
                    parameter.mul_(0.5).add_(0.25)
                elif kind in ("rank_0_gain", "rank_1") and name == "gain" and dist.get_rank() == (kind == "rank_1"):
                    parameter.fill_(3.0)
                elif kind == "one" and name == "hidden.weight":
                    parameter.fill_(7.0)
                elif kind == "element" and name == "embed.weight":
                    parameter.data.view(-1)[-1] = 9.0


class Warnings(logging.Handler):
    """Keeps the warnings of ort_zero."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning's text."""
        self.texts.append(record.getMessage())

    def taken(self) -> list[str]:
        """Return the warnings so far, and forget them."""
        texts, self.texts = self.texts, []
        return texts


def save_and_load(folder: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Save each plan after each edit, in both formats; load both in every way. Return values, and warnings."""
    import deepspeed

    # DeepSpeed refuses fp16 on processors without instructions for it; torch computes it on all
    deepspeed.get_accelerator().is_fp16_supported = lambda: True
    heard = Warnings()
    logging.getLogger("ort_zero").addHandler(heard)
    found: dict[str, Any] = {}
    for plan, options in PLANS.items():
        if plan == "zero3":
            continue
        engine, other = engine_of(**options), engine_of(seed=1, **options)
        own_save, own_load = type(engine).save_checkpoint.__wrapped__, type(engine).load_checkpoint.__wrapped__
        for kind in kinds:
            train(engine, range(2))
            at_step = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
            edit(engine, kind)
            where = f"{folder}/{plan}/{kind}"
            heard.taken()
            engine.save_checkpoint(f"{where}/ours", tag="t")
            own_save(engine, f"{where}/plain", tag="t")
            row = {"saved": values_of(engine), "warned": heard.taken()}
            with torch.no_grad():  # as programs do that swap an average in and out again
                for name, parameter in engine.module.named_parameters():
                    parameter.copy_(at_step[name])
            wait(engine)
            for way, arguments in WAYS.items():
                for loader, source in (("plain", "plain"), ("ours", "ours"), ("ours", "plain")):
                    train(other, range(7, 8))
                    heard.taken()
                    load = own_load.__get__(other) if loader == "plain" else other.load_checkpoint
                    load(f"{where}/{source}", tag="t", **arguments)
                    row[way, loader, source] = values_of(other)
                    row[way, loader, source, "warned"] = heard.taken()
            found[f"{plan} {kind}"] = row
        engine.destroy()
        other.destroy()
    engine = engine_of(**PLANS["zero3"])
    train(engine, range(2))
    engine.save_checkpoint(f"{folder}/zero3", tag="t")
    engine.load_checkpoint(f"{folder}/bf16/one/ours", tag="t")  # the masters; the module has no weights of its own
    found["zero3"] = {"loaded": values_of(engine)}
    return found


def save_and_load_buffers(folder: str) -> dict[str, Any]:
    """Save buffers that differ by rank under each stage, in both formats; load each at once and as converted."""
    heard = Warnings()
    logging.getLogger("ort_zero").addHandler(heard)
    found: dict[str, Any] = {}
    for stage in (0, 2, 3):
        engine = engine_of(stage)
        train(engine, range(2))
        engine.module.scale.fill_(dist.get_rank() + 0.5)
        engine.module.calls.fill_(4)
        heard.taken()
        engine.save_checkpoint(f"{folder}/{stage}", tag="ours")
        found["saved", stage] = heard.taken()
        if stage == 3:
            type(engine).save_checkpoint.__wrapped__(engine, f"{folder}/3", tag="plain")
        engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        for to in ("ort_zero", "deepspeed"):
            for tag in ("ours", "plain"):
                convert(f"{folder}/3", f"{folder}/{to}_{tag}", to=to, tag=tag, progress=False)
                convert(f"{folder}/3", f"{folder}/{to}_{tag}_1", to=to, tag=tag, world_size=1, progress=False)
    dist.barrier()
    engine = engine_of(3, seed=1)
    for place, tag in (*SOURCES, *((f"{stage}", "ours") for stage in (0, 2))):
        engine.module.scale.zero_()
        engine.load_checkpoint(f"{folder}/{place}", tag=tag, load_optimizer_states=False)
        found["loaded", place, tag] = (engine.module.scale.tolist(), int(engine.module.calls), heard.taken())
    return found


def load_buffers(folder: str) -> dict[str, Any]:
    """Load on another number of ranks."""
    heard = Warnings()
    logging.getLogger("ort_zero").addHandler(heard)
    engine = engine_of(3, seed=1)
    found = {}
    for place, tag in SOURCES:
        engine.load_checkpoint(f"{folder}/{place}", tag=tag)
        found[place, tag] = (engine.module.scale.tolist(), heard.taken())
    return found


SOURCES = [("3", tag) for tag in ("ours", "plain")] + [
    (f"{to}_{tag}", tag) for to in ("ort_zero", "deepspeed") for tag in ("ours", "plain")
]


KINDS = ("none", "all", "one", "element", "rank_0_gain", "rank_1")
"""The masters of `gain` lie on rank 1 for the most part. DeepSpeed saves the module of rank 0."""


@once
def launched(folder: str) -> list[dict[str, Any]]:
    return run_on_ranks(save_and_load, 2, folder, KINDS, timeout=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("own_values"))


def unequal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], start: str, names: Any = None) -> list[str]:
    """Return the tensors whose names start with `start` and end with one of `names`, and whose bits differ."""
    ends = tuple(f" {name}" for name in names) if names is not None else ""
    chosen = [n for n in {*one, *other} if n.startswith(start) and n.endswith(ends)]
    assert chosen or names is not None  # a rank need not have masters of each parameter
    return [n for n in chosen if n not in one or n not in other or not torch.equal(one[n], other[n])]


def edited(kind: str) -> set[str]:
    names = {"none": [], "rank_1": [], "one": ["hidden.weight"], "element": ["embed.weight"], "rank_0_gain": ["gain"]}
    return set(names.get(kind, TRAINED))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "zero3"])
def test_weights_in_the_module_come_back_as_with_plain_deepspeed(plan, kind, folder):
    for rank, found in enumerate(launched(folder)):
        row = found[f"{plan} {kind}"]
        for way in WAYS:
            plain = row[way, "plain", "plain"]
            for source in ("ours", "plain"):
                ours = row[way, "ours", source]
                assert not unequal(ours, plain, "parameter "), (rank, way, source)
                # plain rounds the masters of all; what was not put into the module keeps its masters here
                names = None if way == "full" else edited(kind)
                assert names == set() or not unequal(ours, plain, "master of ", names), (rank, way, source)
                assert not rank or not row[way, "ours", source, "warned"]
                if not rank:
                    warned = [text for text in row[way, "ours", source, "warned"] if "not the masters" in text]
                    assert len(warned) == bool(edited(kind)) and all(n in warned[0] for n in edited(kind))
        assert not unequal(row["full", "ours", "ours"], row["saved"], "master of ")
        said = [text for text in row["warned"] if "not the masters" in text]
        assert len(said) == (not rank and bool(edited(kind))), said
        for text in said:
            assert set(re.findall("|".join(map(re.escape, TRAINED)), text)) == edited(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_differs_is_stored(kind, folder):
    launched(folder)
    for plan in PLANS:
        root = Path(folder, plan, kind, "ours", "t") if plan != "zero3" else Path(folder, plan, "t")
        manifest = json.loads((root / "manifest.json").read_text())
        names = {t["name"] for t in manifest["tensors"] if t["kind"] == "module"}
        assert names == (set() if plan == "zero3" else edited(kind))
        assert manifest["version"] == 5 and not manifest["left_out"]


def test_zero3_takes_the_masters(folder):
    for rank, found in enumerate(launched(folder)):
        masters = {n: v for n, v in found["zero3"]["loaded"].items() if n.startswith("master of hidden.weight")}
        assert masters and not any((v == 7.0).any() for v in masters.values()), rank


@pytest.mark.parametrize("source", ["ours", "plain"])
@pytest.mark.parametrize("plan", ["fp32", "bf16"])
def test_commands_read_both(plan, source, folder, tmp_path):
    saved = [found[f"{plan} one"]["saved"] for found in launched(folder)]
    root = Path(folder, plan, "one", source)
    report = verify(str(root / "t"), progress=False)
    assert report.ok and any("hidden.weight" in note and "--from module" in note for note in report.notes)
    assert list_checkpoints(str(root))[0].whole
    masters = torch.cat([value for one in saved for n, value in one.items() if n == "master of hidden.weight"])
    for origin in ("masters", "module"):
        aggregate(root, tmp_path / origin, weights_from=origin, progress=False)
        weights = load_file(tmp_path / origin / "model.safetensors")
        hidden = weights["hidden.weight"].float()
        assert torch.equal(hidden.view(-1), masters.float()) if origin == "masters" else (hidden == 7).all()
        assert weights["gain"].dtype == torch.float32
    assert not diff(tmp_path / "masters", tmp_path / "module", progress=False).same
    for to in ("ort_zero", "deepspeed"):
        convert(root, tmp_path / to, to=to, world_size=3, progress=False)
        aggregate(tmp_path / to, tmp_path / f"{to}_module", weights_from="module", progress=False)
        assert diff(tmp_path / f"{to}_module", tmp_path / "module", progress=False).same
        assert diff(tmp_path / to, root, progress=False).same
    assert not diff(root, Path(folder, plan, "none", source), what="weights", progress=False).same


# ---- buffers ---------------------------------------------------------------------------------------------------------


def test_buffers_that_differ_come_back_to_their_ranks(tmp_path):
    folder = str(tmp_path)
    for rank, found in enumerate(run_on_ranks(save_and_load_buffers, 2, folder, timeout=300)):
        for key, value in found.items():
            if key[0] == "saved":
                said = [text for text in value if "differ between the ranks" in text]
                assert len(said) == (not rank) and all("buffers scale differ" in text for text in said), key
            else:
                scale, calls, warned = value
                assert (scale, calls) == ([rank + 0.5] * 3, 4), key
                said = [text for text in warned if "buffers scale differed between the 2 ranks" in text]
                assert len(said) == (not rank), key
    for found in run_on_ranks(load_buffers, 1, folder, timeout=300):
        for key, (scale, warned) in found.items():
            assert scale == [0.5] * 3, key
            assert len([text for text in warned if "buffers scale differed between the 2 ranks" in text]) == 1, key
    for place, tag in SOURCES:
        report = verify(str(tmp_path / place), tag, progress=False)
        assert report.ok and any("buffers scale" in note for note in report.notes), report
        aggregate(tmp_path / place, tmp_path / "models" / place / tag, tag=tag, progress=False)
        assert load_file(tmp_path / "models" / place / tag / "model.safetensors")["scale"].tolist() == [0.5] * 3
    for to in ("ort_zero", "deepspeed"):
        for tag in ("ours", "plain"):
            assert not verify(str(tmp_path / f"{to}_{tag}_1"), progress=False).notes
    kinds = {t["kind"] for t in json.loads((tmp_path / "3" / "ours" / "manifest.json").read_text())["tensors"]}
    assert "buffer_of_rank_1" in kinds and "buffer_of_rank_0" not in kinds

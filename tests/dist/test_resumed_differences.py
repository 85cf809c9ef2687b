"""What differs between the run that saved and the one that resumes: an error names it, or one warning does."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_engines import Odd, differences, made, train, values_of
from optimizer_kinds import COMPILED, OPTIMIZERS, Peculiar

from ort_zero.checkpoint import aggregate, convert, diff, save, verify, wait
from ort_zero.cli.main import main
from ort_zero.errors import CheckpointError
from ort_zero.log import get_logger

get_logger()  # the first call configures it, and pytest must add its handler after that

STAGES = (0, 1, 2, 3)
CONFIG = json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})


def saved(folder: Any, micro_steps: int = 2, **options: Any) -> None:
    """Train and save."""
    engine = made(**options)
    train(engine, range(micro_steps))
    engine.save_checkpoint(str(folder), tag="t")
    engine.destroy()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


pytestmark = pytest.mark.usefixtures("one_rank")


# ---- the optimizer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "stage"), [(torch.optim.Adafactor, 0), *((Peculiar, stage) for stage in STAGES)])
def test_states_that_cannot_be_cut_are_refused_before_anything_is_written(kind, stage, tmp_path):
    engine = made(stage, kind)
    train(engine, range(3))
    with pytest.raises(CheckpointError, match="optimizer state '.*' of .*\"sharded\": false"):
        engine.save_checkpoint(str(tmp_path), tag="t")
    assert not list(tmp_path.rglob("*.safetensors")) and not (tmp_path / "latest").exists()
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_deepspeeds_adam_for_cpus_goes_on_as_in_plain_deepspeed(stage, tmp_path):
    """Its kernel computes the powers of the betas anew after a resume, in other bits than step by step."""
    kind, options = COMPILED["cpu_adam"]
    found = []
    for section in (False, True):
        folder = str(tmp_path / f"{section}")
        saved(folder, stage=stage, optimizer=kind, section=section, **options)
        engine = made(stage, kind, model=Odd(seed=1), section=section, **options)
        assert engine.load_checkpoint(folder)[0]
        train(engine, range(2, 4))
        found.append(values_of(engine))
        engine.destroy()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


# DeepSpeed's own loader takes its checkpoints without ZeRO
@pytest.mark.parametrize(("sharded", "stage"), [(True, 0), (True, 3), (False, 1)])
@pytest.mark.parametrize(("before", "now"), [("adamw", "sgd"), ("momentum", "adamw"), ("adamw", "nadam")])
def test_another_optimizer_is_refused_before_its_first_step(before, now, sharded, stage, tmp_path):
    kinds = {**OPTIMIZERS, "adamw": (torch.optim.AdamW, {})}
    kind, options = kinds[before]
    saved(tmp_path, stage=stage, optimizer=kind, sharded=sharded, **options)
    kind, options = kinds[now]
    engine = made(stage, kind, **options)
    untouched = values_of(engine)
    with pytest.raises(CheckpointError, match="load_optimizer_states=False"):
        engine.load_checkpoint(str(tmp_path))
    assert not differences(engine, untouched)
    assert engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)[0]
    engine.destroy()


def test_parameters_without_gradient_among_the_optimizers_have_no_state(tmp_path):
    """As frozen ones have, if the optimizer was given ``model.parameters()``."""

    def everything(model):
        return list(model.parameters())

    engine = made(stage=0, groups=everything)
    train(engine, range(2))
    engine.save_checkpoint(str(tmp_path))
    train(engine, range(2, 4))
    after = values_of(engine)
    assert "exp_avg of frozen.weight" not in after
    engine.destroy()
    assert verify(tmp_path, progress=False).ok
    engine = made(stage=0, groups=everything, model=Odd(seed=1))
    engine.load_checkpoint(str(tmp_path))
    train(engine, range(2, 4))
    assert not differences(engine, after)
    engine.destroy()


def test_a_run_whose_steps_were_all_skipped_resumes(tmp_path):
    """As those of fp16 are, until the loss scale is found."""
    engine = made()
    engine.global_steps = engine.skipped_steps = 3
    engine.save_checkpoint(str(tmp_path))
    train(engine, range(2))
    after = values_of(engine)
    engine.destroy()
    engine = made(model=Odd(seed=1))
    engine.load_checkpoint(str(tmp_path))
    assert (engine.global_steps, engine.skipped_steps) == (3, 3)
    train(engine, range(2))
    assert not differences(engine, after)
    engine.destroy()


@pytest.mark.parametrize("path", ["", " ", "file://"])
def test_an_empty_path_is_not_the_root_of_the_file_system(path, tmp_path):
    engine = made()
    for action in (engine.save_checkpoint, engine.load_checkpoint):
        if path or action == engine.save_checkpoint:  # DeepSpeed's own loader takes an empty one
            with pytest.raises(CheckpointError, match="the path is empty"):
                action(path, tag="ort_zero_must_not_be_here")
    assert not list(Path("/").glob("ort_zero_must_not*"))
    engine.destroy()


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def steps(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def test_another_scheduler_is_refused(tmp_path):
    saved(tmp_path, scheduler=cosine)
    engine = made(scheduler=steps)
    before = engine.lr_scheduler.state_dict()
    with pytest.raises(CheckpointError, match="CosineAnnealingLR, the engine has a StepLR.*load_lr_scheduler_states"):
        engine.load_checkpoint(str(tmp_path))
    assert engine.lr_scheduler.state_dict() == before and engine.global_steps == 0
    assert engine.load_checkpoint(str(tmp_path), load_lr_scheduler_states=False)[0]
    engine.destroy()


@pytest.mark.parametrize(
    ("before", "now", "words"), [(cosine, None, "has no scheduler"), (None, cosine, "CosineAnnealingLR starts anew")]
)
def test_a_scheduler_on_one_side_only_is_one_warning(before, now, words, tmp_path, caplog):
    saved(tmp_path, scheduler=before)
    engine = made(scheduler=now)
    engine.load_checkpoint(str(tmp_path))
    (warning,) = warnings_of(caplog)
    assert words in warning
    engine.destroy()


# ---- gradient accumulation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_after_resuming_has_the_gradients_of_all_its_micro_steps(stage, tmp_path, caplog):
    saved(tmp_path, micro_steps=6, stage=stage, accumulate=4)
    assert any("2 micro-steps after the optimizer's last step" in text for text in warnings_of(caplog))
    found = []
    for seeds in (range(0), range(50, 51), range(50, 53), range(50, 54)):  # what the engine has done before it loads
        engine = made(stage, model=Odd(seed=1), accumulate=4)
        train(engine, seeds)
        engine.load_checkpoint(str(tmp_path))
        assert engine.micro_steps == 0 and engine.global_steps == 1
        train(engine, range(10, 14))
        assert engine.global_steps == 2
        found.append(values_of(engine))
        for other in found:
            assert not differences(engine, other)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
def test_another_accumulation_after_resuming_steps_where_plain_deepspeed_does(stage, tmp_path):
    saved(tmp_path, micro_steps=6, stage=stage, accumulate=2)
    engine = made(stage, accumulate=4)
    engine.load_checkpoint(str(tmp_path))
    steps = []
    for seed in range(8):
        train(engine, range(seed, seed + 1))
        steps.append(engine.global_steps)
    assert steps == [3, 3, 3, 4, 4, 4, 4, 5]
    engine.destroy()


def _other_rate(engine: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.05


def _other_decay(engine: Any) -> None:
    engine.optimizer.param_groups[0]["weight_decay"] = 0.3


def _other_scheduler(engine: Any) -> None:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    engine.lr_scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5)


def _no_gradients(engine: Any) -> None:
    engine.zero_grad()
    engine.optimizer.zero_grad()


def _other_clipping(engine: Any) -> None:
    engine.optimizer.clip_grad = 1e-3


def _another_backward(engine: Any) -> None:
    train(engine, range(90, 91))  # in the middle of a window of accumulation
    engine.zero_grad()


CHANGES = [_other_rate, _other_decay, _other_scheduler, _no_gradients, _other_clipping, _another_backward]


def _resumed(folder: Path, stage: int, change: Callable[[Any], None], plain: bool) -> tuple[list[Any], dict[str, Any]]:
    """Train, save, resume in another engine, change something, train on; return steps and rates, and the values."""

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)

    options: dict[str, Any] = {"stage": stage, "accumulate": 2, "scheduler": scheduler, "section": not plain}
    engine = made(**options)
    train(engine, range(4))
    engine.save_checkpoint(str(folder), tag="t")
    engine.destroy()
    engine = made(model=Odd(seed=1), **options)
    engine.load_checkpoint(str(folder))
    change(engine)
    seen = []
    for seed in range(4, 10):
        train(engine, range(seed, seed + 1))
        seen.append((engine.global_steps, engine.get_lr()))
    values = values_of(engine)
    engine.destroy()
    return seen, values


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_program_changes_before_the_first_step_acts_as_in_plain_deepspeed(change, stage, tmp_path):
    theirs = _resumed(tmp_path / "plain", stage, change, plain=True)
    ours = _resumed(tmp_path / "ours", stage, change, plain=False)
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)


# ---- states that DeepSpeed moves, and states that differ by group ----------------------------------------------------


def train_linear(engine: Any, steps: int) -> None:
    """Do steps with the same batch."""
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()


def test_states_that_were_offloaded_are_saved_and_resumed(tmp_path):
    def model(seed: int) -> torch.nn.Module:  # without frozen weights, with which DeepSpeed's offload_states() fails
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))

    def states(engine: Any) -> dict[str, torch.Tensor]:
        return {name: value for name, value in values_of(engine).items() if "offload_buffer" not in name}

    def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    engine = made(3, "Adam", model=model(0))  # offload_states() wants DeepSpeed's own Adam
    train_linear(engine, 2)
    at_save = states(engine)
    engine.offload_states()
    engine.save_checkpoint(str(tmp_path), tag="t")
    engine.destroy()
    engine = made(3, "Adam", model=model(1))
    engine.load_checkpoint(str(tmp_path))
    assert same(states(engine), at_save)
    train_linear(engine, 2)
    assert not same(states(engine), at_save)
    engine.offload_states()
    engine.reload_states()
    engine.load_checkpoint(str(tmp_path))  # into an engine whose states were away
    engine.offload_states()
    engine.reload_states()
    assert same(states(engine), at_save)
    train_linear(engine, 1)
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_values_that_a_program_added_to_a_parameter_group_come_back(stage, tmp_path, caplog):
    engine = made(stage)
    train(engine, range(2))
    (group,) = engine.optimizer.param_groups
    group["plan"] = {"warm": 3, "parts": ["a", ("b", 2)], 5: {1, 2}}
    group["name"], group["list"] = "encoder", [1, 2.5, None]
    group["function"] = len
    engine.save_checkpoint(str(tmp_path), tag="t")
    (warning,) = [text for text in warnings_of(caplog) if "function" in text]
    assert "parameter group 0" in warning
    engine.destroy()
    engine = made(stage, model=Odd(seed=1))
    engine.load_checkpoint(str(tmp_path))
    (group,) = engine.optimizer.param_groups
    assert group["plan"] == {"warm": 3, "parts": ["a", ("b", 2)], 5: {1, 2}}
    assert group["name"] == "encoder" and group["list"] == [1, 2.5, None] and "function" not in group
    engine.destroy()


# ---- the model -------------------------------------------------------------------------------------------------------


def untied(model: Odd) -> None:
    model.head.weight = torch.nn.Parameter(model.embed.weight.detach().clone())


def with_more(model: Odd) -> None:
    model.more = torch.nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (untied, "head.weight and embed.weight"),
        (with_more, "lacks more.weight, more.bias"),
        (lambda model: model.frozen.requires_grad_(True), "frozen.weight, frozen.bias was not trained"),
        (lambda model: model.hidden.requires_grad_(False), "hidden.weight, hidden.bias was trained"),
    ],
    ids=["untied", "more", "trained now", "frozen now"],
)
def test_parameters_that_differ_are_named(change, words, tmp_path, caplog):
    saved(tmp_path)
    model = Odd(seed=1)
    change(model)
    engine = made(model=model)
    engine.load_checkpoint(str(tmp_path))
    warning, *others = warnings_of(caplog)
    of_moments = change not in (untied, with_more)
    assert words in warning and bool(others) == of_moments  # the other is that a parameter group lost or gained some
    assert torch.equal(engine.module.head.weight, engine.module.embed.weight)
    caplog.clear()
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert not warnings_of(caplog) or "was trained" not in words  # no moments are lost then
    engine.destroy()


def test_what_a_save_leaves_out_is_named_and_filled_from_a_model(tmp_path, capsys, caplog):
    engine = made()
    train(engine, range(2))
    engine.save_checkpoint(str(tmp_path / "whole"), tag="t")
    engine.save_checkpoint(str(tmp_path / "part"), tag="t", exclude_frozen_parameters=True)
    engine.load_checkpoint(str(tmp_path / "part"))
    assert any("without the frozen parameters frozen.bias, frozen.weight" in text for text in warnings_of(caplog))
    engine.destroy()
    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    aggregate(whole, tmp_path / "model")
    assert main(["verify", part]) == 0 and "without the frozen parameters frozen.bias" in capsys.readouterr().out
    assert main(["ls", part]) == 0 and "yes; without 2 frozen parameters" in capsys.readouterr().out
    assert main(["aggregate", part, str(tmp_path / "free")]) == 0  # from_pretrained takes no folder without config.json
    assert "without the frozen parameters frozen.bias" in capsys.readouterr().out
    (tmp_path / "part" / "config.json").write_text(CONFIG)
    converted = str(tmp_path / "converted")
    convert(part, converted, progress=False)
    (tmp_path / "converted" / "config.json").write_text(CONFIG)
    for source in (part, converted):
        assert main(["aggregate", source, str(tmp_path / "refused")]) == 2
        assert "frozen.bias, frozen.weight, which from_pretrained" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
    assert main(["aggregate", part, str(tmp_path / "a_part"), "--part"]) == 0
    assert main(["aggregate", part, str(tmp_path / "filled"), "--base", str(tmp_path / "model")]) == 0
    assert diff(tmp_path / "filled", tmp_path / "model", progress=False).same
    assert main(["aggregate", part, str(tmp_path / "filled"), "--base", str(tmp_path / "a_part"), "--overwrite"]) == 2
    assert "a_part lacks frozen.bias, frozen.weight" in capsys.readouterr().err
    assert main(["aggregate", part, str(tmp_path / "filled"), "--base", "memory://model", "--overwrite"]) == 2
    assert "--base takes a local model" in capsys.readouterr().err


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_that_are_set_after_a_background_save_wait_for_its_copy(stage, tmp_path, monkeypatch):
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

    from ort_zero.checkpoint.saves import saving

    copy = saving._copy
    monkeypatch.setattr(saving, "_copy", lambda *tensors: (time.sleep(0.2), copy(*tensors)))
    engine = made(stage=stage)
    train(engine, range(2))
    weight = engine.module.hidden.weight
    own = safe_get_full_fp32_param(weight).clone()
    average = torch.full_like(own, 7.0)
    safe_set_full_fp32_param(weight, average)
    save(engine, str(tmp_path), tag="t", async_save=True)
    safe_set_full_fp32_param(weight, own)
    wait(engine)
    safe_set_full_fp32_param(weight, own)
    engine.load_checkpoint(str(tmp_path), tag="t")
    assert torch.equal(safe_get_full_fp32_param(weight), average)
    assert "set_full_hp_param" not in vars(engine.optimizer)
    engine.destroy()


# ---- universal checkpoints -------------------------------------------------------------------------------------------


def test_load_universal_takes_what_the_tag_is(tmp_path, caplog):
    saved(tmp_path)
    old = time.time() - 100
    convert(tmp_path, tmp_path / "universal", to="universal", progress=False)
    (tmp_path / "universal" / "t").rename(tmp_path / "u")
    engine = made(more={"checkpoint": {"load_universal": True}}, model=Odd(seed=1))
    assert engine.load_checkpoint(str(tmp_path), tag="t")[0] and engine.global_steps == 2  # ours
    values = values_of(engine)
    assert engine.load_checkpoint(str(tmp_path))[0]  # ``latest``, since there is no ``latest_universal``
    (tmp_path / "latest_universal").write_text("u")
    os.utime(tmp_path / "latest_universal", (old, old))
    caplog.clear()
    assert engine.load_checkpoint(str(tmp_path))[0].split("/")[-2] == "u"
    (warning,) = warnings_of(caplog)
    assert '"load_universal" loads u' in warning and "latest is newer and names t" in warning
    os.utime(tmp_path / "latest", (old - 1, old - 1))
    caplog.clear()
    assert engine.load_checkpoint(str(tmp_path))[0].split("/")[-2] == "u" and not warnings_of(caplog)
    assert not differences(engine, values)
    with pytest.raises(CheckpointError, match="'none' was given, but .* is not there; tags there: t, u"):
        engine.load_checkpoint(str(tmp_path), tag="none")
    engine.destroy()


# ---- runs without ZeRO -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_without_zero_is_saved_as_deepspeed_does(precision, tmp_path, caplog, monkeypatch):
    import deepspeed

    monkeypatch.setattr(deepspeed.get_accelerator(), "is_fp16_supported", lambda: True, raising=False)
    options: dict[str, Any] = {"stage": 0, "more": {precision: {"enabled": True}}}
    engine = made(**options)
    (warning,) = [text for text in warnings_of(caplog) if "DeepSpeed's own format" in text]
    train(engine, range(2))
    engine.save_checkpoint(str(tmp_path), tag="t")
    at_save = {name: value.clone() for name, value in engine.module.state_dict().items()}
    train(engine, range(2, 4))
    after = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    engine = made(**options, model=Odd(seed=1))
    assert engine.load_checkpoint(str(tmp_path))[0]
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, at_save[name]), name
    train(engine, range(2, 4))
    for name, value in engine.module.state_dict().items():
        assert torch.equal(value, after[name]), name
    engine.destroy()


def test_deepspeeds_checkpoint_without_zero_resumes(tmp_path, caplog):
    engine = made(stage=0, sharded=False)
    train(engine, range(2))
    engine.save_checkpoint(str(tmp_path), tag="t", client_state={"epoch": 3})
    train(engine, range(2, 4))
    after = values_of(engine)
    engine.destroy()
    engine = made(stage=0, model=Odd(seed=1))
    assert engine.load_checkpoint(str(tmp_path))[1]["epoch"] == 3
    train(engine, range(2, 4))
    assert not differences(engine, after)
    engine.destroy()
    engine = made(stage=1)
    with pytest.raises(CheckpointError, match="without ZeRO.*needs 1 ranks and ZeRO-0.*load_optimizer_states=False"):
        engine.load_checkpoint(str(tmp_path))
    assert engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)[0]
    engine.destroy()

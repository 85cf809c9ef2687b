"""The patches of DeepSpeed's engine, against an engine of another version of DeepSpeed."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ort_zero import config
from ort_zero.checkpoint.loads import loading
from ort_zero.checkpoint.saves import saving
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.cpu_memory import measures
from ort_zero.errors import CheckpointError, ConfigError
from ort_zero.plugin import engine_patch
from ort_zero.runtimes import registry
from ort_zero.utils.patching import PatchSet

LATER_VERSION = """
class DeepSpeedEngine:
    def __init__(self, args, model, config=None):
        if model is None:
            raise ValueError("DeepSpeed takes over")
        self.module = model

    def save_checkpoint(self, new_first, save_dir, tag=None, client_state={}, save_latest=True,
                        exclude_frozen_parameters=False, new_last=7):
        return ("deepspeed", new_first, save_dir, tag, client_state, save_latest, exclude_frozen_parameters, new_last)

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None, new_last=7):
        return ("deepspeed", load_dir, tag, new_last)

    def load_universal_checkpoint(self):
        return False

    def step(self, lr_kwargs=None, new_last=7):
        return new_last

    def destroy(self):
        pass
"""


@pytest.fixture
def engine(monkeypatch):
    """An engine of a DeepSpeed whose methods have arguments that today's have not, patched."""
    module = ModuleType(ds_compat.ENGINE)
    exec(LATER_VERSION, module.__dict__)
    monkeypatch.setitem(sys.modules, ds_compat.ENGINE, module)
    patches = PatchSet("deepspeed", engine_patch.PATCHES)
    patches.apply()
    yield object.__new__(module.DeepSpeedEngine)
    patches.restore()
    measures.begin(False)  # what a constructor that failed has patched


@pytest.fixture
def called(monkeypatch):
    """What our own functions were called with."""
    found: list = []
    monkeypatch.setattr(saving, "save", lambda *args, **kwargs: found.append((args, kwargs)))
    monkeypatch.setattr(loading, "load", lambda *args, **kwargs: found.append((args, kwargs)) or ("ours", {}))
    return found


def give_section(engine, **keys) -> None:
    engine.ort_zero_section = config.parse(keys)


def test_a_new_argument_of_save_checkpoint_reaches_deepspeed_without_a_section(engine, called):
    state = {"a": 1}
    found = engine.save_checkpoint("first", "folder", new_last=8)
    assert found == ("deepspeed", "first", "folder", None, {}, True, False, 8)
    found = engine.save_checkpoint("first", "folder", "tag", state, False, True, 9)
    assert found == ("deepspeed", "first", "folder", "tag", state, False, True, 9)
    assert not called


@pytest.mark.parametrize("asynchronous", [False, True])
def test_sharded_saving_takes_its_arguments_by_name(engine, called, asynchronous):
    give_section(engine, checkpoint={"async_save": asynchronous})
    state = {"a": 1}
    assert engine.save_checkpoint("first", "folder", "tag", state, False, new_last=8) is True
    assert engine.save_checkpoint(save_dir="other", new_first="first", exclude_frozen_parameters=True) is True
    first = {"client_state": state, "save_latest": False, "exclude_frozen_parameters": False}
    second = {"client_state": {}, "save_latest": True, "exclude_frozen_parameters": True}
    assert called == [
        ((engine, "folder", "tag", asynchronous), first),
        ((engine, "other", None, asynchronous), second),
    ]


def test_load_checkpoint_follows_the_folder_and_a_new_argument_reaches_deepspeed(engine, called, monkeypatch):
    assert engine.load_checkpoint("folder", new_last=8) == ("deepspeed", "folder", None, 8)
    give_section(engine)
    monkeypatch.setattr(loading, "format_of", lambda folder, tag: "ort_zero" if folder == "ours" else None)
    assert engine.load_checkpoint("theirs", "tag", new_last=9) == ("deepspeed", "theirs", "tag", 9)
    assert not called
    assert engine.load_checkpoint("ours", "tag", load_module_strict=False, new_last=9) == ("ours", {})
    wanted = {"strict": False, "load_module_only": False}
    wanted |= {"load_optimizer_states": True, "load_lr_scheduler_states": True}
    assert called == [((engine, "ours", "tag"), wanted)]
    with pytest.raises(CheckpointError, match="custom_load_fn"):
        engine.load_checkpoint("ours", custom_load_fn=print)


@pytest.mark.parametrize(
    ("local", "sharded", "local_ranks", "refused"),
    [(True, True, "2", True), (True, True, "4", False), (True, False, "2", False), (False, True, "2", False)],
)
def test_disks_of_the_hosts_own_are_refused_before_training(engine, monkeypatch, local, sharded, local_ranks, refused):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    table = {
        "checkpoint": {"use_node_local_storage": local},
        "ort_zero": {"backend": "torch", "checkpoint": {"sharded": sharded}},
    }
    monkeypatch.setitem(registry.patch_sets, "gathers", PatchSet("gathers", ()))  # DeepSpeed itself is not there
    error, text = (ConfigError, "one folder that all hosts see") if refused else (ValueError, "DeepSpeed takes over")
    with pytest.raises(error, match=text):
        engine.__init__(None, None, config=table)

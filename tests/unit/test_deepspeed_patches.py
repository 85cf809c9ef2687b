"""What is patched in DeepSpeed, and read of its engines, against other versions of DeepSpeed."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import deepspeed.runtime.zero  # noqa: F401 - the module itself, before another one stands for it
import pytest
import torch

from ort_zero import config
from ort_zero.checkpoint.loads import loading
from ort_zero.checkpoint.saves import saving
from ort_zero.compat import deepspeed as ds_compat
from ort_zero.compat import deepspeed_waits
from ort_zero.compat.deepspeed_state import _flat_layout
from ort_zero.cpu_memory import measures
from ort_zero.errors import CheckpointError, ConfigError
from ort_zero.plugin import engine_patch
from ort_zero.runtimes import registry
from ort_zero.utils.patching import PatchSet

# -- the engine --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saving_takes_its_arguments_by_name_and_new_ones_reach_deepspeed(engine, called, asynchronous):
    state = {"a": 1}
    calls = (
        lambda: engine.save_checkpoint("first", "folder", "tag", state, False, new_last=8),
        lambda: engine.save_checkpoint(save_dir="other", new_first="first", exclude_frozen_parameters=True),
    )
    assert [call() for call in calls] == [
        ("deepspeed", "first", "folder", "tag", state, False, False, 8),
        ("deepspeed", "first", "other", None, {}, True, True, 7),
    ]
    assert not called
    engine.ort_zero_section = config.parse({"checkpoint": {"async_save": asynchronous}})
    assert [call() for call in calls] == [True, True]
    first = {"client_state": state, "save_latest": False, "exclude_frozen_parameters": False}
    second = {"client_state": {}, "save_latest": True, "exclude_frozen_parameters": True}
    assert called == [
        ((engine, "folder", "tag", asynchronous), first),
        ((engine, "other", None, asynchronous), second),
    ]


def test_load_checkpoint_follows_the_folder_and_a_new_argument_reaches_deepspeed(engine, called, monkeypatch):
    assert engine.load_checkpoint("folder", new_last=8) == ("deepspeed", "folder", None, 8)
    engine.ort_zero_section = config.parse({})
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


# -- gathers -----------------------------------------------------------------------------------------------------------


LAST = """
class Init:
    def _allgather_params_coalesced(self, param_list, hierarchy=0, quantize=False):
        launch_handles = [parameter.gather() for parameter in param_list]
        {wait}
"""
OLD = "launch_handles[-1].wait()"
NEW = """for handle in launch_handles:
            handle.wait()"""


class Parameter:
    """A parameter whose gather ends when it is waited for."""

    whole = False

    def gather(self) -> Parameter:
        return self

    def wait(self) -> None:
        self.whole = True


@pytest.fixture
def gather(monkeypatch, tmp_path):
    """Let another source stand for DeepSpeed's module of partitions; return what gathers there."""
    name = deepspeed_waits.TARGET.partition(":")[0]

    def install(wait: str):
        path = tmp_path / "partition_parameters.py"
        path.write_text(LAST.format(wait=wait))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, name, module)
        return module.Init()

    yield install
    registry.restore("gathers")


def test_each_gather_is_waited_for_where_deepspeed_waits_for_the_last(gather):
    init, parameters = gather(OLD), [Parameter() for _ in range(3)]
    init._allgather_params_coalesced(parameters)
    assert [parameter.whole for parameter in parameters] == [False, False, True]
    registry.apply("gathers", deepspeed_waits.patches)
    init._allgather_params_coalesced(parameters, 0, quantize=False)
    assert all(parameter.whole for parameter in parameters)
    assert registry.patch_sets["gathers"].targets() == (deepspeed_waits.TARGET,)
    registry.restore("gathers")
    again = [Parameter() for _ in range(3)]
    init._allgather_params_coalesced(again)
    assert not again[0].whole


@pytest.mark.parametrize("gathers", [True, False], ids=["waits for each", "gathers in another way"])
def test_another_deepspeed_is_left_alone(gather, gathers):
    init = gather(NEW)
    if not gathers:
        del type(init)._allgather_params_coalesced
    registry.apply("gathers", deepspeed_waits.patches)
    assert registry.patch_sets["gathers"].targets() == ()


# -- flat tensors ------------------------------------------------------------------------------------------------------


FIRST, SECOND, THIRD = (torch.nn.Parameter(torch.zeros(size)) for size in (3, 5, 2))


@pytest.mark.parametrize(("optimizer", "starts"), [
    ({"round_robin_bit16_groups": [[SECOND, FIRST, THIRD]], "round_robin_bit16_offsets": [[0, 8, 12]]}, (0, 8, 12)),
    ({"round_robin_bit16_groups": [[SECOND, FIRST, THIRD]]}, (0, 5, 8)),
    ({"bf16_groups": [[SECOND, FIRST, THIRD]]}, (0, 5, 8)),
], ids=["room between parameters", "before 0.19", "BF16_Optimizer"])  # fmt: skip
def test_parameters_lie_where_the_optimizer_has_put_them(optimizer, starts):
    (group,) = _flat_layout(SimpleNamespace(bit16_groups=[[FIRST, SECOND, THIRD]], **optimizer))
    assert [id(parameter) for parameter, _ in group] == [id(SECOND), id(FIRST), id(THIRD)]
    assert tuple(start for _, start in group) == starts

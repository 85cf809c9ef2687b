"""The installed DeepSpeed has the hook code that ort_zero rebinds."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
parameter_offload = pytest.importorskip("deepspeed.runtime.zero.parameter_offload")

from ort_zero.compat import deepspeed_hooks  # noqa: E402
from ort_zero.plugin import lifecycle  # noqa: E402
from ort_zero.plugin.zero3_hooks import patches as hook_patches  # noqa: E402
from ort_zero.plugin.zero3_hooks.patches import with_section  # noqa: E402
from ort_zero.utils.patching import PatchSet  # noqa: E402

Offload = parameter_offload.DeepSpeedZeRoOffload
REGISTER = "_register_deepspeed_module"
PATCHES = hook_patches.PATCHES


@pytest.fixture(scope="module", autouse=True)
def stock_deepspeed():
    """Take off what the entry point applied when DeepSpeed was imported, for the time of this module."""
    enabled = lifecycle.is_enabled()
    lifecycle.disable()
    yield
    if enabled:
        lifecycle.enable()


class Coordinator:
    """Is asked and told nothing that counts."""

    def __getattr__(self, name):
        return lambda *args: False


class Calls(Offload):
    """A real offload without its constructor; the gathering and releasing is written down only."""

    def __init__(self, module):
        self.module = module
        self.coordinator = Coordinator()
        self.param_coordinator = self.coordinator
        self.forward_hooks = []
        self.backward_hooks = []
        self.calls = []
        for each in module.modules():
            each._external_params = {}

    def pre_sub_module_forward_function(self, module):
        parameter_offload.FWD_MODULE_STACK.append(module)
        self.calls.append(("gather", module.ds_id))

    def post_sub_module_forward_function(self, module):
        self.calls.append(("release", module.ds_id))

    def pre_sub_module_backward_function(self, module):
        self.calls.append(("gather for backward", module.ds_id))

    def post_sub_module_backward_function(self, module):
        self.calls.append(("release after backward", module.ds_id))


@pytest.fixture
def patched():
    patches = PatchSet("zero3 hooks", PATCHES)
    patches.apply()
    yield patches
    patches.restore()


@pytest.fixture(autouse=True)
def clean_state(monkeypatch):
    monkeypatch.setattr(parameter_offload, "print_rank_0", lambda *args, **kwargs: None)  # wants a process group
    count = deepspeed_hooks.shared_count(getattr(Offload, REGISTER))
    stack, first = list(parameter_offload.FWD_MODULE_STACK), count[0]
    yield
    parameter_offload.FWD_MODULE_STACK[:] = stack
    count[0] = first


def net():
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(5, 2)))


def test_installed_code_passes_the_probe():
    shape = deepspeed_hooks.probe(getattr(Offload, REGISTER))
    assert shape.codes["_post_forward_module_hook"].co_freevars == ("self",)
    deepspeed_hooks.probe(Offload.setup_zero_stage3_hooks)


def test_a_second_offload_on_the_same_modules_gets_its_own_backward(patched):
    model = net()
    with with_section():
        first = Calls(model)
        first.setup_zero_stage3_hooks()
        first.destroy()
        second = Calls(model)
        second.setup_zero_stage3_hooks()
    model(torch.ones(1, 3, requires_grad=True)).sum().backward()
    assert ("gather for backward", model.ds_id) in second.calls
    assert first.calls == []


def test_a_hooked_module_can_be_deep_copied_without_its_offload(patched):
    with with_section():
        offload = Calls(net())
        offload.unpicklable = (i for i in ())  # as process groups and streams are
        offload.setup_zero_stage3_hooks()
    twin = copy.deepcopy(offload.module)
    assert twin.pre_bwd_fn.module is twin

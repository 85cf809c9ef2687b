"""The installed DeepSpeed has the hook code that ort_zero rebinds."""

from __future__ import annotations

import contextlib
import copy

import pytest

torch = pytest.importorskip("torch")
parameter_offload = pytest.importorskip("deepspeed.runtime.zero.parameter_offload")

from ort_zero.compat import deepspeed_hooks  # noqa: E402
from ort_zero.errors import PatchError  # noqa: E402
from ort_zero.plugin import lifecycle  # noqa: E402
from ort_zero.plugin.zero3_hooks import patches as hook_patches  # noqa: E402
from ort_zero.plugin.zero3_hooks.patches import has_section, with_section  # noqa: E402
from ort_zero.plugin.zero3_hooks.subscriber import BackwardAction  # noqa: E402
from ort_zero.utils.patching import MARKER, PatchSet, resolve  # noqa: E402

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
    """Counts what is asked of it."""

    def __init__(self):
        self.invalid = False
        self.resets = 0

    def is_invalid_trace(self):
        return self.invalid

    def _invalidate_trace(self):
        self.invalid = True

    def reset_step(self):
        self.resets += 1


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


def hooks_on(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def test_installed_code_passes_the_probe():
    shape = deepspeed_hooks.probe(getattr(Offload, REGISTER))
    assert shape.codes["_post_forward_module_hook"].co_freevars == ("self",)
    deepspeed_hooks.probe_setup(Offload.setup_zero_stage3_hooks)


def test_patches_apply_and_restore_the_very_objects():
    before = {patch.target: resolve(patch.target) for patch in PATCHES}
    patches = PatchSet("zero3 hooks", PATCHES)
    patches.apply()
    for patch in PATCHES:
        found = resolve(patch.target)
        assert getattr(found, MARKER) == patch.target
        assert found.__wrapped__ is before[patch.target]
    patches.restore()
    for patch in PATCHES:
        assert resolve(patch.target) is before[patch.target]


def test_a_strangers_patch_is_not_patched_over(monkeypatch):
    monkeypatch.setattr(Offload, "setup_zero_stage3_hooks", lambda self: None)
    patches = PatchSet("zero3 hooks", PATCHES)
    with pytest.raises(PatchError, match="already patched by"):
        patches.apply()
    assert not patches.active


def run(offload, inputs):
    """One forward and backward; what was gathered and released, and the gradients."""
    loss = offload.module(inputs).square().sum()
    loss.backward()
    return list(offload.calls), [p.grad.clone() for p in offload.module.parameters()]


def build(patches, use, leaf=False):
    torch.manual_seed(0)
    deepspeed_hooks.shared_count(getattr(Offload, REGISTER))[0] = 0
    offload = Calls(net())
    if leaf:
        offload.module[1]._z3_leaf = True
    if patches is not None:
        patches.apply()
    try:
        with with_section() if use else contextlib.nullcontext():
            offload.setup_zero_stage3_hooks()
    finally:
        if patches is not None:
            patches.restore()
    return offload


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("use", [True, False])
def test_same_calls_in_same_order_as_deepspeed(use, leaf):
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    theirs = build(None, False, leaf)
    ours = build(PatchSet("zero3 hooks", PATCHES), use, leaf)
    assert has_section(ours) == use
    assert [getattr(m, "ds_id", None) for m in ours.module.modules()] == [
        getattr(m, "ds_id", None) for m in theirs.module.modules()
    ]
    assert hooks_on(ours.module) == hooks_on(theirs.module)
    assert parameter_offload.FWD_MODULE_STACK[-1] is ours.module
    parameter_offload.FWD_MODULE_STACK.pop()
    their_calls, their_grads = run(theirs, inputs)
    parameter_offload.FWD_MODULE_STACK.append(ours.module)
    our_calls, our_grads = run(ours, inputs)
    assert our_calls == their_calls
    assert {name for name, _ in our_calls} == {"gather", "release", "gather for backward", "release after backward"}
    assert all(map(torch.equal, our_grads, their_grads))
    for name in ("applied_pre_backward_ref_cnt", "ds_grads_remaining"):
        assert [getattr(m, name, None) for m in ours.module.modules()] == [
            getattr(m, name, None) for m in theirs.module.modules()
        ]
    if leaf:
        assert all(p.ds_z3_leaf_module is ours.module[1] for p in ours.module[1].parameters())


def test_removal_leaves_nothing_and_registration_comes_back_the_same_way(patched):
    with with_section():
        offload = Calls(net())
        offload.setup_zero_stage3_hooks()
    full = hooks_on(offload.module)
    for handle in (*offload.forward_hooks, *offload.backward_hooks):  # as TRL does around generation
        handle.remove()
    assert hooks_on(offload.module) == 1  # the start-of-forward hook
    assert not any("pre_bwd_fn" in vars(m) or "post_bwd_fn" in vars(m) for m in offload.module.modules())
    offload.coordinator.invalid = False
    getattr(offload, REGISTER)(offload.module)  # outside of mode.use
    assert offload.coordinator.invalid
    assert hooks_on(offload.module) == full
    assert isinstance(offload.module.pre_bwd_fn, BackwardAction)
    offload.destroy()
    assert hooks_on(offload.module) == 0


def test_a_second_offload_on_the_same_modules_gets_its_own_backward(patched):
    model = net()
    with with_section():
        first = Calls(model)
        first.setup_zero_stage3_hooks()
        first.destroy()
        second = Calls(model)
        second.setup_zero_stage3_hooks()
    calls, _ = run(second, torch.ones(1, 3, requires_grad=True))
    assert ("gather for backward", model.ds_id) in calls
    assert first.calls == []


def test_a_hooked_module_can_be_deep_copied_without_its_offload(patched):
    with with_section():
        offload = Calls(net())
        offload.unpicklable = (i for i in ())  # as process groups and streams are
        offload.setup_zero_stage3_hooks()
    twin = copy.deepcopy(offload.module)
    assert twin.pre_bwd_fn.module is twin

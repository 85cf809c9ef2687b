"""Hook code of other eras is refused by name, and nothing is touched."""

from __future__ import annotations

import pytest

from ort_zero.compat import deepspeed_hook_shapes, deepspeed_hooks, versions
from ort_zero.errors import PatchError

KNOWN = """
def _register_deepspeed_module(self, module, count=[0]):
    def _pre_forward_module_hook(module, *args):
        self.pre_sub_module_forward_function(module)
    def _post_forward_module_hook(module, input, output):
        self.post_sub_module_forward_function(module)
    def _bwd_hook_unexpected_inputs_msg(value):
        return f"unexpected {value}"
    def _pre_backward_module_hook(module, inputs, output):
        return _bwd_hook_unexpected_inputs_msg(output)
    def _post_backward_module_hook(module, inputs):
        return _bwd_hook_unexpected_inputs_msg(inputs)
    self.forward_hooks.append(module.register_forward_pre_hook(_pre_forward_module_hook))
    def _run_before_backward_function(sub_module):
        self.pre_sub_module_backward_function(sub_module)
    class PreBackwardFunctionForModule(torch.autograd.Function):
        @staticmethod
        def forward(outputs):
            return outputs.detach()
        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.module = module
            ctx.pre_backward_function = _run_before_backward_function
        @staticmethod
        def backward(ctx, *args):
            ctx.pre_backward_function(ctx.module)
            return args
    def _run_after_backward_function(sub_module):
        self.post_sub_module_backward_function(sub_module)
    class PostBackwardFunctionModule(torch.autograd.Function):
        @staticmethod
        def forward(output):
            return output.detach()
        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.module = module
            ctx.post_backward_function = _run_after_backward_function
        @staticmethod
        def backward(ctx, *args):
            ctx.post_backward_function(ctx.module)
            return args
"""


def define(*changes: tuple[str, str]):
    source = KNOWN
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    namespace: dict = {}
    exec(source, namespace)
    return namespace["_register_deepspeed_module"]


@pytest.fixture(autouse=True)
def other_version(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda distribution: "0.23.4")


def test_the_known_shape_passes():
    shape = deepspeed_hooks.probe(define())
    assert len(shape.codes) == 7
    assert shape.codes["_pre_forward_module_hook"].co_freevars == ("self",)
    assert shape.codes["_pre_backward_module_hook"].co_freevars == ("_bwd_hook_unexpected_inputs_msg",)


def test_classes_of_the_form_without_setup_context_pass():
    header = "        @staticmethod\n        def setup_context(ctx, inputs, output):\n            ctx.module = module\n"
    without = define(
        *(
            (f"{header}            ctx.{side}_backward_function = _run_{when}_backward_function\n", "")
            for side, when in (("pre", "before"), ("post", "after"))
        )
    )
    deepspeed_hooks.probe(without)


@pytest.mark.parametrize(("changes", "symbol"), [
    ([("def _post_forward_module_hook(", "def _end_of_forward_hook(")], "_post_forward_module_hook"),
    ([("class PreBackwardFunctionForModule", "class PreBackward")], "PreBackwardFunctionForModule"),
    ([("self, module, count=[0]", "self, module, count=[0], depth=0")], "depth"),
    ([("count=[0]", "count=0")], "count"),
    ([("_pre_forward_module_hook(module, *args)", "_pre_forward_module_hook(module, args, kwargs)")], "kwargs"),
    ([("post_sub_module_forward_function(module)", "post_sub_module_forward_function(count)")], "count"),
    ([("    self.forward_hooks.append", "    self.gather_plan = 1\n    self.forward_hooks.append")], "gather_plan"),
    ([("    self.forward_hooks", "    def _new_hook(module): pass\n    self.forward_hooks")], "_new_hook"),
    ([("ctx.pre_backward_function(ctx.module)", "ctx.stream_guard(ctx.module)")], "stream_guard"),
    ([("ctx.pre_backward_function(ctx.module)", "ctx.pre_backward_function(count)")], "count"),
    ([("def setup_context", "def prepare_context")], "prepare_context"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_another_shape_is_refused_by_symbol_and_version(changes, symbol):
    with pytest.raises(PatchError) as caught:
        deepspeed_hooks.probe(define(*changes))
    message = str(caught.value)
    assert symbol in message
    assert "0.23.4" in message
    assert deepspeed_hook_shapes.WORKING in message
    assert "\n" not in message


def test_another_setup_and_another_era_are_refused():
    def setup_zero_stage3_hooks(self):
        def _middle_of_forward_hook(module, *args):
            self.get_param_coordinator()

        self.hierarchy = 0
        self.module.register_forward_hook(_middle_of_forward_hook)

    with pytest.raises(PatchError, match="_start_of_forward_hook"):
        deepspeed_hooks.probe(setup_zero_stage3_hooks)
    with pytest.raises(PatchError, match="no Python function"):
        deepspeed_hooks.probe(len)

"""Switching off takes back what a model in ORTModule has patched, each case in a fresh process."""

from __future__ import annotations

import textwrap

from fresh_process import run

WRAPPED = """
import sys
import torch
import ort_zero
from ort_zero import config
from ort_zero.ortmodule.compat import ortmodule
from ort_zero.ortmodule.compat.ortmodule.functions import SYMBOLICS
from ort_zero.ortmodule.compat.torch_onnx import exporter_modules
from ort_zero.ortmodule.wrap import wrap_model
from ort_zero.utils.patching import resolve

def exporter_names():
    names = ("torch.onnx._globals", "torch.onnx.symbolic_opset9", "torch.onnx._internal.jit_utils")
    found = {name: sys.modules.get(name) for name in names}
    attributes = vars(sys.modules["torch.onnx"])
    return found | {f"{name} (attribute)": attributes.get(name) for name in ("_globals", "_type_utils")}

def wrap():
    return wrap_model(torch.nn.Linear(3, 2), config.OrtModuleConfig(), 0)
"""


def test_disable_puts_ortmodule_back_too():
    run(
        WRAPPED
        + textwrap.dedent("""
        exporter_modules.patch_set().apply()
        ortmodule.import_ortmodule()
        from onnxruntime.training.ortmodule import _io, _training_manager
        from onnxruntime.training.utils import torch_profile_utils
        def parts():
            return [_io._extract_schema, *vars(_training_manager.TrainingManager).values(),
                    *vars(torch_profile_utils).values(), *resolve(SYMBOLICS).items()]
        # the ranges are patched as soon as they are imported
        ranges = torch_profile_utils.torch_nvtx_range_push, torch_profile_utils.torch_nvtx_range_pop
        before = [getattr(part, "__wrapped__", part) if part in ranges else part for part in parts()]
        runtime, model = wrap()
        during = parts()
        assert any(a is not b for a, b in zip(before, during))
        model(torch.ones(1, 3)).sum().backward()
        assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 1, "backward": 1}
        ort_zero.disable()
        after = parts()
        assert len(before) == len(after) and all(a == b for a, b in zip(before, after))
        message = refused(lambda: model(torch.ones(1, 3)))
        assert "ort_zero.disable() has taken away the patches" in message, message
        """)
    )


def test_status_shows_every_patch_and_disable_undoes_the_names_of_torchs_exporter():
    run(
        WRAPPED
        + textwrap.dedent("""
        import importlib.util
        import torch.onnx
        before = exporter_names()
        moved = importlib.util.find_spec("torch.onnx._internal.torchscript_exporter") is not None
        assert (before["torch.onnx._internal.jit_utils"] is None) == moved
        for _ in range(2):
            runtime, model = wrap()
            patched = ort_zero.status()["patches"]
            assert ("sys:modules[torch.onnx._internal.jit_utils]" in patched) == moved
            assert ("torch.onnx:_globals" in patched) == moved
            assert f"{SYMBOLICS}[::embedding]" in patched and f"{SYMBOLICS}[::diff]" in patched
            nvtx = "onnxruntime.training.utils.torch_profile_utils:torch_nvtx_range_push"
            assert torch.cuda.is_available() or nvtx in patched
            place = "torch.onnx._internal.torchscript_exporter._globals" if moved else "torch.onnx._globals"
            assert exporter_names()["torch.onnx._globals"].__name__ == place
            model(torch.ones(1, 3)).sum().backward()
            assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 1, "backward": 1}
            ort_zero.disable()
            after = exporter_names()
            assert before.keys() == after.keys() and all(before[name] is after[name] for name in before), after
            assert not ort_zero.status()["patches"]
        """)
    )


def test_disable_changes_nothing_where_one_target_was_patched_after_us():
    run(
        WRAPPED
        + textwrap.dedent("""
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine
        wrap()
        applied = ort_zero.status()["patches"]
        ours = DeepSpeedEngine.destroy
        DeepSpeedEngine.destroy = lambda self: None
        message = refused(ort_zero.disable)
        assert "DeepSpeedEngine.destroy" in message, message
        assert ort_zero.status()["patches"] == applied and ort_zero.status()["enabled"]
        DeepSpeedEngine.destroy = ours
        ort_zero.disable()
        assert not ort_zero.status()["patches"]
        """)
    )

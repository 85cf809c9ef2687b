"""Switching on and off against the installed torch and DeepSpeed, each case in a fresh process."""

from __future__ import annotations

import json
import textwrap

import pytest
from fresh_process import run
from rank_processes.ranks import free_port

from ort_zero.compat import versions

pytestmark = pytest.mark.skipif(versions.installed("deepspeed") is None, reason="deepspeed is not installed")
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
NO_ENTRY_POINT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


@pytest.mark.parametrize("code", [
    "import torch, deepspeed",
    "import deepspeed, torch",
    "import ort_zero, deepspeed",
    "import ort_zero; ort_zero.enable(); import torch, deepspeed",
])  # fmt: skip
def test_entry_point_arms_in_every_order_and_disable_restores(code):
    run(f"""
        {code}
        import ort_zero
        assert ort_zero.status()["enabled"] and patched(), ort_zero.status()
        ort_zero.enable()
        assert ort_zero.status()["patches"]
        ort_zero.disable()
        assert not ort_zero.status()["enabled"] and not patched()
        ort_zero.disable()
    """)


def test_enable_by_hand_and_back_leaves_the_very_objects_and_what_is_refused_changes_nothing():
    run(
        """
        import functools, torch, deepspeed, ort_zero
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from ort_zero.runtimes import registry
        from ort_zero.compat import versions
        before = snapshot()
        assert not patched()
        for _ in range(2):
            ort_zero.enable()
            once = snapshot()
            ort_zero.enable()
            assert same(snapshot(), once) and patched()
            ort_zero.disable()
            assert same(snapshot(), before)

        def enabling_is_refused(*parts):
            now = snapshot()
            message = refused(ort_zero.enable)
            assert all(part in message for part in parts) and "\\n" not in message, message
            assert same(snapshot(), now) and "deepspeed" not in registry.patch_sets
            # older transformers import onnxruntime
            assert ort_zero.status()["enabled"] == ("ORTModule" in registry.patch_sets)
            assert "onnxruntime.training" in sys.modules or not ort_zero.status()["enabled"]

        # another library's patch
        for owner, name in ((DeepSpeedEngine, "__init__"), (DeepSpeedZeRoOffload, "setup_zero_stage3_hooks")):
            original = getattr(owner, name)
            @functools.wraps(original)
            def strange(self, *args, **kwargs):
                return original(self, *args, **kwargs)
            setattr(owner, name, strange)
            enabling_is_refused("PatchError", name)
            setattr(owner, name, original)
        # an unsupported version
        true = versions.metadata.version
        versions.metadata.version = lambda name: "0.13.5" if name == "deepspeed" else true(name)
        enabling_is_refused("UnsupportedVersionError", "deepspeed 0.13.5", "pip install")
        versions.metadata.version = true
        # an engine that exists
        engine = object.__new__(DeepSpeedEngine)
        torch.nn.Module.__init__(engine)
        enabling_is_refused("PatchError", "before")
        engine.__class__ = torch.nn.Module  # its own destructor wants what the constructor sets
        """,
        **NO_ENTRY_POINT,
    )


@pytest.mark.parametrize(("section", "options", "is_said"), [({}, "cpu=True", True), (None, "cpu=True", False)])
def test_a_section_that_accelerate_leaves_out_is_said_at_the_end(tmp_path, section, options, is_said):
    pytest.importorskip("accelerate")
    file = tmp_path / "ds.json"
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    file.write_text(json.dumps(config if section is None else {**config, "ort_zero": section}))
    said = run(
        f"from accelerate import Accelerator; Accelerator({options})",
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file),
    )
    assert (f'nothing has read the section "ort_zero" of {file}' in said) == is_said


def test_import_torch_alone_imports_no_deepspeed():
    run("import torch; assert 'ort_zero.plugin' in sys.modules and 'deepspeed' not in sys.modules")


def test_disable_variable_switches_everything_off():
    run(
        """
        import torch, deepspeed, ort_zero
        ort_zero.enable()
        status = ort_zero.status()
        assert not status["enabled"] and not patched() and "ORT_ZERO_DISABLE" in status["reason"]
        """,
        ORT_ZERO_DISABLE="1",
    )


_OLD = """
from importlib import metadata
true = metadata.version
metadata.version = lambda name: "0.13.5" if name == "deepspeed" else true(name)
"""


def test_entry_point_with_an_unsupported_version_warns_once_and_imports_go_on():
    output = run(
        _OLD
        + textwrap.dedent("""
        import torch, deepspeed, ort_zero
        status = ort_zero.status()
        assert "0.13.5" in status["reason"]
        from ort_zero.runtimes import registry
        of_ort = {"ORTModule", "onnxruntime", "torch.onnx", "profiling ranges", "statistics"}
        assert registry.patch_sets.keys() - of_ort == {"refused_section"}
        assert "onnxruntime.training" in sys.modules or not status["enabled"]

        def engine(config):
            net = torch.nn.Linear(2, 2)
            return deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)[0]
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        for section in ({}, {"ort_zero": {"enabled": False}}):
            assert type(engine({**config, **section}).module) is torch.nn.Linear
        message = refused(lambda: engine({**config, "ort_zero": {}}))
        assert "0.13.5" in message and "section" in message and "\\n" not in message, message
        ort_zero.disable()
        assert not patched()
        """),
        **ONE_RANK,
        MASTER_PORT=str(free_port()),
    )
    assert output.count("not enabled, DeepSpeed is left as it is") == 1


def test_entry_point_never_breaks_import_torch():
    run("""
        import ort_zero.env
        works = ort_zero.env.disabled
        def broken():
            raise RuntimeError("broken on purpose")
        ort_zero.env.disabled = broken
        import torch
        assert torch.ones(2).sum() == 2
        ort_zero.env.disabled = works
        assert "broken on purpose" in ort_zero.status()["reason"] and not ort_zero.status()["enabled"]
    """)

"""ORTModule as its own users write it, without DeepSpeed: imports, options, policies, copies, DDP, ort_zero.wrap."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes.ranks import free_port
from torch import nn

import ort_zero
from ort_zero.errors import ConfigError

NO_ENTRY_POINT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
TRAIN = """
def train(wrap):
    import torch, ort_zero
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    wrapped = wrap(model)
    wrapped(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None
    report = ort_zero.status()["models"][-1]
    assert report["backend"] == "onnxruntime" and ort_zero.status()["enabled"], ort_zero.status()
    assert report["graphs"]["training"]["runs"] == {"forward": 1, "backward": 1}, report
"""


@pytest.fixture(scope="module")
def ortmodule():
    """The package of ORTModule, imported after ort_zero was enabled."""
    ort_zero.enable()
    import onnxruntime.training.ortmodule as package

    yield package
    ort_zero.disable()


class Net(nn.Module):
    """Two layers and a switch that Python code reads."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 2)
        self.doubles = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two features."""
        return self.second(torch.relu(self.first(x))) * (2 if self.doubles else 1)


class Unsupported(nn.Module):
    """Returns a type that holds tensors and cannot be taken apart."""

    class Result:
        """Holds a tensor."""

        def __init__(self, value: torch.Tensor):
            self.__slots_value = [value]

        @property
        def value(self) -> torch.Tensor:
            """The tensor."""
            return self.__slots_value[0]

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> set:
        """Return a set of tensors."""
        return {self.layer(x)}


def report() -> dict:
    """Return the report of the newest model."""
    return ort_zero.status()["models"][-1]


@pytest.mark.parametrize(
    ("code", "env"),
    [
        ("from onnxruntime.training.ortmodule import ORTModule; import torch", {}),
        ("import torch; from onnxruntime.training import ORTModule", {}),
        ("import ort_zero; ort_zero.enable(); import onnxruntime.training.ortmodule as m; ORTModule = m.ORTModule",
         NO_ENTRY_POINT),
        ("import torch, onnxruntime.training\n"
         "try: import onnxruntime.training.ortmodule\n"
         "except ImportError: pass\n"  # an older torch still has the names
         "import ort_zero; ort_zero.enable()\n"
         "from onnxruntime.training.ortmodule import ORTModule\n"
         "ort_zero.disable(); ort_zero.enable()", NO_ENTRY_POINT),
        ("import sys\n"
         "class NoDeepSpeed:\n"
         "    @staticmethod\n"
         "    def find_spec(name, path=None, target=None):\n"
         "        if name.partition('.')[0] == 'deepspeed': raise ModuleNotFoundError(name)\n"
         "sys.meta_path.insert(0, NoDeepSpeed)\n"
         "import ort_zero; from importlib import metadata; version = metadata.version\n"
         "def missing(name):\n"
         "    if name == 'deepspeed': raise metadata.PackageNotFoundError(name)\n"
         "    return version(name)\n"
         "metadata.version = missing\n"
         "ort_zero.enable()\n"
         "from onnxruntime.training.ortmodule import ORTModule", NO_ENTRY_POINT),
    ],
    ids=["ort first", "torch first", "enable", "after a failed import", "no deepspeed"],
)  # fmt: skip
def test_the_bare_import_trains_in_onnx_runtime(code, env):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("ORT_ZERO_", "TORCH_DEVICE_BACKEND"))}
    script = f"{textwrap.dedent(code)}\n{TRAIN}\ntrain(ORTModule)\n"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=800, env={**clean, **env}
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_losses_and_changes_of_the_module_are_pytorchs(ortmodule):
    torch.manual_seed(0)
    reference = Net()
    wrapped = ortmodule.ORTModule(copy.deepcopy(reference))
    losses: list[list[float]] = [[], []]
    for losses_of, model in zip(losses, (reference, wrapped), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if step == 2:
                model.doubles = True
            x = torch.arange(8 * (step % 2 + 1)).reshape(-1, 4) / 10
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses_of.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert report()["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4} and not report()["fallbacks"]
    with torch.no_grad():
        x = torch.randn(3, 4)
        assert torch.allclose(wrapped.eval()(x), reference.eval()(x), atol=1e-6)


def test_debug_options_write_graphs_by_upstreams_names(ortmodule, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    options = ortmodule.DebugOptions(save_onnx=True, onnx_prefix="net", log_level=ortmodule.LogLevel.ERROR)
    wrapped = ortmodule.ORTModule(Net(), options)
    wrapped(torch.ones(2, 4)).sum().backward()
    wrapped.eval()(torch.ones(2, 4))
    for mode in ("training", "inference"):
        assert {f"net_{name}_{mode}.onnx" for name in ("torch_exported", "optimized", "execution_model")} <= {
            path.name for path in tmp_path.iterdir()
        }
    assert (tmp_path / "net_optimized_pre_grad_training.onnx").exists()


def test_users_read_what_runs_through_upstreams_names(ortmodule):
    wrapped = ortmodule.ORTModule(Net())
    transitions = wrapped._torch_module._execution_manager(True)._graph_transition_manager
    assert transitions._exported_model_info is None
    x = torch.ones(2, 4, requires_grad=True)
    wrapped(x).sum().backward()
    exported = transitions._exported_model_info.exported_model
    assert [node.op_type for node in exported.graph.node].count("Gemm") == 2
    assert transitions._model_info_for_export.onnx_graph_input_names_require_grad == ["x"]
    trained = transitions._post_export_processed_model_info.onnx_graph_input_names_require_grad
    assert trained[0] == "x" and trained[1].endswith("first.weight")
    manager = wrapped._torch_module._execution_manager(True)
    assert manager._onnx_models.optimized_model.graph.node and str(manager._device) == "cpu"
    assert transitions._original_model_has_changed is False
    wrapped.doubles = True
    assert transitions._original_model_has_changed is True
    wrapped(x)
    assert transitions._exported_model_info.exported_model != exported
    assert transitions._original_model_has_changed is False


def test_each_graph_has_a_builder_to_read_of_its_own(ortmodule):
    wrapped = ortmodule.ORTModule(Net())
    manager = wrapped._torch_module._execution_manager(True)
    wrapped(torch.ones(2, 4)).sum().backward()
    first = manager._graph_builder
    assert len(first.get_graph_info().user_output_names) == 1
    assert first.get_gradient_model() == manager._onnx_models.optimized_model.SerializeToString()
    wrapped(torch.ones(2, 4, requires_grad=True)).sum().backward()
    second = manager._graph_builder
    assert second != first
    wrapped(torch.ones(2, 4)).sum().backward()
    assert manager._graph_builder is first


def test_the_name_of_a_device_needs_no_cuda(ortmodule):
    from onnxruntime.training.ortmodule import _utils

    wrapped = ortmodule.ORTModule(Net())
    device = wrapped._torch_module._execution_manager(True)._device
    assert _utils.get_device_str(device) == _utils.get_device_str("cpu") == "cpu:0"
    assert _utils.get_device_str("cuda:1") == "cuda:1" and _utils.get_device_str(1) == "cuda:1"


def test_a_function_with_an_export_of_its_own_may_take_plain_arguments(ortmodule):
    class Scaling(torch.autograd.Function):
        """Multiplies a tensor with a function of a number."""

        @staticmethod
        def forward(ctx: Any, name: str, x: torch.Tensor, number: float, function: Any) -> torch.Tensor:
            """Return the product."""
            ctx.factor = function(number) if name == "scaled" else 0.0
            return x * ctx.factor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
            """Return the gradient of the tensor."""
            return None, gradient * ctx.factor, None, None

        @staticmethod
        def infer_shape(node: Any, shapes: list, types: list) -> tuple[list, list]:
            """Return the shape and type of the tensor."""
            return shapes, types

    class Scaled(nn.Linear):
        """Scales its result."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return two features."""
            return Scaling.apply("scaled", super().forward(x), 4.0, math.sqrt)

    wrapped = ortmodule.ORTModule(Scaled(4, 2))
    x = torch.ones(2, 4)
    y = wrapped(x)
    y.sum().backward()
    assert not report()["fallbacks"] and report()["graphs"]["training"]["python_ops"] == 1
    assert torch.equal(wrapped.bias.grad, torch.full((2,), 4.0))
    assert torch.allclose(y, 2 * nn.functional.linear(x, wrapped.weight, wrapped.bias))


def test_arguments_of_the_exporter_and_the_opset_are_the_users(ortmodule, monkeypatch):
    monkeypatch.setenv("ORTMODULE_ONNX_OPSET_VERSION", "15")
    wrapped = ortmodule.ORTModule(Net())
    transitions = wrapped._torch_module._execution_manager(True)._graph_transition_manager
    transitions._export_extra_kwargs = {"custom_opsets": None}
    wrapped(torch.ones(2, 4))
    opsets = {one.domain: one.version for one in transitions._exported_model_info.exported_model.opset_import}
    assert opsets[""] == 15
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    wrapped = ortmodule.ORTModule(Net())
    wrapped._torch_module._execution_manager(True)._graph_transition_manager._export_extra_kwargs = {"verbose": True}
    with pytest.raises(Exception, match="arguments cannot be specified: '{'verbose'}'"):
        wrapped(torch.ones(2, 4))


@pytest.mark.parametrize("retry", [False, True])
def test_the_fallback_policy_is_the_users(ortmodule, monkeypatch, retry):
    from onnxruntime.training.ortmodule import _fallback

    x = torch.ones(2, 4)
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    wrapped = ortmodule.ORTModule(Unsupported())
    with pytest.raises(_fallback.ORTModuleFallbackException, match="cannot be taken apart|return"):
        wrapped(x)
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_FORCE_TORCH_FORWARD")
    monkeypatch.setenv("ORTMODULE_FALLBACK_RETRY", str(retry))
    wrapped = ortmodule.ORTModule(Unsupported())
    for _ in range(2):
        (result,) = wrapped(x)
        assert torch.equal(result, wrapped.layer(x))
        assert report()["fallbacks"] == int(not retry)


def test_labels_with_padding_print_nothing(ortmodule, capsys):
    class Classifier(nn.Linear):
        """Has its loss as a submodule."""

        def __init__(self) -> None:
            super().__init__(4, 3)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """Return the loss."""
            return self.loss(super().forward(x), labels)

    wrapped = ortmodule.ORTModule(Classifier())
    x, labels = torch.randn(5, 4), torch.tensor([-100, 1, -100, -100, 2])
    for _ in range(2):
        assert torch.allclose(wrapped(x, labels), wrapped.module(x, labels), atol=1e-6)
    assert "density" not in capsys.readouterr().out
    assert report()["graphs"]["training"]["python_ops"] == 0


def test_whoever_asks_for_the_extensions_finds_them(ortmodule):
    from onnxruntime.training.ortmodule.torch_cpp_extensions import is_installed

    ortmodule.ORTModule(Net())
    assert is_installed(ortmodule.ORTMODULE_TORCH_CPP_DIR)


def test_error_in_the_users_own_code_is_the_users(ortmodule):
    class Failing(nn.Linear):
        """Raises."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Raise."""
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ortmodule.ORTModule(Failing(4, 2))(torch.ones(1, 4))


def test_the_export_cache_is_where_the_variable_says(ortmodule, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("ORTMODULE_CACHE_DIR", str(tmp_path))
    for expected in (None, "hit"):
        ortmodule.ORTModule(Net())(torch.ones(2, 4)).sum().backward()
        cache = report()["transitions"][-1]["cache"]
        assert expected is None or cache.startswith(expected), cache
    assert any(tmp_path.iterdir())


def test_the_recomputation_is_what_the_variable_says(ortmodule, monkeypatch):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))
    ortmodule.ORTModule(model)(torch.ones(2, 8)).sum().backward()
    assert report()["memory"] and report()["memory"][-1]["mode"] == "all", report()["memory"]


def test_what_ortmodule_says_goes_to_the_handlers_of_the_program(ortmodule, caplog, capsys):
    class Named(nn.Linear):
        """Takes a text."""

        def forward(self, x: torch.Tensor, sign: str) -> torch.Tensor:
            """Return two features, or their negatives."""
            return super().forward(x) * (-1 if sign == "minus" else 1)

    wrapped = ortmodule.ORTModule(Named(4, 2), ortmodule.DebugOptions(log_level=ortmodule.LogLevel.INFO))
    x = torch.ones(2, 4)
    for sign in ("plus", "minus"):
        assert torch.allclose(wrapped(x, sign), wrapped.module(x, sign))
    said = [record.getMessage() for record in caplog.records if record.name == "orttraining"]
    assert sum("input of type <class 'str'> is treated as a constant" in text for text in said) == 2
    assert "is treated as a constant" not in capsys.readouterr().err


def test_a_call_in_eval_mode_is_read_where_upstream_would_have_made_it(ortmodule):
    wrapped = ortmodule.ORTModule(Net())
    managers = {training: wrapped._torch_module._execution_manager(training) for training in (True, False)}
    wrapped(torch.ones(2, 4)).sum().backward()
    trained = managers[True]._onnx_models.optimized_model
    wrapped.eval()
    wrapped(torch.ones(2, 4, 4)).sum().backward()  # with gradients, which upstream does not have in this mode
    for training, rank in ((True, 2), (False, 3)):
        exported = managers[training]._graph_transition_manager._exported_model_info.exported_model
        assert len(exported.graph.input[0].type.tensor_type.shape.dim) == rank
    assert managers[False]._onnx_models.optimized_model is not trained


def early_checkpoint(function: Any, *args: Any) -> Any:
    """Call torch's activation checkpointing as a program does that imported it before ORTModule."""
    from ort_zero.ortmodule.compat.torch_checkpoint import _torch_checkpoint

    return _torch_checkpoint()(function, *args, use_reentrant=False)


def late_checkpoint(function: Any, *args: Any) -> Any:
    """Call torch's activation checkpointing by its name, in whose place ORTModule puts a function."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


@pytest.mark.parametrize("checkpoint", [early_checkpoint, late_checkpoint])
@pytest.mark.parametrize(("level", "allow"), [("0", False), ("1", False), ("1", True)])
def test_layers_are_computed_again_in_place_of_checkpointing(ortmodule, monkeypatch, caplog, checkpoint, level, allow):
    class Checkpointed(nn.Module):
        """Checkpoints its layers."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return eight features."""
            for layer in self.layers:
                x = checkpoint(layer, x)
            return x

    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", level)
    monkeypatch.setenv("ORTMODULE_ALLOW_AUTOGRAD_CHECKPOINT", str(int(allow)))
    model = Checkpointed()
    wrapped = ortmodule.ORTModule(copy.deepcopy(model), ortmodule.DebugOptions(log_level=ortmodule.LogLevel.INFO))
    x = torch.randn(2, 8)
    y, expected = wrapped(x), model(x)
    y.sum().backward()
    expected.sum().backward()
    assert torch.allclose(y, expected, atol=1e-6)
    for one, other in zip(wrapped.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)
    said = [record for record in caplog.records if "Layer-wise memory optimization is enabled" in record.getMessage()]
    assert len(said) == (level == "1" and not allow) and report()["fallbacks"] == allow
    modes = [decision["mode"] for decision in report()["memory"]]
    assert modes == ([] if allow else ["all"] if level == "1" else ["checkpointed blocks"])


def test_a_symbolic_that_the_user_registers_is_used(ortmodule):
    from torch.onnx import register_custom_op_symbolic, unregister_custom_op_symbolic

    called = []

    def symbolic(g, self):
        called.append("hardswish")
        return g.op("HardSwish", self)

    register_custom_op_symbolic("aten::hardswish", symbolic, 14)
    try:
        x = torch.randn(2, 4)
        model = nn.Sequential(nn.Linear(4, 4), nn.Hardswish())
        assert torch.allclose(ortmodule.ORTModule(model)(x), model(x), atol=1e-6)
    finally:
        unregister_custom_op_symbolic("aten::hardswish", 14)
    assert called


def test_code_that_asks_whether_it_is_exported_is_told(ortmodule):
    seen = []

    class Asking(nn.Linear):
        """Notes what the export context says."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Return two features."""
            seen.append(ortmodule.ORTMODULE_ONNX_EXPORT_CONTEXT[0])
            return super().forward(x)

    ortmodule.ORTModule(Asking(4, 2))(torch.ones(1, 4))
    assert True in seen and not ortmodule.ORTMODULE_ONNX_EXPORT_CONTEXT[0]


def test_copies_and_pickles_are_ortmodules_that_run(ortmodule):
    wrapped = ortmodule.ORTModule(Net())
    x = torch.ones(2, 4)
    expected = wrapped(x)
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        other = copied(wrapped)
        assert isinstance(other, ortmodule.ORTModule) and isinstance(other, Net)
        assert other.first.weight is not wrapped.first.weight
        assert torch.equal(other(x), expected) and report()["backend"] == "onnxruntime"


def test_a_class_below_ortmodule_keeps_its_own_methods(ortmodule):
    class Extended(ortmodule.ORTModule):
        """An ORTModule with more."""

        def __init__(self, module: nn.Module):
            super().__init__(module)
            vars(self)["label"] = "extended"

        def state_dict(self, *args: object, **kwargs: object) -> dict:
            """Return the state under other names."""
            return {f"extended.{name}": value for name, value in super().state_dict(*args, **kwargs).items()}

    wrapped = Extended(Net())
    wrapped(torch.ones(2, 4)).sum().backward()
    assert wrapped.label == "extended" and isinstance(wrapped, Extended) and isinstance(wrapped, Net)
    assert list(wrapped.state_dict())[0] == "extended.first.weight"


@pytest.mark.parametrize("order", ["ddp outside", "ddp inside", "wrap"])
def test_distributed_data_parallel_in_either_order(ortmodule, order, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        reference = Net()
        ddp = nn.parallel.DistributedDataParallel
        model: nn.Module
        if order == "ddp outside":
            model = ddp(ortmodule.ORTModule(copy.deepcopy(reference)))
        elif order == "ddp inside":
            model = ortmodule.ORTModule(ddp(copy.deepcopy(reference)))
        else:
            model = ort_zero.wrap(ddp(copy.deepcopy(reference)))
        x = torch.ones(2, 4)
        for _ in range(2):
            loss = model(x).sum()
            loss.backward()
        reference(x).sum().backward()
        gradients = [p.grad / 2 for p in model.parameters()]
        for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
            assert torch.allclose(gradient, parameter.grad, atol=1e-6)
        assert report()["graphs"]["training"]["runs"] == {"forward": 2, "backward": 2}
    finally:
        torch.distributed.destroy_process_group()


def test_wrap_takes_the_parts_of_the_section(tmp_path: Path, ortmodule):
    model = ort_zero.wrap(
        Net(),
        ortmodule={"exclude": ["second"], "log_level": "ERROR"},
        statistics={"enabled": True, "output_dir": str(tmp_path / "run")},
    )
    assert isinstance(model, ortmodule.ORTModule)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert list(report()["in_torch"]) == ["second"] and report()["graphs"]["training"]["python_ops"]
    model.ort_zero_statistics.remove()
    assert any((tmp_path / "run").rglob("*")), "statistics were collected"
    with pytest.raises(ConfigError, match="ort_zero.ortmodul: unknown key"):
        ort_zero.wrap(Net(), ortmodul={})
    with pytest.raises(ConfigError, match="leave .checkpoint. out"):
        ort_zero.wrap(Net(), checkpoint={})
    plain = Net()
    assert ort_zero.wrap(plain, enabled=False) is plain
    assert ort_zero.wrap(plain, ortmodule={"enabled": False}) is plain


def test_an_exporter_that_the_program_wraps_is_still_the_one_of_torchscript(ortmodule, monkeypatch):
    export, given = torch.onnx.export, []

    def wrapped(*args, **kwargs):
        given.append(kwargs.get("dynamo"))
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", wrapped)
    assert ortmodule.ORTModule(torch.nn.Linear(4, 2))(torch.ones(3, 4)).shape == (3, 2)
    assert given == [False]

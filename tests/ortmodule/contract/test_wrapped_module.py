"""A module seen through the ORTModule around it: methods, classes, names, copies and pickles are PyTorch's."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from older_versions import older
from torch import nn

from ort_zero import config, status
from ort_zero.ortmodule.wrap import wrap_model


class Base(nn.Module):
    """A base class with methods that call each other."""

    def describe(self, *, loud: bool = False) -> str:
        """Return a text."""
        return f"{type(self).__name__}{'!' if loud else ''} of {len(list(self.parameters()))} parameters"

    @classmethod
    def build(cls, width: int) -> Base:
        """Return an instance of the class."""
        return cls(width)


class Net(Base):
    """A module with methods of every kind."""

    scale = 2

    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("offset", torch.ones(width))
        self.__secret = "mangled"
        self.registered = functools.partial(self.describe, loud=True)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        """Return what the layer makes of `x`."""
        return self.layer(x) * (2 if twice else 1) + self.offset

    def describe(self, *, loud: bool = False) -> str:
        """Return the text of the base class and more."""
        return super().describe(loud=loud) + " " + self.__secret

    @staticmethod
    def doubled(x: float) -> float:
        """Return twice `x`."""
        return 2 * x

    @property
    def width(self) -> int:
        """Number of features."""
        return self.layer.in_features

    @property
    def unavailable(self) -> int:
        """Raise what no lookup of attributes expects."""
        raise RuntimeError("not yet")

    def me(self) -> Net:
        """Return the module itself."""
        return self

    def to(self, *args: object, **kwargs: object) -> Net:
        """Count the calls of an override of torch's own method."""
        self.moved = getattr(self, "moved", 0) + 1
        return super().to(*args, **kwargs)

    def train(self, mode: bool = True) -> Net:
        """Keep the layer in eval mode."""
        super().train(mode)
        self.layer.train(False)
        return self


class Layers(nn.Sequential):
    """A container with a length."""


@pytest.fixture
def wrapped() -> nn.Module:
    """An ORTModule that has run a step."""
    model = wrap_model(Net(), config.OrtModuleConfig(log_level="ERROR"), 0)[1]
    model(torch.ones(2, 4)).sum().backward()
    return model


def test_methods_are_the_users_own(wrapped):
    module = wrapped.module
    assert wrapped.describe() == module.describe() == "Net of 2 parameters mangled"
    assert wrapped.describe.__self__ is module and wrapped.me() is module
    assert wrapped.registered() == "Net! of 2 parameters mangled"
    assert type(wrapped.build(3)) is Net and wrapped.build.__self__ is Net
    assert (wrapped.doubled(4), wrapped.scale, wrapped.width) == (8, 2, 4)
    with pytest.raises(RuntimeError, match="not yet"):
        wrapped.unavailable  # noqa: B018
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'nothing'"):
        wrapped.nothing  # noqa: B018
    assert not hasattr(wrapped, "__len__") and {"describe", "width", "layer"} <= set(dir(wrapped))
    assert list(inspect.signature(wrapped.forward).parameters) == ["x", "twice"]


def test_it_is_an_instance_of_the_users_class_and_an_ortmodule(wrapped):
    from onnxruntime.training.ortmodule import ORTModule

    assert isinstance(wrapped, Net) and isinstance(wrapped, Base) and isinstance(wrapped, nn.Module)
    assert isinstance(wrapped, ORTModule) and issubclass(type(wrapped), ORTModule)
    assert not isinstance(wrapped, nn.Sequential) and wrapped.__class__ is Net
    assert repr(wrapped) == repr(wrapped.module)


def test_overrides_of_torchs_own_methods_are_called_and_lead_back_to_the_wrapper(wrapped):
    before = wrapped.module.__dict__.get("moved", 0)
    assert wrapped.to("cpu") is wrapped and wrapped.moved == before + 1
    assert wrapped.train() is wrapped and wrapped.layer.training is False and wrapped.module.training
    assert wrapped.eval() is wrapped and not wrapped.module.training and wrapped.training is False


def test_names_are_those_of_pytorch(wrapped):
    module = wrapped.module
    for table in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        assert [name for name, _ in getattr(wrapped, table)()] == [name for name, _ in getattr(module, table)()]
    assert list(wrapped.state_dict()) == list(module.state_dict()) == ["offset", "layer.weight", "layer.bias"]
    assert list(wrapped.state_dict(prefix="a.")) == ["a.offset", "a.layer.weight", "a.layer.bias"]
    assert [name for name, _ in wrapped.named_parameters("a")] == ["a.layer.weight", "a.layer.bias"]
    state = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    assert str(wrapped.load_state_dict(state, strict=True, assign=True)) == "<All keys matched successfully>"
    assert wrapped.get_submodule("layer") is module.layer and not module.layer.weight.any()


def test_containers_have_a_length_items_and_an_order():
    layers = Layers(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    runtime, wrapped = wrap_model(layers, config.OrtModuleConfig(log_level="ERROR"), 0)
    assert len(wrapped) == 3 and wrapped[1] is layers[1] and list(wrapped) == list(layers)
    assert [type(layer) for layer in wrapped[:2]] == [nn.Linear, nn.ReLU]
    x = torch.randn(2, 4)
    assert torch.allclose(wrapped(x), layers(x), atol=1e-6) and runtime.status()["graphs"]["training"]["runs"]


def test_a_copy_runs_in_onnx_runtime_for_itself(wrapped):
    before = len(status()["models"])
    averaged = copy.deepcopy(wrapped)
    assert len(status()["models"]) == before  # a copy that is never called has no runtime
    assert isinstance(averaged, Net) and averaged.module is not wrapped.module
    averaged.requires_grad_(False).eval()
    for slow, fast in zip(averaged.parameters(), wrapped.parameters(), strict=True):
        with torch.no_grad():
            fast.add_(1.0)
            slow.lerp_(fast, 0.5)
    x = torch.randn(2, 4)
    assert torch.allclose(averaged(x), averaged.module(x), atol=1e-6)
    assert not torch.allclose(averaged(x), wrapped(x))
    report = status()["models"][-1]
    assert report["backend"] == "onnxruntime" and sum(g["runs"]["forward"] for g in report["graphs"].values()) == 2
    again = copy.copy(averaged)
    assert again is not averaged and again.layer is averaged.layer and torch.equal(again(x), averaged(x))


def test_torchs_averaged_model_takes_it(wrapped):
    averaged = torch.optim.swa_utils.AveragedModel(wrapped)
    averaged.update_parameters(wrapped)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert torch.allclose(averaged(x), wrapped(x), atol=1e-6)


def test_a_pickle_holds_the_users_module(wrapped):
    loaded = pickle.loads(pickle.dumps(wrapped))
    assert type(loaded) is Net
    x = torch.randn(2, 4)
    assert torch.allclose(loaded(x), wrapped(x), atol=1e-6)


def test_a_name_that_the_wrapper_has_too_is_reported(caplog):
    from onnxruntime.training.ortmodule import _utils

    class Clashing(nn.Linear):
        """Has an attribute and a method that an ORTModule has."""

        def state_dict(self, *args: object, **kwargs: object) -> dict:
            """Return the state."""
            return super().state_dict(*args, **kwargs)

    module = Clashing(2, 2)
    _, wrapped = wrap_model(module, config.OrtModuleConfig(log_level="ERROR"), 0)
    module._torch_module = True
    with caplog.at_level(logging.WARNING):
        _utils.check_for_name_collisions_and_bind_methods_to_ortmodule(wrapped, module, logging.getLogger("collisions"))
    assert [record.message.split()[0] for record in caplog.records] == ["_torch_module", "state_dict"]


def test_torch_compile_of_a_wrapper_leaves_onnxruntime_in_place(caplog):
    """As ``torch_compile=True`` of the Trainer does, through DeepSpeed's engine."""
    runtime, wrapped = wrap_model(Net(), config.OrtModuleConfig(), stage=0)
    with caplog.at_level(logging.INFO, "ort_zero"):
        wrapped.compile(backend="inductor")
    assert "torch.compile has no effect on Net" in caplog.text
    wrapped(torch.randn(2, 4)).sum().backward()
    assert runtime.status()["graphs"]["training"]["runs"]["backward"] == 1


def test_functional_call_with_other_parameters():
    torch.manual_seed(0)
    module = Net()
    reference = copy.deepcopy(module)
    _, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    x = torch.randn(3, 4)
    found = []
    for model in (wrapped, reference):
        others = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters(remove_duplicate=False)}
        others |= {name: 3 * buffer for name, buffer in model.named_buffers(remove_duplicate=False)}
        result = torch.func.functional_call(model, others, (x,), {"twice": True})
        result.sum().backward()
        found.append([result, others["layer.weight"].grad, model(x)])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.skipif(
    older("torch", "2.13") or older("deepspeed", "0.19"),
    reason="torch or DeepSpeed of this version imports the compiler",
)
def test_a_first_call_does_not_import_the_compiler():
    """It takes seconds, and DeepSpeed and torch do without it until a program compiles something."""
    code = (
        "import sys, torch; from ort_zero import config; from ort_zero.ortmodule.wrap import wrap_model\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Dropout(0.5))\n"
        "_, wrapped = wrap_model(model, config.OrtModuleConfig(), stage=0)\n"
        "wrapped(torch.randn(2, 4)).sum().backward()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

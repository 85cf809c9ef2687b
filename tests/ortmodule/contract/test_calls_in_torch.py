"""What PyTorch runs although ONNX Runtime was given the model is told: other methods, submodules, the bare module."""

from __future__ import annotations

import copy
import gc
import logging

import pytest
import torch
from tiny_models import gpt2
from torch import nn

import ort_zero
from ort_zero import config
from ort_zero.ortmodule.runtime import calls_in_torch
from ort_zero.ortmodule.wrap import wrap_model


class Towers(nn.Module):
    """Encodes two kinds of inputs, and compares them."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)

    def forward(self, text, image):
        return (self.encode_text(text) * self._encode("image", image)).sum()

    def encode_text(self, x):
        """Return the features of a text."""
        return self._encode("text", x)

    def encode_image(self, x):
        """Return the features of an image, by a helper that another method uses too."""
        return self._encode("image", x)

    def _encode(self, name, x):
        return getattr(self, name)(x)

    def failing(self, x):
        """Raise from inside of a module."""
        return self.text(x[:, :2])

    def size(self):
        """Return a number without running anything."""
        return sum(p.numel() for p in self.parameters())


def train(model, x):
    """Call a submodule; its name is that of a method, and its first argument a module."""
    return model.text(x)


def wrap(module: nn.Module, **section):
    return wrap_model(module, config.OrtModuleConfig(**section), stage=0)


@pytest.fixture
def lines(caplog):
    """Lines of our logger about what PyTorch runs."""
    logger, records = logging.getLogger("ort_zero"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    caplog.set_level(logging.INFO, "ort_zero")
    yield lambda: [record.getMessage() for record in records if "is run by PyTorch" in record.getMessage()]
    logger.removeHandler(handler)


def test_each_method_is_told_once_and_counted(lines):
    runtime, wrapped = wrap(Towers())
    x = torch.randn(2, 4)
    assert runtime.status()["backend"] == "not called yet" and runtime.status()["called_in_torch"] == {}
    wrapped.size(), wrapped.state_dict()
    wrapped(x, x).backward()
    assert runtime.status()["backend"] == "onnxruntime" and lines() == []
    for _ in range(3):
        wrapped.encode_text(x)
    wrapped.encode_image(x)
    wrapped(x, x).backward()
    train(wrapped.module, x)
    wrapped.module(x, x)
    with pytest.raises(RuntimeError):
        wrapped.failing(x)
    wrapped.image(x)  # seen although the call before it failed
    expected = {"encode_text": 3, "encode_image": 1, "text.forward": 1, "forward": 1, "failing": 1, "image.forward": 1}
    assert runtime.status()["called_in_torch"] == expected
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 2, "backward": 2}
    told = [line.partition(": ")[2].partition(" is run")[0] for line in lines()]
    assert told == ["the module itself" if name == "forward" else name for name in expected]


def test_generation_and_what_runs_in_torch_before_anything_else(lines):
    runtime, wrapped = wrap(gpt2(words=64, hidden=16, heads=2).eval())
    out = wrapped.generate(torch.ones(1, 3, dtype=torch.int64), max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 5)
    assert runtime.status()["called_in_torch"] == {"generate": 2} and runtime.status()["backend"] == "torch"
    assert len(lines()) == 1 and lines()[0].startswith("GPT2LMHeadModel: generate is run by PyTorch")


def test_what_belongs_to_a_graph_or_to_another_model_is_not_told(lines):
    torch.manual_seed(0)
    module = Towers()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap(module, exclude=["text"])
    x = torch.randn(2, 4)
    for _ in range(2):
        wrapped(x, x).backward()
        reference(x, x).backward()
    assert runtime.status()["called_in_torch"] == {} and "text" in runtime.status()["in_torch"]
    averaged = copy.deepcopy(wrapped)
    averaged(x, x)
    assert lines() == []
    # a layer that is put in later is the model's too
    module.image = nn.Linear(4, 4)
    wrapped(x, x)
    module.image(x)
    assert runtime.status()["called_in_torch"] == {"image.forward": 1}


def test_torch_compile_is_left_alone():
    runtime, wrapped = wrap(Towers())
    compiled = torch.compile(nn.Linear(4, 4), backend="eager", fullgraph=True)
    assert compiled(torch.randn(2, 4)).shape == (2, 4)
    assert runtime.status()["called_in_torch"] == {}


def test_models_that_are_gone_are_not_in_the_status():
    class Gone(Towers):
        pass

    def there() -> int:
        return sum(model["module"] == "Gone" for model in ort_zero.status()["models"])

    gc.collect()
    runtime, wrapped = wrap(Gone())
    x = torch.randn(2, 4)
    wrapped(x, x).backward()
    assert there() == 1
    del runtime, wrapped
    gc.collect()
    assert there() == 0
    assert ort_zero.status()["models"] or not calls_in_torch._hooks

"""What is moved to PyTorch after a failure: where it happened, the smallest part first, never the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ort_zero.errors import ExportError
from ort_zero.ortmodule.compat.frames import Frame, users_line
from ort_zero.ortmodule.runtime.export.excluded_modules import ExcludedModules
from ort_zero.ortmodule.runtime.failure_place import locate, node_in
from ort_zero.ortmodule.runtime.operators.fallback_policy import FallbackPolicy
from ort_zero.ortmodule.runtime.smaller_parts import MOST_ATTEMPTS, SmallerParts

SITE = "/venv/lib/python3.11/site-packages"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(2, 2)
        self.act = nn.GELU()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 2)


def parts() -> tuple[SmallerParts, ExcludedModules, FallbackPolicy]:
    net = Net()
    excluded, policy = ExcludedModules(net), FallbackPolicy(True, lambda name, function: None)
    return SmallerParts(net, excluded, policy), excluded, policy


def failed(node: str) -> RuntimeError:
    return RuntimeError(f"Non-zero status code returned while running Add node. Name:'{node}' Status Message: no")


PATHS = {name for name, _ in Net().named_modules()}


@pytest.mark.parametrize(
    ("node", "path", "operator"),
    [
        ("/_original_module/layers.0/attention/query/MatMul_3", "layers.0.attention.query", "MatMul"),
        ("/_original_module/layers.1/attention/ATen_Grad/ATen_3", "layers.1.attention", "ATen"),
        ("/_original_module/Concat/ConcatReplacement/", "", "Concat"),
        ("/_original_module/ScatterND", "", "ScatterND"),
        ("another node", "", ""),
    ],
)
def test_a_nodes_name_tells_module_and_operator(node, path, operator):
    assert node_in(str(failed(node)), PATHS) == (path, operator)


def test_the_operator_goes_first_then_its_module_then_the_one_around_and_never_the_model():
    smaller, excluded, policy = parts()
    error = failed("/_original_module/layers.0/attention/Add_1")
    assert smaller.move(error) == "Add in layers.0.attention stays in PyTorch"
    assert not excluded.reasons
    assert policy.avoid("layers.0.attention", "Add", "again") is False
    assert smaller.move(error) == "layers.0.attention stays in PyTorch"
    assert set(excluded.reasons) == {"layers.0.attention", "layers.1.attention"}  # others of its class
    assert smaller.move(error) == "layers.0 stays in PyTorch"
    assert {"layers.0", "layers.1"} <= set(excluded.reasons)
    assert smaller.move(error) is None


def test_of_a_class_of_torch_one_module_goes_first():
    smaller, excluded, _ = parts()
    for path in ("layers.0.attention.query", "head"):
        assert excluded.add(excluded.module_at(path), "it failed")
        assert (path in excluded.reasons) and ("layers.1.attention.query" in excluded.reasons) == (path == "head")


def test_an_error_of_ours_and_one_without_a_place_move_nothing():
    smaller, excluded, _ = parts()
    ours = RuntimeError("/_original_module/layers.0/attention/Add_1")
    ours.__cause__ = ExportError("which says what it means")
    assert smaller.move(ours) is None
    assert smaller.move(RuntimeError("no place")) is None
    assert not excluded.reasons


def test_attempts_are_bounded():
    smaller, _, _ = parts()
    moved = [smaller.move(failed(f"/_original_module/Op{chr(97 + i % 26)}{chr(97 + i // 26)}_1")) for i in range(60)]
    assert sum(why is not None for why in moved) == MOST_ATTEMPTS


def test_an_exceptions_frames_tell_the_innermost_module_and_the_users_line():
    class Failing(nn.Module):
        def forward(self, x):
            return torch.ones(2, 3) @ x

    net = nn.Sequential(nn.Linear(2, 2), Failing())
    with pytest.raises(RuntimeError) as raised:
        net(torch.ones(2, 2))
    place = locate(raised.value, net)
    assert place.path == "1"
    assert place.line.startswith(f"{__file__}:") and place.line.endswith(" in forward")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/home/me/model.py", f"{SITE}/transformers/models/gpt2/modeling_gpt2.py", f"{SITE}/torch/nn/f.py"], 0),
        ([f"{SITE}/transformers/models/gpt2/modeling_gpt2.py", f"{SITE}/typing_extensions.py"], 0),
        ([f"{SITE}/torch/nn/f.py"], None),
    ],
)
def test_the_users_own_code_wins_over_that_of_libraries(files, expected):
    frames = [Frame(file, 7, "forward") for file in files]
    assert users_line(frames) == ("" if expected is None else f"{files[expected]}:7 in forward")


def test_a_decorator_of_a_library_is_not_the_line():
    library = f"{SITE}/transformers/models/gpt2/modeling_gpt2.py"
    frames = [Frame(library, 7, "forward"), Frame(f"{SITE}/transformers/utils/generic.py", 9, "wrapper")]
    assert users_line(frames) == f"{library}:7 in forward"

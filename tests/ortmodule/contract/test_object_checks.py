"""The extension that compares what modules hold gives the same as its counterpart in Python."""

from __future__ import annotations

import collections

import pytest
import torch

from ort_zero.ortmodule.compat import extensions
from ort_zero.ortmodule.compat.object_checks import InPython, checks

ONE, OTHER = [1.5], [1.5]


class Looker(dict):
    """A dict whose look-ups are its own."""

    def __getitem__(self, key):
        return ONE


class Fails:
    def __getitem__(self, key):
        raise AttributeError(key)

    def __len__(self):
        raise RuntimeError("no length")


@pytest.fixture(params=["extension", "python"])
def functions(request):
    return extensions.load_modules()["object_checks"] if request.param == "extension" else InPython


def test_the_extension_is_used_once_it_is_loaded():
    extension = extensions.load_modules()["object_checks"]
    assert checks() is extension


@pytest.mark.parametrize(
    "container, key, value, same",
    [
        ({"a": ONE}, "a", ONE, True),
        ({"a": OTHER}, "a", ONE, False),  # equal, and another object
        ({"a": 1}, "a", True, False),
        ({"b": ONE}, "a", ONE, False),
        (collections.OrderedDict(a=ONE), "a", ONE, True),
        (collections.defaultdict(lambda: ONE), "a", ONE, False),  # a check adds nothing
        (Looker(a=OTHER), "a", ONE, True),
        ([OTHER, ONE], 1, ONE, True),
        ([OTHER, ONE], 0, ONE, False),
    ],
)
def test_objects_are_compared_by_identity(functions, container, key, value, same):
    assert functions.are_same([{"x": 1}, container], ["x", key], [1, value]) is same


@pytest.mark.parametrize("container, key, error", [([1], 3, IndexError), (Fails(), "a", AttributeError)])
def test_what_a_container_raises_is_raised(functions, container, key, error):
    with pytest.raises(error):
        functions.are_same([container], [key], [None])


def test_lists_of_different_lengths_are_an_error(functions):
    with pytest.raises(ValueError):
        functions.are_same([{"a": ONE}], ["a"], [])


def test_lengths(functions):
    objects = [{}, [1, 2], collections.OrderedDict(a=1), vars(Fails)]
    lengths = [len(one) for one in objects]
    assert functions.have_lengths(objects, lengths)
    objects[1].append(3)
    assert not functions.have_lengths(objects, lengths)
    assert not functions.have_lengths(objects, [*lengths, 0]) and not functions.have_lengths(objects, [])
    with pytest.raises(RuntimeError, match="no length"):
        functions.have_lengths([Fails()], [0])


def test_types(functions):
    layer = torch.nn.Linear(1, 1)
    assert functions.have_types([layer, {}], [torch.nn.Linear, dict])
    layer.__class__ = type("Special", (torch.nn.Linear,), {})
    assert not functions.have_types([layer, {}], [torch.nn.Linear, dict])
    assert not functions.have_types([layer], [])


def test_requires_grad(functions):
    tensors = [torch.nn.Parameter(torch.ones(1)), torch.ones(2), torch.ones(1, requires_grad=True)]
    assert functions.requires_grad(tensors) == b"\x01\x00\x01"
    tensors[0].requires_grad_(False)
    assert functions.requires_grad(tensors) == b"\x00\x00\x01" and functions.requires_grad([]) == b""


def test_scalar_types(functions):
    tensors = [
        torch.ones(1),
        torch.nn.Parameter(torch.ones(1)),
        torch.nn.UninitializedParameter(),
        torch.ones(1).half(),
    ]
    before = functions.scalar_types(tensors)
    assert before[0] == before[1] == before[2] != before[3] and functions.scalar_types(tensors) == before
    tensors[1].data = tensors[1].data.bfloat16()
    after = functions.scalar_types(tensors)
    assert after[1] not in (before[1], before[3]) and after[0] == before[0]


def test_what_is_no_tensor_is_an_error():
    extension = extensions.load_modules()["object_checks"]
    with pytest.raises(TypeError, match="a tensor is needed, not int"):
        extension.requires_grad([1])
    with pytest.raises(TypeError, match="a list is needed, not tuple"):
        extension.requires_grad(())
    with pytest.raises(TypeError, match="3 lists, not 1"):
        extension.are_same([])

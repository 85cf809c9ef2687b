"""Dynamo's names of modules become those of ``named_modules``."""

from __future__ import annotations

import pytest
from torch.fx import Graph

from ort_zero.compat.torch_graphs import is_below, module_path


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("L['self']", ""),
        ("L['args'][0]", ""),
        ("L['self']._modules['attn'].proj", "attn.proj"),
        ("L['args'][0]._modules['attn'].proj", "attn.proj"),
        ("L['args'][0].attn.proj", "attn.proj"),
        ("L['self'][0]", "0"),
        ("L['self'].layers[2].up", "layers.2.up"),
    ],
)
def test_a_path_is_as_named_modules_has_it(name, path):
    node = Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"outer": ("L['self']", None), "inner": (name, None)}
    assert module_path(node) == path
    assert is_below(node, [path]) and not is_below(node, ["other"])

"""Indices and labels from the end, behind the end, or of another number: results, gradients, errors are PyTorch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

MASK = torch.tensor([[True, False, True], [False, True, True], [True, True, False], [False, False, True]])


class Places(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(5, 5), function

    def forward(self, x, i, j):
        return self.function(self.layer(x), i, j)


def outcome(model, x, i, j, gradients):
    """Return the result and the gradients, or the error."""
    model.zero_grad()
    try:
        with torch.set_grad_enabled(gradients):
            result = model(x, i, j)
        if gradients:
            result.square().sum().backward()
    except (RuntimeError, IndexError) as error:
        return type(error), str(error).splitlines()[0]
    return [result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compare(function, places, gradients=True):
    module = Places(function)
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1))
    for i, j in places:
        i, j = torch.tensor(i), torch.tensor(j)
        wanted = outcome(reference, x, i, j, gradients)
        found = outcome(wrapped, x, i, j, gradients)
        if isinstance(wanted, tuple):
            assert found == wanted
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    return runtime.status()


FROM_THE_END = [([0, 1], [2, 0]), ([2, 1], [0, 1]), ([-1, 0], [-2, -1]), ([1, 2, 0], [0, -1, 1]), ([1], [2])]
BEHIND_THE_END = [([0, 1], [0, 5]), ([-5, 0], [0, 0]), ([0, 1], [-6, 0]), ([0, 2], [1, 1])]
INDICES = {
    "the first axes": lambda y, i, j: y[i, :, j] * y[i, j.abs() % 3, j][:, None],
    "adjacent axes": lambda y, i, j: y.permute(1, 0, 2)[:, i, j],
    "broadcast": lambda y, i, j: y[i[:, None], 0, j],
    "the last of each row": lambda y, i, j: y[torch.arange(4), :, (y[:, 0] > 9).sum(1) - 1] * i[0],
    "one number": lambda y, i, j: y[i[0], :, j[0]],
}


@pytest.mark.parametrize("name", INDICES)
def test_several_indices(name):
    status = compare(INDICES[name], FROM_THE_END + BEHIND_THE_END)
    assert not status["in_torch"] and status["graphs"]["training"]["runs"]["forward"] >= 5


@pytest.mark.parametrize(
    "function",
    [
        lambda y, i, j: y[MASK, [0, 1, 2, 3, 4, -1, -2]] * i[0],
        lambda y, i, j: y[MASK[:, 0], 0, j[:1]] * i[0],
        lambda y, i, j: y.permute(2, 0, 1)[:, MASK] * i[0],
    ],
    ids=["mask of two axes", "mask of one axis", "behind a slice"],
)
def test_masks_beside_indices_and_slices(function):
    assert "aten::index" in compare(function, FROM_THE_END)["in_torch"]


REFUSED = {
    "gather": lambda y, i, j: y[:, 0].gather(1, i[:, None]),
    "index_select": lambda y, i, j: y.index_select(2, i),
    "scatter": lambda y, i, j: y[:, 0].scatter(1, i[:, None], 2.0),
    "one_hot": lambda y, i, j: F.one_hot(i, 5) * y[0, 0],
    "one_hot of rows": lambda y, i, j: F.one_hot(i.expand(3, 2), 5) * y[:3, :2],
    "weights": lambda y, i, j: F.cross_entropy(y[0, :2], i[:2], torch.arange(5.0)),
    "each row": lambda y, i, j: F.cross_entropy(y[0, :2], i[:2], reduction="none"),
    "mean": lambda y, i, j: F.cross_entropy(y[0, :2], i[:2]),
    "segments": lambda y, i, j: F.cross_entropy(y[:1].transpose(1, 2)[..., :2], i[None, :2], reduction="sum"),
    "nll_loss": lambda y, i, j: F.nll_loss(y[0, :2].log_softmax(-1), i[:2]),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_places_and_labels_below_0_and_behind_the_end(name, gradients):
    # 70000 lies outside of all memory of the logits
    places = [([0, 1], [0]), ([-1, 2], [0]), ([1, 5], [0]), ([70000, 1], [0]), ([-70000, 1], [0]), ([4, 3], [0])]
    status = compare(REFUSED[name], places, gradients)
    assert status["graphs"]["training" if gradients else "inference"]["exports"] == 1


def test_labels_that_do_not_count():
    compare(lambda y, i, j: F.cross_entropy(y[0, :2], i, torch.ones(5)), [([0, -100], [0]), ([-100, 4], [0])])

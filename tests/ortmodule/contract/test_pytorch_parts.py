"""What cannot be in the graph becomes the smallest PyTorch part that works: results, gradients, and the status.

Each case is a function that runs once in a submodule and once in the forward of the model itself, between two layers.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, rnn

from ort_zero import config
from ort_zero.compat import versions
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model

WIDTH = 6
SUBMODULE = ("middle",)
"""What the status names where all of a submodule runs in PyTorch."""


@dataclasses.dataclass(frozen=True)
class Case:
    function: Callable[..., torch.Tensor]
    parts: tuple[str, ...] = ()
    """What the status names; the part of a path below a submodule."""
    build: Callable[[nn.Module], Any] = lambda module: None
    refused: str | None = None
    """What is said where the model's own forward does it; None if that works."""


class Middle(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(WIDTH))
        case.build(self)
        self.function = case.function

    def forward(self, t, x):
        return self.function(t, x, self)


class InSubmodule(nn.Module):
    """The case in a submodule."""

    def __init__(self, case: Case):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = Middle(case)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.last(self.middle(self.first(x), x)).pow(2).mean()


class InModel(Middle):
    """The case in the forward of the model."""

    def __init__(self, case: Case):
        super().__init__(case)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.last(super().forward(self.first(x), x)).pow(2).mean()


CASES: dict[str, Case] = {}


def case(*parts: str, build: Callable[[nn.Module], Any] = lambda module: None, refused: str | None = None) -> Callable:
    """Add a function of ``t`` (what a layer returns), ``x`` (the model's argument) and its module."""

    def add(function: Callable) -> Callable:
        CASES[function.__name__] = Case(function, parts, build, refused)
        return function

    return add


# -- assignments -------------------------------------------------------------------------------------------------------

SETITEM = "ort_zero::setitem"


def assigning(name: str, index: Callable[[torch.Tensor], Any], value: Callable, *parts: str) -> None:
    def function(t, x, net):
        t = t * 1
        t[index(x)] = value(t, x, net)
        return t

    CASES[name] = Case(function, parts)


def _vector(t, x, net):
    return net.vector


assigning("a vector to a mask", lambda x: x[..., 0] > 0, _vector, SETITEM)
assigning("a constant vector to a mask", lambda x: x[..., 0] > 0, lambda t, x, net: torch.ones(WIDTH), SETITEM)
assigning("a vector to a mask of rows", lambda x: x[:, 0, 0] > 0, _vector, SETITEM)
assigning("a number to a mask", lambda x: x > 0, lambda t, x, net: 0.5)
assigning("a number to a mask of rows", lambda x: x[:, 0, 0] > 0, lambda t, x, net: 0.5)
assigning("a tensor of one number to a mask of rows", lambda x: x[..., 0] > 0, lambda t, x, net: torch.tensor(2.0))
assigning("a parameter to a mask", lambda x: x > 0, lambda t, x, net: net.vector[0], SETITEM)
assigning("values of a mask to a mask", lambda x: x > 0, lambda t, x, net: (t * 2)[x > 0], SETITEM)
assigning("a slice and a mask", lambda x: (slice(None), x[0, :, 0] > 0), _vector, SETITEM)
assigning("a mask and a slice", lambda x: (x[..., 0] > 0, slice(1, 3)), lambda t, x, net: net.vector[1:3], SETITEM)
assigning("a mask and a number", lambda x: (x[:, 0, 0] > 0, 2), _vector, SETITEM)
assigning("the places of a mask", lambda x: (x[..., 0] > 0).nonzero(as_tuple=True), _vector, SETITEM)
assigning("rows by topk", lambda x: (slice(None), x[0, :, 0].topk(2).indices), _vector, SETITEM)
assigning("a list", lambda x: (slice(None), [0, 2]), _vector, SETITEM)
assigning("two index tensors", lambda x: (torch.arange(x.shape[0]), x[..., 0].argmax(1)), _vector, SETITEM)
assigning("an ellipsis", lambda x: (..., slice(1, 3), slice(None)), _vector)
assigning("an ellipsis and a number", lambda x: (..., 2), lambda t, x, net: net.vector[0])
assigning("a slice", lambda x: (slice(None), slice(1, 3)), _vector)


@case(SETITEM)
def adds_to_places(t, x, net):
    t = t * 1
    t[:, torch.tensor([0, 2])] += net.vector
    return t


@case("aten::index_put")
def accumulates_at_equal_places(t, x, net):
    return t.index_put((torch.tensor([0, 0, 0]), torch.tensor([0, 2, 2])), net.vector, accumulate=True)


@case("aten::index_put")
def puts_a_number_at_a_mask_of_rows(t, x, net):
    return t.index_put((x[:, 0, 0] > 0,), torch.tensor(0.5))


@case("aten::index_put")
def puts_at_places_of_three_axes(t, x, net):
    places = torch.tensor([0, 0]), torch.tensor([0, 2]), torch.tensor([1, 3])
    return t.index_put(places, net.vector[:2])


@case("aten::masked_scatter")
def scatters_to_a_mask(t, x, net):
    return t.masked_scatter(x[..., :1] > 0, x + net.vector)


# -- changes in place --------------------------------------------------------------------------------------------------


@case(*SUBMODULE, refused="changes a view of a tensor in place")
def changes_a_flat_view(t, x, net):
    t = t * 1
    t.view(-1)[:3].zero_()
    return t


@case(*SUBMODULE, refused="changes a view of a tensor in place")
def changes_a_transposed_view(t, x, net):
    t = t * 1
    t.transpose(1, 2).select(1, 0).add_(1)
    return t


@case(SETITEM)
def assigns_to_parts_of_slices(t, x, net):
    t = t.exp() * 1
    t[:, 1:][x[:, 1:] > 0] = 0.5
    t[0][2:, 1] = x[0, 2:, 0]
    t[:, 1:4][:, torch.tensor([0, 2])] = net.vector
    return t


@case(*SUBMODULE, refused="changes a view of a tensor in place")
def changes_a_slice_of_a_slice(t, x, net):
    t = t * 1
    t[:, :, :3][:, 1:].mul_(2)
    return t


@case(SETITEM)
def assigns_to_a_mask_of_a_slice(t, x, net):
    t = t * 1
    t[:, :, :3][x[..., 0] > 0] = net.vector[:3]
    return t


@case(SETITEM)
def assigns_to_the_result_of_a_layer(t, x, net):
    t = torch.nn.functional.linear(t, torch.eye(WIDTH) + net.vector[:, None], net.vector)
    t = torch.nn.functional.dropout(t, 0.0, training=True)  # a layer's result may be a view, and this is the same one
    t[x[..., 0] > 0] = net.vector
    return t


@case(*SUBMODULE, refused="uses a view of a tensor that was changed in place")
def uses_a_view_of_the_result_of_a_layer(t, x, net):
    t = torch.nn.functional.linear(t, torch.eye(WIDTH) + net.vector[:, None], net.vector)
    row = t[:, 0]
    t[x[..., 0] > 0] = net.vector
    return t + row[:, None]


@case(*SUBMODULE, refused="uses a view of a tensor that was changed in place")
def uses_a_view_after_a_change(t, x, net):
    t = t * 1
    row = t[:, 0]
    t.mul_(2)
    return t + row[:, None]


@case(*SUBMODULE, refused="puts other data into a tensor")
def puts_data_into_a_tensor(t, x, net):
    y = torch.zeros_like(x)
    y.data = x * 2
    return t + y


@case()
def changes_a_slice(t, x, net):
    t = t * 1
    t[:, 0].mul_(2)
    t[:, 1].masked_fill_(x[:, 1] > 0, 0.5)
    return t


def _with_state(module):
    module.register_buffer("average", torch.zeros(WIDTH))
    module.register_buffer("count", torch.zeros(()))


@case(build=_with_state)
def keeps_a_moving_average(t, x, net):
    with torch.no_grad():
        net.average.mul_(0.9).add_(t.detach().mean((0, 1)), alpha=0.1)
    net.count += 1
    return t + net.average + net.count


@case(build=_with_state)
def puts_another_buffer(t, x, net):
    net.average = 0.9 * net.average + 0.1 * t.detach().mean((0, 1))
    return t + net.average


@case(SETITEM, "aten::index_put", build=_with_state)
def fills_a_buffer(t, x, net):
    net.average[0] = x.mean()
    net.average[x[0, 0] > 0] = x[0, 0, 0]
    return t + net.average


@case(build=_with_state)
def copies_into_a_buffer(t, x, net):
    net.average.copy_(x.mean((0, 1)))
    return t + net.average


@case(*SUBMODULE, build=_with_state, refused="changes a view of a tensor in place")
def changes_the_data_of_a_buffer(t, x, net):
    net.average.data.mul_(0.9).add_(1)
    return t + net.average


@case()
def changes_an_argument_twice(t, x, net):
    y = x.clone()
    y[:, 0].mul_(2)
    y[:, 1].add_(1)
    y += t.detach()
    return t + y


# -- hooks and gradients -----------------------------------------------------------------------------------------------


@case(*SUBMODULE, refused="puts a hook on the gradient of a tensor")
def halves_a_gradient_by_a_hook(t, x, net):
    t = t * 1
    if t.requires_grad:
        t.register_hook(lambda gradient: gradient * 0.5)
    return t


def _hooked(module):
    module.layer = nn.Linear(WIDTH, WIDTH)
    module.layer.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))


@case("layer", build=_hooked)
def halves_a_gradient_by_a_hook_of_a_module(t, x, net):
    return net.layer(t)


def _with_layer(module):
    module.layer = nn.Linear(WIDTH, WIDTH)


@case(*SUBMODULE, build=_with_layer, refused="computes gradients inside its forward")
def takes_the_gradient_of_a_weight(t, x, net):
    (gradient,) = torch.autograd.grad(net.layer(t).pow(2).sum(), [net.layer.weight], create_graph=True)
    return t + gradient.mean()


@case(*SUBMODULE, refused="saved tensor hooks")
def takes_a_gradient_by_torch_func(t, x, net):
    return t + torch.func.grad(lambda y: y.pow(3).sum())(t)


_torch_2_4 = not hasattr(torch.ops.aten, "_safe_softmax")


@(case(*SUBMODULE, refused="saved tensor hooks") if _torch_2_4 else case("aten::_softmax"))
def maps_a_function(t, x, net):
    return torch.func.vmap(lambda row: (row * 2).softmax(-1))(t)


# -- compiled code -----------------------------------------------------------------------------------------------------


@torch.jit.script
def _in_a_loop(x, n: int):
    for _ in range(n):
        x = torch.tanh(x + 1.0)
    return x


@torch.jit.script
def _in_a_branch(x):
    if bool(x.mean() > 0.0):
        return x * 2
    else:
        return x


@case("_in_a_loop()", "_in_a_branch()")
def calls_torchscript_functions(t, x, net):
    return _in_a_branch(_in_a_loop(t, 3))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if bool(x.sum() > 0):
            return self.layer(x)
        return self.layer(x) * 2


@case("script", "script.layer", build=lambda module: setattr(module, "script", torch.jit.script(Branching())))
def calls_a_torchscript_module(t, x, net):
    return net.script(t)


@case(build=lambda module: setattr(module, "compiled", torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager")))
def calls_a_compiled_module(t, x, net):
    return net.compiled(t)


@torch.library.custom_op(
    "ort_zero_tests::scaled",
    mutates_args=(),
    schema="(Tensor x, float factor) -> Tensor[]",  # torch 2.4 wants it
)
def _scaled(x: torch.Tensor, factor: float) -> list[torch.Tensor]:
    return [x * factor, x + factor]


_scaled.register_autograd(lambda ctx, gradients: (gradients[0] * 2 + gradients[1], None))


@case("ort_zero_tests::scaled")
def calls_an_operator_of_the_user(t, x, net):
    product, total = _scaled(t, 2.0)
    return product + total


# -- kinds of tensors --------------------------------------------------------------------------------------------------

COMPLEX = ("aten::fft_rfft", "aten::mul", "aten::fft_irfft", "ort_zero::complex_number")


@case(*COMPLEX)
def multiplies_a_spectrum(t, x, net):
    return torch.fft.irfft(torch.fft.rfft(t) * (1 + 0.5j), n=WIDTH)


@case(*SUBMODULE, "aten::to_sparse", "aten::_sparse_mm", refused="sparse tensor")
def multiplies_a_sparse_matrix(t, x, net):
    return (
        torch.sparse.mm(torch.eye(5).to_sparse(), t.transpose(0, 1).reshape(5, -1)).view(5, -1, WIDTH).transpose(0, 1)
    )


@case(*SUBMODULE, "aten::_nested_tensor_from_tensor_list", "aten::nested_to_padded_tensor", refused="")
def pads_a_nested_tensor(t, x, net):
    return t + torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([t[0], t[0][:2]]), 0.0).mean()


@case(build=lambda module: setattr(module, "embedding", nn.Embedding(10, WIDTH, sparse=True)))
def embeds_with_sparse_gradients(t, x, net):
    return t + net.embedding((x[..., 0].abs() * 5).long().clamp(max=9))


@case("aten::_unique2")
def numbers_unique_values(t, x, net):
    values, places = torch.unique((x[..., 0] * 2).long(), return_inverse=True)
    return t + values[places].unsqueeze(-1)


@case("aten::linalg_inv", "aten::linalg_slogdet")
def inverts_a_matrix(t, x, net):
    square = t.transpose(1, 2) @ t + 3 * torch.eye(WIDTH)
    return t @ torch.linalg.inv(square) + torch.linalg.slogdet(square).logabsdet.mean()


@case("aten::fake_quantize_per_tensor_affine")
def rounds_to_quantized_values(t, x, net):
    return torch.fake_quantize_per_tensor_affine(t, 0.1, 0, -128, 127)


@case("aten::einsum")
def sums_with_repeated_axes(t, x, net):
    return torch.einsum("bij,bkj->bik", t, t) @ t + torch.einsum("bii->b", t[:, :, :5])[:, None, None]


# -- values and sizes that Python reads --------------------------------------------------------------------------------


@case()
def sorts_in_numpy(t, x, net):
    return t + torch.from_numpy(x.detach().numpy().cumsum(-1))


@case("aten::unbind")
def loops_over_the_batch(t, x, net):
    return torch.stack([row * value for row, value in zip(t, x[:, 0, 0].tolist(), strict=True)])


# -- weights -----------------------------------------------------------------------------------------------------------


def _tied(module):
    module.one, module.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    module.other.weight = module.one.weight


@case(build=_tied)
def shares_a_weight(t, x, net):
    return net.other(net.one(t).tanh())


@case(build=lambda module: setattr(module, "layer", parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))))
def normalises_a_weight(t, x, net):
    return net.layer(t)


def _with_norms(module):
    module.rms = nn.RMSNorm(WIDTH).requires_grad_(False)
    module.norm, module.groups = nn.LayerNorm(WIDTH).requires_grad_(False), nn.GroupNorm(2, WIDTH)
    module.groups.weight.requires_grad_(False)


@case(build=_with_norms)
def shares_a_frozen_norm(t, x, net):
    return net.norm(t) + net.norm(net.norm(t).exp())


@case(build=_with_norms)
def shares_a_frozen_norm_of_roots(t, x, net):
    def norm(y):
        return net.rms.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))

    return norm(norm(t).exp())


@case(build=_with_norms)
def groups_with_frozen_weights(t, x, net):
    return net.groups(t.transpose(1, 2)).transpose(1, 2)


@case(build=_with_layer)
def parametrizes_a_weight_while_it_runs(t, x, net):
    parametrize.register_parametrization(net.layer, "weight", _Scaled(net.vector))
    try:
        with parametrize.cached():
            return net.layer(t)
    finally:
        parametrize.remove_parametrizations(net.layer, "weight", leave_parametrized=False)


class _Scaled(nn.Module):
    def __init__(self, factors: torch.Tensor):
        super().__init__()
        self.factors = factors

    def forward(self, weight):
        return weight * self.factors


@case()
def looks_for_infinite_weights(t, x, net):
    if net.training and net.vector.isinf().any():
        raise ValueError("infinite")
    return t * net.vector


def run_steps(
    case: Case, model: type[nn.Module], *more: Callable[[int, int], Any], split: Any = "auto"
) -> dict[str, Any]:
    """Train a model in PyTorch and its twin in ORT, compare losses and gradients, and return the status of the twin."""
    torch.manual_seed(0)
    reference = model(case)
    torch.manual_seed(0)
    runtime, wrapped = wrap_model(model(case), config.OrtModuleConfig(split=split), stage=0)
    for step, batch in enumerate((3, 3, 2)):
        torch.manual_seed(step)
        arguments = torch.randn(batch, 5, WIDTH), *(make(step, batch) for make in more)
        losses = []
        for each in (reference, wrapped):
            each.zero_grad()
            try:
                loss = each(*arguments)
            except IndexError as error:
                if each is reference and any(text.startswith("torch ") for text in versions.require("ort")):
                    pytest.skip(f"this torch does not run it: {error}")
                raise
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-5)
        for (name, one), other in zip(reference.named_parameters(), wrapped.parameters(), strict=True):
            torch.testing.assert_close(
                gradient_of(other),
                gradient_of(one),
                atol=1e-4,
                rtol=1e-3,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        for (name, one), other in zip(reference.named_buffers(), wrapped.buffers(), strict=True):
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        with torch.no_grad():
            for parameter in (*reference.parameters(), *wrapped.parameters()):
                if parameter.grad is not None:
                    parameter -= 0.02 * parameter.grad.to_dense()
    status = runtime.status()
    assert status["backend"] == "onnxruntime"
    last = status["submodules"]["last"] if "submodules" in status else status
    assert last["graphs"]["training"]["runs"]["backward"] == 3
    return status


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter, dense, and zeros where it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()


def below(part: str) -> str:
    """Return what the status calls a part of the submodule."""
    return f"middle.{part}" if part[0].islower() and "::" not in part and "(" not in part and part != "middle" else part


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_in_a_submodule(name):
    status = run_steps(CASES[name], InSubmodule)
    assert set(status["in_torch"]) == {below(part) for part in CASES[name].parts}
    assert all(status["in_torch"].values())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_in_the_forward_of_the_model(name):
    case = CASES[name]
    if case.refused is None:
        assert set(run_steps(case, InModel)["in_torch"]) == set(case.parts)
        return
    with pytest.raises(ExportError, match=case.refused) as raised:
        run_steps(case, InModel, split="off")
    assert "InModel cannot run in ONNX Runtime" in str(raised.value)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.refused])
@pytest.mark.filterwarnings("ignore")
def test_what_no_graph_of_the_whole_model_can_hold_leaves_the_submodules_graphs(name):
    status = run_steps(CASES[name], InModel)
    assert status["backend"] == "onnxruntime" and "InModel.forward" in status["in_torch"]
    assert {"first", "last"} <= set(status["submodules"])
    assert status["submodules"]["first"]["graphs"]["training"]["runs"] == {"forward": 3, "backward": 3}


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.refused and "sparse" not in case.refused]
)
@pytest.mark.filterwarnings("ignore")
def test_a_refusal_names_the_line_of_the_user(name):
    line = CASES[name].function.__code__.co_firstlineno
    with pytest.raises(ExportError) as raised:
        run_steps(CASES[name], InModel, split="off")
    assert any(f"{__file__}:{line + i} in {name}" in str(raised.value) for i in range(8)), raised.value


# -- packed sequences --------------------------------------------------------------------------------------------------


def lengths(step: int, batch: int) -> torch.Tensor:
    """Return lengths of sequences, the longest one first."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, 6, (batch,), generator=generator).sort(descending=True).values


class Recurrent(nn.Module):
    """Packs its sequences, in one of the forms in which people do."""

    def __init__(self, case: Case):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        case.build(self)
        self.last = nn.Linear(4, 2)
        self.function = case.function

    def forward(self, x, lengths):
        return self.last(self.function(self.first(x), lengths, self)).pow(2).mean()


def _all_steps(t, lengths, net):
    packed = rnn.pack_padded_sequence(t, lengths, batch_first=True)
    out, (hidden, _) = net.layer(packed)
    out, _ = rnn.pad_packed_sequence(out, batch_first=True, total_length=t.shape[1])
    return out + hidden[-1][:, None]


def _unsorted(t, lengths, net):
    packed = rnn.pack_padded_sequence(t, lengths.flip(0), batch_first=True, enforce_sorted=False)
    out, sizes = rnn.pad_packed_sequence(net.layer(packed)[0], batch_first=True)
    return out.sum(1) / sizes[:, None]


def _last_state(t, lengths, net):
    return net.layer(rnn.pack_padded_sequence(t, lengths.tolist(), batch_first=True))[1][-1]


class Encoder(nn.Module):
    """Takes a packed sequence and returns one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(WIDTH, 4, batch_first=True)

    def forward(self, packed):
        return self.layer(packed)[0]


def _through_a_submodule(t, lengths, net):
    packed = net.encoder(rnn.pack_padded_sequence(t, lengths, batch_first=True))
    return rnn.pad_packed_sequence(packed, batch_first=True)[0].sum(1)


PACKING = {
    "lstm": Case(_all_steps, build=lambda net: setattr(net, "layer", nn.LSTM(WIDTH, 4, batch_first=True))),
    "unsorted gru": Case(_unsorted, build=lambda net: setattr(net, "layer", nn.GRU(WIDTH, 4, batch_first=True))),
    "last state": Case(_last_state, build=lambda net: setattr(net, "layer", nn.GRU(WIDTH, 4, batch_first=True))),
    "submodule": Case(_through_a_submodule, build=lambda net: setattr(net, "encoder", Encoder())),
}


@pytest.mark.parametrize("name", PACKING)
@pytest.mark.filterwarnings("ignore")
def test_packed_sequences(name):
    status = run_steps(PACKING[name], Recurrent, lengths)
    assert set(status["in_torch"]) <= {
        "aten::_pack_padded_sequence", "aten::_pad_packed_sequence", "aten::lstm", "aten::gru"
    }  # fmt: skip
    assert "aten::_pack_padded_sequence" in status["in_torch"]


def test_under_inference_mode_views_are_known_and_weights_stay_usual():
    case = CASES["assigns_to_parts_of_slices"]
    torch.manual_seed(0)
    reference = InSubmodule(case)
    torch.manual_seed(0)
    runtime, wrapped = wrap_model(InSubmodule(case), config.OrtModuleConfig(), stage=0)
    with torch.inference_mode():
        x = torch.randn(3, 5, WIDTH)
        torch.testing.assert_close(wrapped(x), reference(x))
    assert runtime.status()["graphs"]["inference"]["runs"]["forward"] == 1
    wrapped(torch.randn(3, 5, WIDTH)).backward()
    assert wrapped.middle.vector.grad is not None


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_max_norm_scales_its_weight(kind):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words, self.last = kind(10, 8, max_norm=1.0), nn.Linear(8, 2)

        def forward(self, ids):
            return self.last(self.words(ids)).square().mean()

    module = Words()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for model in (wrapped, reference):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.arange(2 + step, 8).view(1, -1)).backward()
            optimizer.step()
    torch.testing.assert_close(module.words.weight, reference.words.weight)
    assert (reference.words.weight[5:8].norm(dim=-1) < 2).all()
    assert list(runtime.status()["in_torch"]) == ["words"]
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 3, "backward": 3}


@pytest.mark.parametrize("seen", [True, False], ids=["in the first call", "in a later call"])
def test_a_submodule_changes_its_weight_in_place_before_it_uses_it(seen):
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.linspace(-2, 2, 8)), 0

        def forward(self, x):
            self.calls += 1
            if seen or self.calls > 2:
                with torch.no_grad():
                    self.weight.copy_(self.weight.clamp(-1, 1))
            return x * self.weight.view(1, -1)[:, :] + random.random()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.clamped, self.last = nn.Linear(8, 8), Clamped(), nn.Linear(8, 2)

        def forward(self, x):
            return self.last(torch.tanh(self.clamped(self.first(x)))).square().mean()

    module = Net()
    reference = copy.deepcopy(module)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    for model in (wrapped, reference):
        random.seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 16).view(2, 8) * (step + 1)).backward()
            optimizer.step()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert list(runtime.status()["in_torch"]) == ["clamped"]
    assert runtime.status()["graphs"]["training"]["runs"] == {"forward": 4, "backward": 4}

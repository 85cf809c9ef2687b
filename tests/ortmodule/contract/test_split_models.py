"""A model whose own forward no graph can hold: PyTorch runs that code, its submodules have graphs of their own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ort_zero
from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model


class Momentum(nn.Module):
    """Contrasts a trained encoder with its moving average, whose keys wait in a queue (MoCo)."""

    def __init__(self, update: str):
        super().__init__()
        self.update = update
        self.query = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
        self.key = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self):
        pairs = list(zip(self.query.parameters(), self.key.parameters(), strict=True))
        if self.update == "foreach":
            torch._foreach_lerp_([k for _, k in pairs], [q for q, _ in pairs], 0.1)
        for q, k in pairs:
            if self.update == "assigned":
                k.data = k.data * 0.9 + q.data * 0.1
            elif self.update == "data":
                k.data.mul_(0.9).add_(q.data, alpha=0.1)
            elif self.update == "in place":
                k.mul_(0.9).add_(q, alpha=0.1)
            elif self.update == "copied":
                k.copy_(k * 0.9 + q * 0.1)

    @torch.no_grad()
    def put(self, keys):
        at = int(self.pointer)
        self.queue[:, at : at + keys.shape[0]] = keys.T
        self.pointer[0] = (at + keys.shape[0]) % self.queue.shape[1]

    def forward(self, x):
        query = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            self.follow()
            keys = F.normalize(self.key(x + 0.1), dim=1)
        found = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        self.put(keys)
        return F.cross_entropy(found / 0.2, torch.zeros(len(x), dtype=torch.long))


class Codebook(nn.Module):
    """Quantizes with a codebook that follows its inputs (VQ-VAE)."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("codes", torch.randn(5, 4))

    def forward(self, x):
        h = self.encode(x)
        at = torch.cdist(h, self.codes).argmin(1)
        chosen = self.codes[at]
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(at, 5).float()
                self.codes.data.copy_(0.9 * self.codes + 0.1 * one_hot.T @ h)
        return (self.decode(h + (chosen - h).detach()) - x).square().mean()


class Stages(nn.Module):
    """Calls what is in its containers and in a submodule's method, and hooks a gradient in between."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.inner = Inner()
        self.left_out = nn.Linear(6, 6)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        x.register_hook(lambda gradient: gradient * 0.5)
        for layer in self.layers:
            x = x + layer(x)
        return self.left_out(self.inner.features(x)).square().mean()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep = nn.Linear(6, 6)

    def features(self, x):
        return self.deep(x).relu()

    def forward(self, x):
        raise AssertionError("nobody calls it")


class Turned(nn.Module):
    """Has a complex parameter, and takes complex numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x, phase=None):
        phase = torch.polar(torch.ones(4), torch.arange(4.0)) if phase is None else phase
        return (self.first(x) * self.turn * phase).abs().mean()


class Forces(nn.Module):
    """Computes the gradient of an energy in its own forward, and another by torch.func."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = x.detach().requires_grad_()
        (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.energy(row).sum()))(x)
        return self.head(forces + slopes).square().mean() + forces.square().mean()


MODELS = {
    **{
        f"momentum, {way}": lambda way=way: Momentum(way)
        for way in ("assigned", "data", "in place", "copied", "foreach")
    },
    "codebook": Codebook,
    "stages": Stages,
    "complex": Turned,
    "forces": Forces,
}
RAN = {
    "momentum": {"query", "key"},
    "codebook": {"encode", "decode"},
    "stages": {"blocks.0", "blocks.2", "layers.0", "layers.1", "inner.deep", "left_out"},
    "complex": {"first"},
    "forces": {"energy", "head"},
}


def pair(name: str, **options):
    torch.manual_seed(0)
    reference = MODELS[name]()
    module = copy.deepcopy(reference)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(**options), stage=0)
    return runtime, wrapped, reference


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def train(models, steps: int) -> None:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(steps):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(batch(step))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], atol=1e-5, rtol=1e-4)
    ours, theirs = models[0].state_dict(), models[1].state_dict()
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_pytorch_with_its_submodules_in_onnx_runtime(name, capsys):
    runtime, wrapped, reference = pair(name)
    train([wrapped, reference], 4)
    kind = type(reference).__name__
    assert capsys.readouterr().err.count(f"the forward of {kind} runs in PyTorch") == 1
    status = runtime.status()
    assert status["backend"] == "onnxruntime" and status["fallbacks"] == 0
    assert set(status["in_torch"]) >= {f"{kind}.forward"}
    parts = status["submodules"]
    assert set(parts) == RAN[name.partition(",")[0]]
    for path, part in parts.items():
        graphs = part["graphs"]["inference" if path == "key" else "training"]
        assert graphs["runs"]["forward"] >= 4 and graphs["exports"] == 1, (path, graphs)
    assert status["graphs"]["training"]["runs"]["backward"] == sum(
        part["graphs"].get("training", {"runs": {}})["runs"].get("backward", 0) for part in parts.values()
    )


def test_it_evaluates_as_in_pytorch():
    runtime, wrapped, reference = pair("codebook")
    for training in (True, False, True):
        wrapped.train(training), reference.train(training)
        with torch.no_grad():
            torch.testing.assert_close(wrapped(batch(1)), reference(batch(1)), atol=1e-5, rtol=1e-4)
    assert runtime.status()["graphs"]["inference"]["runs"]["forward"] >= 4


def test_copies_and_calls_of_submodules_are_the_users_own():
    """Outside of the model's forward its modules are as they were: EMA copies, pickles and direct calls."""
    runtime, wrapped, reference = pair("momentum, data")
    train([wrapped, reference], 2)
    before = runtime.status()["graphs"]["training"]["runs"]["forward"]
    twin = copy.deepcopy(wrapped.module)
    assert all(set(vars(a)) == set(vars(b)) for a, b in zip(twin.modules(), reference.modules(), strict=True))
    with torch.no_grad():
        twin.query[0].weight.zero_()
    torch.testing.assert_close(wrapped.module.query(batch(9)), reference.query(batch(9)))
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] == before
    train([wrapped, reference], 1)
    assert runtime.status()["graphs"]["training"]["runs"]["forward"] == before + 1


def test_excluded_submodules_stay_in_pytorch():
    runtime, wrapped, reference = pair("stages", exclude=["layers.*", "left_out"])
    train([wrapped, reference], 2)
    status = runtime.status()
    assert set(status["submodules"]) == {"blocks.0", "blocks.2", "inner.deep"}
    assert {"layers.0", "layers.1", "left_out"} <= set(status["in_torch"])


def test_a_submodule_whose_forward_fails_as_well_is_divided_again():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stages, self.last = Stages(), nn.Linear(6, 6)

        def forward(self, x):
            h = self.last(x)
            h.register_hook(lambda gradient: gradient * 2)
            self.stages.left_out.weight.data.mul_(0.99)
            return self.stages(h)

    torch.manual_seed(0)
    reference = Outer()
    module = copy.deepcopy(reference)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), stage=0)
    train([wrapped, reference], 3)
    status = runtime.status()
    assert set(status["submodules"]) == {"stages", "last"} and status["backend"] == "onnxruntime"


def test_a_replaced_submodule_is_noticed():
    runtime, wrapped, reference = pair("codebook")
    train([wrapped, reference], 2)
    torch.manual_seed(5)
    wrapped.module.decode = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 6))
    reference.decode = copy.deepcopy(wrapped.module.decode)
    train([wrapped, reference], 2)
    assert set(runtime.status()["submodules"]) == {"encode", "decode"}


@pytest.mark.parametrize("options", [{"split": "off"}, {"split": "off", "exclude": ["query"]}])
def test_with_split_off_it_is_an_error(options):
    _, wrapped, _ = pair("momentum, data", **options)
    with pytest.raises(ExportError, match="Momentum cannot run in ONNX Runtime: its forward changes .* in place"):
        wrapped(batch(0))


def test_where_nothing_would_run_in_onnx_runtime_it_is_an_error():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))

        def forward(self, x):
            h = x * self.weight
            h.register_hook(lambda gradient: gradient * 2)
            return h.mean()

    _, wrapped = wrap_model(Alone(), config.OrtModuleConfig(), stage=0)
    with pytest.raises(ExportError, match="Alone cannot run in ONNX Runtime: its forward puts a hook"):
        wrapped(batch(0))


def test_the_table_of_the_first_step_names_the_part(capsys):
    torch.manual_seed(0)
    ort_zero.wrap(Codebook())(batch(0)).backward()
    told = capsys.readouterr().err
    assert "Codebook.forward" in told and "Codebook runs in ONNX Runtime" in told

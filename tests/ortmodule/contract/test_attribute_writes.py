"""What a forward leaves in attributes and containers: each run of the graph writes it, with gradients."""

from __future__ import annotations

import collections
import copy
import dataclasses

import torch
from torch import nn

from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
LOSSES: list[torch.Tensor] = []
STEPS = 0


@dataclasses.dataclass
class Report:
    aux: torch.Tensor | None = None
    rows: int = 0


class Router(nn.Module):
    """A submodule that leaves its loss behind, as routers of experts do."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.aux_loss, self.losses, self.stats = None, [], {}
        self.recent = collections.deque(maxlen=2)
        self.report, self.calls, self.seen, self.ready = Report(), 0, 0, False

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        self.aux_loss = probs.mean(0).pow(2).sum()
        self.losses.append(probs.square().mean())
        self.stats["entropy"] = -(probs * probs.log()).sum(-1).mean()
        self.stats[f"part {len('a')}"] = probs[:, 0].detach()
        self.recent.append(probs.max())
        self.report.aux = probs.abs().mean()
        self.report.rows = x.shape[0]
        self.shape = x.shape
        self.calls += 1
        self.seen += x.shape[0]
        self.ready = True
        self.last_input = x
        self.pair = (probs, {"name": "probs", "log": probs.log()})
        LOSSES.append(self.aux_loss)
        return x * probs


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = Router(), nn.Linear(4, 4)
        self.hidden = None

    def forward(self, x):
        self.hidden = self.head(self.router(x))
        return self.hidden.pow(2).mean()


class Pair:
    """A model in ONNX Runtime and its copy in PyTorch."""

    def __init__(self, module: nn.Module, **section):
        self.reference, self.module = copy.deepcopy(module), module
        self.runtime, self.wrapped = wrap_model(module, config.OrtModuleConfig(**section), stage=0)

    def step(self, use, x=X) -> None:
        """Run both, let `use` make losses of what they left, and compare losses and gradients."""
        losses = []
        for wrapped, m in ((self.wrapped, self.module), (self.reference, self.reference)):
            m.zero_grad()
            LOSSES.clear()
            losses.append(use(wrapped(x), m))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        expected = {name: p.grad for name, p in self.reference.named_parameters()}
        torch.testing.assert_close({name: p.grad for name, p in self.module.named_parameters()}, expected)

    def status(self) -> dict:
        return self.runtime.status()["graphs"]["training"]


def everything(loss, m):
    router = m.router
    terms = [router.aux_loss, *router.losses, router.stats["entropy"], router.recent[-1], router.report.aux]
    terms += [router.pair[0].sum(), router.pair[1]["log"].mean(), m.hidden.abs().mean(), *LOSSES]
    router.losses.clear()
    return loss + sum(terms)


def test_what_a_forward_leaves_has_its_values_and_gradients():
    pair = Pair(Model())
    for step in range(4):
        x = torch.randn(3 + step, 4)
        pair.step(everything, x)
        ours, theirs = pair.module.router, pair.reference.router
        for m in (ours, theirs):
            assert (m.calls, m.report.rows, m.ready, m.shape) == (step + 1, 3 + step, True, x.shape)
            assert type(m.calls) is type(m.report.rows) is type(m.seen) is int
            assert m.last_input is x and len(m.recent) == min(2, step + 1)
            assert m.pair[1]["name"] == "probs" and not m.stats["part 1"].requires_grad
        assert ours.seen == theirs.seen and list(ours.stats) == list(theirs.stats)
        torch.testing.assert_close(ours.stats, theirs.stats)
    assert pair.status()["runs"] == {"forward": 4, "backward": 4}
    assert pair.status()["attributes_not_written"] == [] and "Model.hidden" in pair.status()["attributes_written"]
    assert pair.runtime.status()["in_torch"] == {}


def test_they_are_written_without_gradients_too():
    pair = Pair(Model())
    for m in (pair.wrapped, pair.reference):
        m.eval()
    for _ in range(2):
        with torch.no_grad():
            pair.wrapped(X), pair.reference(X)
        torch.testing.assert_close(pair.module.hidden, pair.reference.hidden)
        torch.testing.assert_close(pair.module.router.losses, pair.reference.router.losses)
        assert not pair.module.hidden.requires_grad
    assert len(pair.module.router.losses) == 2


def test_what_the_script_resets_is_written_again():
    pair = Pair(Model())

    def reset(loss, m):
        loss = loss + m.router.aux_loss + sum(m.router.losses)
        m.router.aux_loss, m.router.losses, m.router.ready, m.router.calls = None, [], False, 0
        return loss

    for _ in range(3):
        pair.step(reset)
    assert [t["transition"] for t in pair.runtime.status()["transitions"]] == ["export"]


class Excluded(nn.Module):
    """Leaves its loss behind in a submodule that PyTorch runs inside the graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = Router(), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.router(x)).pow(2).mean()


def test_what_a_submodule_in_pytorch_leaves_has_its_gradients():
    def use(loss, m):
        router = m.router
        assert (router.calls, len(router.losses)) == (1, 1)
        loss = loss + router.aux_loss + router.losses.pop() + router.stats["entropy"]
        router.calls = 0
        return loss + router.report.aux + router.pair[1]["log"].mean()

    pair = Pair(Excluded(), exclude=["router"])
    for _ in range(3):
        pair.step(use)
    assert list(pair.runtime.status()["in_torch"]) == ["router"]


class Modes(nn.Module):
    """Decides by what it has left behind at the last call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.first, self.previous, self.flip = nn.Linear(4, 4), True, None, "a"

    def forward(self, x):
        y = self.layer(x)
        if self.first:
            y = y * 2
        if self.flip == "b":
            y = y + 1
        if self.previous is not None:
            y = y - self.previous
        self.first, self.flip, self.previous = False, "b" if self.flip == "a" else "a", y.detach().mean(0)
        return y.pow(2).mean()


def test_switches_that_a_forward_turns_are_turned():
    pair = Pair(Modes())
    for step in range(8):
        pair.step(lambda loss, m: loss, X + step)
        assert (pair.module.first, pair.module.flip) == (False, pair.reference.flip)
    assert pair.status()["runs"] == {"forward": 8, "backward": 8}


class OfBefore(nn.Module):
    """Looks whether there is a loss of the last call, and leaves one with a gradient."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.aux = nn.Linear(4, 4), None

    def forward(self, x):
        y = self.layer(x)
        if self.aux is None:
            y = y * 3
        self.aux = y.abs().mean()
        return y.pow(2).mean()


def test_whether_there_was_a_tensor_counts_and_not_which():
    pair = Pair(OfBefore())
    for step in range(5):
        pair.step(lambda loss, m: loss + m.aux)
        if step == 3:
            pair.module.aux = pair.reference.aux = None
    done = [t["transition"] for t in pair.runtime.status()["transitions"]]
    assert done == ["export", "export", "switch"], done


class Counting(nn.Module):
    """Counts its calls in a global of the program, and uses the number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        global STEPS
        STEPS = STEPS + 1
        return self.layer(x).pow(2).mean() * STEPS


def test_a_global_that_the_forward_counts_up_is_counted_up():
    pair = Pair(Counting())
    for step in range(4):
        globals()["STEPS"] = 10 * step
        expected = pair.reference(X)
        globals()["STEPS"] = 10 * step
        torch.testing.assert_close(pair.wrapped(X), expected)
        assert STEPS == 10 * step + 1


class Window(nn.Module):
    """Keeps the last results in a list, and reads them: the content of the list decides."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        if len(self.kept) == 3:
            self.kept.pop(0)
        y = x + sum(self.kept)
        self.kept.append(x.detach())
        return y


class Windowed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.window = nn.Linear(4, 4), Window()

    def forward(self, x):
        return self.window(self.layer(x)).pow(2).mean()


def test_a_list_that_the_forward_reads_keeps_its_module_in_pytorch():
    pair = Pair(Windowed())
    for step in range(8):
        pair.step(lambda loss, m: loss, X + step)
        torch.testing.assert_close(pair.module.window.kept, pair.reference.window.kept)
    assert list(pair.runtime.status()["in_torch"]) == ["window"]


class OnlyOnce(nn.Module):
    """Does something else in its first calls, which the second run of an export does not see any more."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.first, self.calls, self.state = nn.Linear(4, 4), True, 0, {"warm": False}

    def forward(self, x):
        loss = self.layer(x).square().mean()
        if self.first:
            self.first = False
            loss = loss * 2
        if self.calls < 1:
            self.calls += 1
            loss = loss * 3
        if not self.state["warm"]:
            self.state["warm"] = True
            loss = loss * 5
        return loss


def test_what_a_forward_does_only_once():
    pair = Pair(OnlyOnce())
    for _ in range(3):
        pair.step(lambda loss, m: loss)
        assert (pair.module.first, pair.module.calls, pair.module.state) == (False, 1, {"warm": True})
    assert pair.status()["runs"] == {"forward": 3, "backward": 3}

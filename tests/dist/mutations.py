"""Changes of a model that is trained already: what Python would run afterwards is what must run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

WIDTH = 16
FACTOR = 1.0
"""A global that a forward reads."""
calls: list[str] = []
"""What hooks and replaced methods note."""

Undo = Callable[[], Any]
Mutation = Callable[[nn.Module], Undo | None]


def helper(x: torch.Tensor) -> torch.Tensor:
    """A global function that a forward calls."""
    return x * 1.0


def made(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function with a closure."""
    return lambda x: x * scale


class Base(nn.Module):
    def forward(self, x):
        return self.body(x)

    def body(self, x):
        return x + self.mlp(self.norm(x))


class Mlp(nn.Module):
    offset = 0.0

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH)
        self.drop, self.extra = nn.Dropout(0.0), nn.ModuleList([nn.Identity()])
        self.closed, self.hidden_scale = made(1.0), 1.0
        self.register_buffer("shift", torch.zeros(WIDTH))

    def scaled(self, x, factor=1.0):
        return x * factor

    @property
    def one(self):
        return 1.0

    def forward(self, x):
        y = self.down(self.drop(self.act(self.up(x))))
        for each in self.extra:
            y = each(y)
        y = helper(self.closed(self.scaled(y))) * FACTOR * self.hidden_scale
        return y + self.shift + self.offset + y * (self.one - 1)


class Block(Base):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()


def stack() -> nn.Sequential:
    """Return three blocks with the same values at each call."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def _noted(name: str, result: Callable[..., Any] = lambda *arguments: None) -> Callable[..., Any]:
    def hook(*arguments: Any) -> Any:
        calls.append(name)
        return result(*arguments)

    return hook


def _hook(path: str, register: str, hook: Callable[..., Any], **options: Any) -> Mutation:
    return lambda model: getattr(model.get_submodule(path), register)(hook, **options).remove


def _set(owner: Callable[[nn.Module], Any], name: str, value: Any) -> Mutation:
    def change(model: nn.Module) -> Undo:
        target = owner(model)
        had, before = name in vars(target), vars(target).get(name)
        setattr(target, name, value)
        return lambda: setattr(target, name, before) if had else delattr(target, name)

    return change


def _halved(gradients: Any) -> tuple:
    return tuple(None if gradient is None else gradient * 0.5 for gradient in gradients)


HOOKS: dict[str, Mutation] = {}
for _where, _path in {"unit": "1", "layer": "1.mlp.up"}.items():
    HOOKS |= {
        f"{_where}: {_name}": _hook(_path, _register, _noted(_name, _result), **_options)
        for _name, _register, _result, _options in (
            ("forward hook", "register_forward_hook", lambda m, a, o: o * 0.5, {}),
            ("forward hook with kwargs", "register_forward_hook", lambda m, a, k, o: o * 0.5, {"with_kwargs": True}),
            ("pre-hook", "register_forward_pre_hook", lambda m, a: (a[0] * 0.5,), {}),
            ("backward hook", "register_full_backward_hook", lambda m, i, o: _halved(i), {}),
            ("backward pre-hook", "register_full_backward_pre_hook", lambda m, o: _halved(o), {}),
        )
    }  # fmt: skip


OF_THE_PROCESS: dict[str, Mutation] = {
    **{
        f"all modules: {name}": lambda model, register=register, hook=hook: register(hook).remove
        for name, register, hook in (
            ("forward hook that changes", torch_module.register_module_forward_hook,
             lambda m, a, o: o * 0.5 if isinstance(m, nn.Linear) else None),
            ("pre-hook", torch_module.register_module_forward_pre_hook, _noted("all pre-hooks")),
            ("backward hook", torch_module.register_module_full_backward_hook, _noted("all backwards")),
        )
    },
    "class: forward of the unit": _set(lambda m: Block, "forward", lambda self, x: x * 2 + self.norm(x)),
    "class: forward of a base class": _set(lambda m: Base, "forward", lambda self, x: x * 2 + self.norm(x)),
    "class: forward of a part": _set(lambda m: Mlp, "forward", lambda self, x: x * 2),
    "class: helper method of a base class": _set(lambda m: Base, "body", lambda self, x: x * 2 + self.norm(x)),
    "class: property": _set(lambda m: Mlp, "one", property(lambda self: 3.0)),
    "class: attribute": _set(lambda m: Mlp, "offset", 2.0),
    "class: __call__ of all modules": _set(
        lambda m: nn.Module, "__call__", _noted("call", lambda self, *a, **k: self._call_impl(*a, **k))
    ),
    "global: number": _set(lambda m: sys.modules[__name__], "FACTOR", 3.0),
    "global: function": _set(lambda m: sys.modules[__name__], "helper", lambda x: x * 5),
    "global: function of torch": _set(lambda m: nn.functional, "gelu", lambda x, approximate="none": x * 0.5),
}  # fmt: skip
"""Changes that hold for all models of the process."""


def _closure_cell(model: nn.Module) -> Undo:
    cell = model[1].mlp.closed.__closure__[0]
    before, cell.cell_contents = cell.cell_contents, 4.0
    return lambda: setattr(cell, "cell_contents", before)


def _wrapping(model: nn.Module) -> Undo:
    earlier = model[1].forward
    return _set(lambda m: m[1], "forward", lambda x: earlier(x) * 2)(model)


def _part_in_eval_mode(model: nn.Module) -> Undo:
    part = model[1].mlp
    part.drop.p = 0.5
    part.eval()

    def undo() -> None:
        part.drop.p = 0.0
        part.train()

    return undo


def _all_dropped(model: nn.Module) -> Undo:
    drop = model[1].mlp.drop
    drop.p = 1.0
    return lambda: setattr(drop, "p", 0.0)


OF_THE_MODEL: dict[str, Mutation] = {
    "instance: forward of a part": _set(lambda m: m[1].mlp, "forward", lambda x: x * 2),
    "instance: forward of the unit": _set(lambda m: m[1], "forward", lambda x: x * 2),
    "instance: forward around the unit's": _wrapping,
    "instance: helper method": _set(lambda m: m[1].mlp, "scaled", lambda x: x * 3),
    "instance: attribute": _set(lambda m: m[1].mlp, "hidden_scale", 2.0),
    "closure: variable": _closure_cell,
    "a part in eval mode": _part_in_eval_mode,
    "probability of a dropout": _all_dropped,
}  # fmt: skip
"""Changes of one model that leave its parameters as they are."""


def _parametrized(model: nn.Module) -> Undo:
    class Half(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    layer = model.get_submodule("1.mlp.up")
    parametrize.register_parametrization(layer, "weight", Half())
    return lambda: parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def _weight_norm(model: nn.Module) -> Undo:
    layer = model.get_submodule("1.mlp.up")
    parametrizations.weight_norm(layer)
    return lambda: parametrize.remove_parametrizations(layer, "weight")


def _pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model.get_submodule("1.mlp.up"), "weight", amount=0.5)


def _replaced(path: str, value: Callable[[nn.Module], Any]) -> Mutation:
    owner, _, name = path.rpartition(".")

    def change(model: nn.Module) -> Undo:
        torch.manual_seed(3)
        target = model.get_submodule(owner)
        before = getattr(target, name)
        setattr(target, name, value(model))
        return lambda: setattr(target, name, before)

    return change


def _appended(model: nn.Module) -> Undo:
    torch.manual_seed(3)
    extra = model[1].mlp.extra
    extra.append(nn.Linear(WIDTH, WIDTH))
    return lambda: extra.pop(1)


def _doubled_in_place(model: nn.Module) -> None:
    layer: Any = model.get_submodule("1.mlp.up")
    layer.weight.data = layer.weight.data * 2


def _frozen(model: nn.Module) -> Undo:
    layer: Any = model.get_submodule("1.mlp.up")
    layer.weight.requires_grad_(False)
    return lambda: layer.weight.requires_grad_(True)


OF_THE_WEIGHTS: dict[str, Mutation] = {
    "parametrization": _parametrized,
    "weight norm": _weight_norm,
    "pruning": _pruned,
    "activation replaced": _replaced("1.mlp.act", lambda m: nn.ReLU()),
    "layer replaced": _replaced("1.mlp.up", lambda m: nn.Linear(WIDTH, 3 * WIDTH)),
    "layer appended": _appended,
    "weight replaced": _replaced("1.mlp.up.weight", lambda m: nn.Parameter(torch.randn(3 * WIDTH, WIDTH))),
    "weight changed": _doubled_in_place,
    "weight frozen": _frozen,
    "bias deleted": _replaced("1.mlp.up.bias", lambda m: None),
    "buffer replaced": _replaced("1.mlp.shift", lambda m: torch.ones(WIDTH)),
}
"""Changes of one model's modules, parameters and buffers."""


def results_of(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what `run` returns, and what hooks and methods have noted meanwhile."""
    calls.clear()
    return run(), list(calls)

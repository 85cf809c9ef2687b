"""Models of a few layers in which modules are shared, tied, called often, left out or used from outside."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

IN, HIDDEN, OUT = 7, 18, 5


class Block(nn.Module):
    """Two layers, for something that is a parent and not a root."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN + 3)
        self.down = nn.Linear(HIDDEN + 3, HIDDEN)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(HIDDEN, OUT)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Actor(Stack):
    pass


class Critic(Stack):
    pass


class CalledOften(Stack):
    """The same modules several times, and one without any parameter."""

    def __init__(self):
        super().__init__()
        self.activation = nn.Tanh()

    def forward(self, x):
        x = self.activation(self.first(x))
        for _ in range(2):
            for block in self.blocks:
                x = self.activation(block(block(x)))
        return self.last(x)


class Switched(Stack):
    """The order of the modules, and whether one runs at all, are up to the caller."""

    def forward(self, x, backwards: bool = False, skip: bool = False):
        x = torch.tanh(self.first(x))
        for block in reversed(self.blocks) if backwards else self.blocks:
            if not (skip and block is self.blocks[1]):
                x = block(x)
        return self.last(x)


class Projection(nn.Module):
    """Has no weight of its own."""

    def forward(self, x, weight):
        return F.linear(x, weight)


class External(Stack):
    """A weight of one module is used by another one, which gets it as an argument."""

    def __init__(self, register: bool = False):
        super().__init__()
        self.back = Projection()
        if register:
            import deepspeed

            deepspeed.zero.register_external_parameter(self, self.first.weight)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden) + self.back(hidden, self.first.weight.t())[:, :OUT]


class Tied(Stack):
    """One weight under two names in two modules."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.tail = nn.Linear(HIDDEN, HIDDEN)
        self.tail.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.2)
        self.head = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.head.weight = self.tail.weight

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = self.tail(block(x))
        return self.last(torch.tanh(self.head(x)))


class TwoResults(nn.Module):
    """A main result and one of an auxiliary head, of layers that share a part and have a frozen one."""

    def __init__(self, width: int):
        super().__init__()
        self.shared, self.main, self.aux = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 4)
        self.unused, self.frozen = nn.Linear(width, width), nn.Linear(width, width).requires_grad_(False)

    def forward(self, x):
        shared = torch.tanh(self.shared(x))
        return x + self.main(self.frozen(shared)), self.aux(shared)


class AuxiliaryHeads(nn.Module):
    """Layers of which each has a result for a loss of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(TwoResults(width) for _ in range(2))

    def forward(self, x):
        heads = []
        for layer in self.layers:
            x, head = layer(x)
            heads.append(head)
        return x, *heads

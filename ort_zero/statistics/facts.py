"""Define what a step keeps beside its tensors: modes, ties, digests of parameters, optimizer steps, random states."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """One step of one optimizer, as its arguments were before the update."""

    optimizer: int
    """Number of the optimizer in its process, in the order of first steps."""
    rates: list[float]
    """Learning rate of each group."""
    gradients: dict[str, float | None]
    """Norm of the gradient of each parameter that model and optimizer share, after reduction, unscaling and clipping;
    None for a parameter without a gradient. NaN and inf stay."""
    resting: list[str]
    """Parameters among them that may stay as they are, as the learning rate of their group is 0, or too small."""
    stale: list[str]
    """Parameters whose gradient still contains that of an earlier step of this optimizer: nobody set it to zero."""
    foreign_norm: float | None
    """Norm of all gradients of tensors that the model does not have, such as ZeRO's flat ones; None without any."""
    foreign_idle: list[list[int]]
    """Shapes of the tensors that the model does not have and that have no gradient."""

    def has_gradient(self) -> bool:
        """Return True if any tensor of the optimizer has a gradient."""
        return self.foreign_norm is not None or any(norm is not None for norm in self.gradients.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a step keeps beside its tensors."""

    training: bool = True
    """Mode of the root module."""
    gradients: bool = True
    """Whether autograd recorded the forward."""
    other_mode: list[str] = field(default_factory=list)
    """Paths of dropout and batch normalization whose mode differs from the root's."""
    moded: bool = False
    """Whether the model has dropout or batch normalization at all."""
    unfitted: list[str] = field(default_factory=list)
    """Paths of modules that evaluate with statistics that no training forward has computed yet."""
    tied: list[list[str]] = field(default_factory=list)
    """Names of parameters that are one tensor, by tensor."""
    untied: list[str] = field(default_factory=list)
    """Names of input and output embeddings that the model's configuration ties, and that are two tensors."""
    frozen: list[str] = field(default_factory=list)
    """Names of the parameters that require no gradient."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Digest of this rank's part of each parameter; of a frozen one, of a sample."""
    random: dict[str, str] = field(default_factory=dict)
    """Digests of the states of random number generators."""
    updates: list[OptimizerStep] = field(default_factory=list)
    """The optimizer steps between this step and the next."""
    lines: list[str] = field(default_factory=list)
    """The user's lines of the calls, by number, where operators are recorded: ``"model.py:41 in forward"``."""


def encode(facts: Facts) -> str:
    """Return facts as JSON."""
    return json.dumps(asdict(facts), separators=(",", ":"))


def decode(text: str) -> Facts:
    """Return the facts in JSON."""
    content = json.loads(text)
    return Facts(**{**content, "updates": [OptimizerStep(**each) for each in content["updates"]]})

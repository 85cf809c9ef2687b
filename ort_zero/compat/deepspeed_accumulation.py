"""Count and drop the gradients that a DeepSpeed 0.19 engine has accumulated since the optimizer's last step."""

from __future__ import annotations

from typing import Any


def micro_steps_since_step(engine: Any) -> int:
    """Return the number of micro-steps since the optimizer's last step; 0 if the program sets the boundaries."""
    managed = getattr(engine, "managed_gradient_accumulation", None)  # since 0.19
    if getattr(engine, "_is_gradient_accumulation_boundary", None) is not None or (managed and not managed()):
        return 0
    return engine.micro_steps % engine.gradient_accumulation_steps()


def drop_accumulated_gradients(engine: Any) -> None:
    """Drop the accumulated gradients: the next micro-step is the first one of a step."""
    optimizer = engine.optimizer
    if optimizer is not None:
        optimizer.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):
            gradients = getattr(optimizer, name, None)
            if isinstance(gradients, dict):
                gradients.update(dict.fromkeys(gradients))
        if hasattr(optimizer, "bit16_groups") and hasattr(optimizer, "micro_step_id"):
            optimizer.micro_step_id = -1  # ZeRO-3's zero_grad() does the same
    engine.micro_steps = 0

"""Sharded ZeRO checkpoints: saving, loading at another world size, aggregation, verification. Needs no onnxruntime."""

from __future__ import annotations

from typing import Any

_HOMES = {
    "save": "saving",
    "load": "loading",
    "wait": "saving",
    "aggregate": "aggregation",
    "verify": "verification",
    "load_optimizer_state": "optimizer_state",
}
"""Public name: module that holds it. Loaded on first use, so that a reader of manifests imports no torch."""

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

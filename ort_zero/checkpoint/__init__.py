"""Sharded ZeRO checkpoints: saving, loading at another world size, aggregation, verification. Needs no onnxruntime."""

from typing import TYPE_CHECKING

from ort_zero.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from ort_zero.checkpoint.aggregation import aggregate
    from ort_zero.checkpoint.converting import convert
    from ort_zero.checkpoint.differences import diff
    from ort_zero.checkpoint.listing import list_checkpoints
    from ort_zero.checkpoint.loading import load
    from ort_zero.checkpoint.optimizer_state import load_optimizer_state
    from ort_zero.checkpoint.saving import save, wait
    from ort_zero.checkpoint.verification import verify
else:
    # on demand, so that a reader of manifests imports no torch
    __getattr__ = lazy_attributes(
        __name__,
        {
            "aggregate": "ort_zero.checkpoint.aggregation",
            "convert": "ort_zero.checkpoint.converting",
            "diff": "ort_zero.checkpoint.differences",
            "list_checkpoints": "ort_zero.checkpoint.listing",
            "load": "ort_zero.checkpoint.loading",
            "load_optimizer_state": "ort_zero.checkpoint.optimizer_state",
            "save": "ort_zero.checkpoint.saving",
            "verify": "ort_zero.checkpoint.verification",
            "wait": "ort_zero.checkpoint.saving",
        },
    )

__all__ = ["aggregate", "convert", "diff", "list_checkpoints", "load", "load_optimizer_state", "save", "verify", "wait"]

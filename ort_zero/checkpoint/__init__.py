"""Save sharded ZeRO checkpoints, load them at any world size, merge, convert and verify them, without onnxruntime.

Functions of this package raise ``CheckpointError``, and ``CorruptCheckpointError`` where bytes are missing, changed or
of another save. Their docstrings list errors only where a caller relies on more than that.
"""

from typing import TYPE_CHECKING

from ort_zero.utils.lazy import lazy_attributes

if TYPE_CHECKING:
    from ort_zero.checkpoint.aggregation.aggregation import aggregate
    from ort_zero.checkpoint.conversions.converting import convert
    from ort_zero.checkpoint.inspection.differences import diff
    from ort_zero.checkpoint.inspection.listing import list_checkpoints
    from ort_zero.checkpoint.inspection.verification import verify
    from ort_zero.checkpoint.loads.loading import load
    from ort_zero.checkpoint.loads.optimizer_state import load_optimizer_state
    from ort_zero.checkpoint.saves.saving import save, wait
else:
    # lazily, so that programs that only read manifests import no torch
    __getattr__ = lazy_attributes(
        __name__,
        {
            "aggregate": "ort_zero.checkpoint.aggregation.aggregation",
            "convert": "ort_zero.checkpoint.conversions.converting",
            "diff": "ort_zero.checkpoint.inspection.differences",
            "list_checkpoints": "ort_zero.checkpoint.inspection.listing",
            "load": "ort_zero.checkpoint.loads.loading",
            "load_optimizer_state": "ort_zero.checkpoint.loads.optimizer_state",
            "save": "ort_zero.checkpoint.saves.saving",
            "verify": "ort_zero.checkpoint.inspection.verification",
            "wait": "ort_zero.checkpoint.saves.saving",
        },
    )

__all__ = ["aggregate", "convert", "diff", "list_checkpoints", "load", "load_optimizer_state", "save", "verify", "wait"]

"""Count the batches that torch's data loaders yield."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from ort_zero.utils.patching import around

_taken: Counter[int] = Counter()
"""Number of batches since the last call of :func:`workers_of_one_batch`, by the number of the loader's workers."""


@functools.cache
def count_batches() -> None:
    """Count the batches of all data loaders from now on; a second call does nothing."""
    _BaseDataLoaderIter.__next__ = around(_counted)(_BaseDataLoaderIter.__next__)  # type: ignore[method-assign]


def _counted(original: Any, self: Any) -> Any:
    batch = original(self)
    _taken[self._num_workers] += 1
    return batch


def workers_of_one_batch() -> int:
    """Return the number of workers of the loader that yielded exactly one batch since the last call; 0 if none did."""
    workers = next(iter(_taken)) if _taken.total() == 1 else 0
    _taken.clear()
    return workers

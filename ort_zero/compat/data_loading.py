"""Count the batches that torch's data loaders yield."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

_taken: Counter[int] = Counter()
"""Number of batches since the last call of :func:`workers_of_one_batch`, by the number of the loader's workers."""


def count_batches() -> None:
    """Count the batches of all data loaders from now on; a second call does nothing."""
    original = _BaseDataLoaderIter.__next__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def __next__(self: Any) -> Any:
        batch = original(self)
        _taken[self._num_workers] += 1
        return batch

    _BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]


def workers_of_one_batch() -> int:
    """Return the number of workers of the loader that yielded exactly one batch since the last call; 0 if none did."""
    workers = next(iter(_taken)) if _taken.total() == 1 else 0
    _taken.clear()
    return workers

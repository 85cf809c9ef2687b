"""What of ``torch.distributed`` has no public name."""

from __future__ import annotations

from torch.distributed import Store
from torch.distributed.distributed_c10d import _get_default_store


def default_store() -> Store:
    """Return the key-value store through which the ranks of the default process group found each other.

    Raises:
        ValueError: no process group has been initialised.
    """
    return _get_default_store()

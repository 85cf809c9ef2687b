"""A process group of one rank for engines in the process of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_processes.ranks import free_port


@pytest.fixture(scope="session")
def group_of_one() -> Iterator[dict[str, str]]:
    """Make a process group of one rank, once: DeepSpeed keeps groups of it for the life of the process.

    For tests/dist alone: other tests of a worker would see the group, and statistics take their rank from it.

    Returns the variables of its environment.
    """
    import deepspeed
    import torch

    own = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in own.items():
            patch.setenv(key, value)
        deepspeed.init_distributed("gloo", verbose=False)
    yield own
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_rank(group_of_one, monkeypatch) -> None:
    """Let engines be made in this process, and no other test see the variables."""
    for key, value in group_of_one.items():
        monkeypatch.setenv(key, value)

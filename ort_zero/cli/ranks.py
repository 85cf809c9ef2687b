"""Run commands whose ranks share the work, if torchrun, deepspeed or mpirun starts several ranks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ort_zero.distributed import gloo_exit
from ort_zero.errors import CorruptCheckpointError, RankError
from ort_zero.utils.masking import masked

if TYPE_CHECKING:
    from ort_zero.distributed.raise_on_all_ranks import RankGroup

T = TypeVar("T")


def on_launched_ranks(
    command: str, args: argparse.Namespace, work: Callable[[RankGroup], T], tell: Callable[[T], None]
) -> int:
    """Do the work on the ranks of the launcher, or on a single rank, and return the exit status of this rank.

    All ranks must call this. Only rank 0 prints the report, and raises an error of the work.

    Args:
        args: options of the command; the ranks find each other through a folder near ``args.dst``.
    """
    from ort_zero.distributed import launched_ranks

    gloo_exit.settle_at_exit()
    ranks = launched_ranks.from_launcher(_rendezvous_folder(args.dst))
    try:
        report = work(ranks)
    except Exception as error:
        if ranks.rank == 0 or args.debug:
            raise
        # rank 0 raises the error; a rank that failed itself also prints its own
        if not isinstance(error, RankError):
            print(f"ort-zero {command}: rank {ranks.rank}: {masked(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, CorruptCheckpointError) else 2
    finally:
        ranks.close()
    if ranks.rank == 0:
        tell(report)
    return 0


def _rendezvous_folder(dst: str) -> str:
    """Return the nearest existing folder above `dst`, through which ranks may meet; a dry run makes no folder."""
    if "://" in dst:
        return dst
    path = os.path.abspath(dst)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path

"""Commands whose ranks share the work when torchrun, deepspeed or mpirun starts several of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ort_zero.distributed import gloo_exit
from ort_zero.errors import CorruptCheckpointError, RankError
from ort_zero.masking import masked

if TYPE_CHECKING:
    from ort_zero.distributed.process_group import RankGroup

T = TypeVar("T")


def on_launched_ranks(
    command: str, args: argparse.Namespace, work: Callable[[RankGroup], T], tell: Callable[[T], None]
) -> int:
    """Do the work on the ranks of the launcher, or on one without, and return the exit status of this rank.

    All ranks must call this. Rank 0 alone tells the report, and raises what went wrong.

    Args:
        command: name of the command, for messages of the other ranks.
        args: its options; the ranks meet near ``args.dst``.
        work: does this rank's part and returns the report.
        tell: prints the report.
    """
    from ort_zero.distributed import process_group

    gloo_exit.settle_at_exit()
    ranks = process_group.from_launcher(_rendezvous_folder(args.dst))
    try:
        report = work(ranks)
    except Exception as error:
        if ranks.rank == 0 or args.debug:
            raise
        # Rank 0 tells; a rank that failed itself adds which one it is.
        if not isinstance(error, RankError):
            print(f"ort-zero {command}: rank {ranks.rank}: {masked(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, CorruptCheckpointError) else 2
    finally:
        ranks.close()
    if ranks.rank == 0:
        tell(report)
    return 0


def _rendezvous_folder(dst: str) -> str:
    """Return the nearest folder above `dst` that exists: ranks may meet there, and a dry run makes none."""
    if "://" in dst:
        return dst
    path = os.path.abspath(dst)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path

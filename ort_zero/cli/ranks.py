"""Run commands whose ranks share the work, if torchrun, deepspeed or mpirun starts several ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

from ort_zero.cli import options_of, print_report
from ort_zero.distributed import gloo_exit
from ort_zero.errors import CorruptCheckpointError, RankError
from ort_zero.utils.masking import masked

T = TypeVar("T")
SHARED_WORK = """\
Exit status: 0 = written; 1 = the source is damaged; 2 = any other error. Started by torchrun, deepspeed or mpirun, the
ranks share the files:  torchrun --nproc_per_node 4 -m ort_zero {command} SRC DST
"""
"""The end of the help of commands whose ranks share the work."""


def on_launched_ranks(args: argparse.Namespace, function: Callable[..., T], text_of: Callable[[T], str]) -> int:
    """Call a function with the command's options on the ranks of the launcher; return this rank's exit status.

    All ranks must call this. Only rank 0 prints the report, and raises its error.
    """
    from ort_zero.distributed import launched_ranks

    gloo_exit.settle_at_exit()
    ranks = launched_ranks.from_launcher()
    try:
        report = function(ranks=ranks, **options_of(args, function))
    except Exception as error:
        if ranks.rank == 0 or args.debug:
            raise
        # rank 0 raises the error; a rank that failed itself also prints its own
        if not isinstance(error, RankError):
            print(f"ort-zero {args.command}: rank {ranks.rank}: {masked(str(error))}", file=sys.stderr)
        return 1 if isinstance(error, CorruptCheckpointError) else 2
    finally:
        ranks.close()
    if ranks.rank == 0:
        print_report(args, report, text_of)
    return 0

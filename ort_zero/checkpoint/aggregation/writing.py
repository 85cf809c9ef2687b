"""Write and publish the files of an aggregation on all ranks, after rank 0 has planned them."""

from __future__ import annotations

from ort_zero import env
from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile, split
from ort_zero.checkpoint.aggregation.publishing import Job, publish
from ort_zero.checkpoint.aggregation.streaming import Findings, Streamer
from ort_zero.checkpoint.files.storage import Folder
from ort_zero.checkpoint.piece_runs import first_and_count
from ort_zero.checkpoint.reads.record_checks import check_records_of
from ort_zero.checkpoint.records import MAX_NAMED
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

_MIN_BYTES_PER_THREAD = 16 << 20
"""Minimum number of bytes per thread: below it, another thread costs more time than it saves."""


def write(
    job: Job,
    folder: Folder,
    target: Folder,
    ranks: RankGroup,
    *,
    workers: int | None,
    verify: bool,
    strict: bool,
    shown: bool,
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Write and publish all files; return the warnings and the size in bytes of each file by name.

    All ranks must call. After an error before the files get their names, the destination has its earlier content.

    Args:
        job: the plan of rank 0.
        folder: folder of the checkpoint.
        target: the destination.
        ranks: all ranks of the aggregation.
        workers: threads per rank, or None for a number that suits the bytes to write.
        verify: compare the bytes that are read with their checksums.
        strict: refuse NaN, inf, and values too large for the dtype.
        shown: show a progress bar on rank 0.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged.
        CheckpointError: `workers` is below one, or `strict` refuses values.
        RankError: another rank failed.
    """
    rank_files = split(job.plan, ranks.rank, ranks.size)
    threads = _thread_count(workers, sum(file.size for file in rank_files))
    total = _source_bytes(rank_files)
    try:
        with (
            ranks.raise_on_all("writing"),
            bar(total, "aggregate", shown=shown and not ranks.rank) as progress,
        ):
            streamer = Streamer(
                folder,
                job.files,
                target,
                job.token,
                merges=job.merges,
                verify=verify,
                advance=progress.update,
            )
            streamer.write(rank_files, threads)
        if verify:
            check_records_of(folder, job.files, streamer.findings.parts, ranks)
        warnings = _warnings(ranks, streamer.findings)
        if strict and warnings:
            raise CheckpointError(f"{job.root}: {'; '.join(warnings)}; refused by --strict")
        return warnings, publish(job, rank_files, target, ranks)
    except BaseException:
        for file in job.plan.files:
            target.discard(file.name, job.token)
        raise


def _warnings(ranks: RankGroup, findings: Findings) -> tuple[str, ...]:
    """Return one warning per kind of value that the findings of all ranks report."""
    gathered = ranks.gather((findings.not_finite, findings.overflown))
    texts = ("NaN or inf in {}", "values too large for the dtype became inf in {}")
    names_by_text = (sorted(set().union(*(pair[i] for pair in gathered))) for i in range(len(texts)))
    return tuple(text.format(shortened(names, MAX_NAMED)) for text, names in zip(texts, names_by_text) if names)


def _source_bytes(files: tuple[OutputFile, ...]) -> int:
    pieces = (item for file in files for entry in file.entries for item in first_and_count(entry.tensor.pieces))
    return sum(count * piece.length for piece, count in pieces)


def _thread_count(requested: int | None, size: int) -> int:
    """Return the number of threads of a rank that writes `size` bytes.

    Raises:
        CheckpointError: `requested` is below 1.
    """
    if requested is not None and requested < 1:
        raise CheckpointError(f"workers is {requested}, must be at least 1")
    return requested or max(1, min(env.threads_per_rank(), size // _MIN_BYTES_PER_THREAD))

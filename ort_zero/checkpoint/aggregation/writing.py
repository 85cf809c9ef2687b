"""Writes and publishes the files of an aggregation that rank 0 has prepared, with all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ort_zero import env
from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile, Plan, split
from ort_zero.checkpoint.aggregation.aggregation_ranges import shares
from ort_zero.checkpoint.aggregation.aggregation_stream import Findings, Streamer
from ort_zero.checkpoint.aggregation.output_files import OutputFiles
from ort_zero.checkpoint.aggregation.publishing import Publication, publish
from ort_zero.checkpoint.files.storage import Folder, LocalFolder
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.piece_runs import first_and_count
from ort_zero.checkpoint.reads.record_checks import Part, check_record
from ort_zero.checkpoint.records import MOST_NAMED, File
from ort_zero.distributed.process_group import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

_LEAST_OF_A_THREAD = 16 << 20
"""Bytes below which another thread does not pay."""
_SHARES_PER_SLACK = 16
"""A share of what is written takes at most so many times what the cut beside it may be moved by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The decisions of rank 0, which all ranks know."""

    publication: Publication
    root: str
    files: Mapping[str, File]
    merges: Mapping[str, Merge]
    """What is added to weights, by name."""
    about: Mapping[str, Any]
    """The fields of the report that come from the source."""
    warnings: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """The files to write."""
        return self.publication.plan

    @property
    def token(self) -> str:
        """Part of the partial names of this run."""
        return self.publication.token


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
    """Write and publish everything; return the warnings and the size in bytes of each file of the plan.

    All ranks must call. After an error before the files get their names, the destination is as it was.

    Args:
        folder: the checkpoint.
        target: the destination.
        workers: threads of one rank, or None for as many as are worth it.
        verify: compare what is read with its checksums.
        strict: refuse NaN, inf and values that the dtype has no finite value for.
        shown: show a progress bar on rank 0.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged.
        CheckpointError: `workers` is below one, or `strict` refuses values.
        RankError: another rank failed.
    """
    mine = split(job.plan, ranks.rank, ranks.size)
    cut = [file for file in job.plan.files if target.takes_ranges and file.format == "safetensors"]
    whole = [file for file in mine if file not in cut]
    threads = _workers(workers, sum(file.size for file in job.plan.files), ranks.size)
    slack = sum(file.size for file in cut)
    if isinstance(folder, LocalFolder):  # there, a balance is worth more than bytes that lie in memory anyway
        slack //= threads * ranks.size * _SHARES_PER_SLACK
    ranges = shares(cut, threads * ranks.size, slack)[threads * ranks.rank :][:threads]
    total = _source_bytes(job.plan.files) // ranks.size
    outputs = OutputFiles(target, job.token)
    try:
        with (
            ranks.raise_on_all("writing"),
            bar(total, "aggregate", shown=shown and not ranks.rank) as progress,
        ):
            streamer = Streamer(folder, job.files, outputs.place_of, job.token, verify=verify, advance=progress.update)
            findings = streamer.findings

            def finish(file: OutputFile) -> None:
                _merge_lora(job, folder, file, outputs, findings, verify)
                outputs.finish(file)

            streamer.write(ranges, whole, threads, finish)
        if job.merges:
            with ranks.raise_on_all("merging LoRA"):
                for file in mine:
                    if file in cut:
                        _merge_lora(job, folder, file, outputs, findings, verify)
        if verify:
            _check_records(job, folder, ranks, findings.parts)
        warnings = _warnings(ranks, findings)
        if strict and warnings:
            raise CheckpointError(f"{job.root}: {'; '.join(warnings)}; refused by --strict")
        return warnings, publish(job.publication, mine, target, ranks)
    except BaseException:
        for file in job.plan.files:
            target.discard(file.name, job.token)
        raise
    finally:
        outputs.close()


def _merge_lora(
    job: Job, folder: Folder, file: OutputFile, outputs: OutputFiles, findings: Findings, verify: bool
) -> None:
    """Add LoRA to the base weights in a file whose data is there, if that is asked for."""
    if job.merges:
        from ort_zero.checkpoint.aggregation.lora_merge import merge_into

        place = outputs.place_of(file)
        findings.not_finite.update(merge_into(file, job.merges, folder, job.files, place, job.token, verify))


def _check_records(job: Job, folder: Folder, ranks: RankGroup, parts: list[Part]) -> None:
    """Compare the records of which any rank read a part; each rank takes its share of them."""
    read: dict[tuple[str, int], list[Part]] = {}
    for part in (part for some in ranks.gather(parts) for part in some):
        read.setdefault((part.file, part.record), []).append(part)
    with ranks.raise_on_all("checking"):
        for number, (name, start) in enumerate(sorted(read)):
            if number % ranks.size == ranks.rank:
                record = next(r for r in job.files[name].records if r[0] == start)
                check_record(folder, job.files[name], record, read[name, start])


def _warnings(ranks: RankGroup, findings: Findings) -> tuple[str, ...]:
    """Return what all ranks noticed about values, one sentence each."""
    gathered = ranks.gather((findings.not_finite, findings.overflown))
    texts = ("NaN or inf in {}", "values too large for the dtype became inf in {}")
    found = (sorted(set().union(*(pair[i] for pair in gathered))) for i in range(len(texts)))
    return tuple(text.format(shortened(names, MOST_NAMED)) for text, names in zip(texts, found) if names)


def _source_bytes(files: tuple[OutputFile, ...]) -> int:
    pieces = (item for file in files for entry in file.entries for item in first_and_count(entry.tensor.pieces))
    return sum(count * piece.length for piece, count in pieces)


def _workers(wanted: int | None, size: int, ranks: int) -> int:
    """Return how many threads of one rank write `size` bytes, of which all ranks write their share.

    Raises:
        CheckpointError: `wanted` is not above zero.
    """
    if wanted is not None and wanted < 1:
        raise CheckpointError(f"workers is {wanted}, must be at least 1")
    return wanted or max(1, min(env.threads_per_rank(), size // (ranks * _LEAST_OF_A_THREAD)))

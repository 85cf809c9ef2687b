"""Merge a sharded checkpoint into one model for ``transformers``, and its optimizer state by parameter name."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ort_zero import env
from ort_zero.checkpoint.aggregation.aggregation_plan import Plan, make_plan, split
from ort_zero.checkpoint.aggregation.destination import existing_names, make_folder, publish, removable_names
from ort_zero.checkpoint.aggregation.safetensors_files import open_safetensors
from ort_zero.checkpoint.aggregation.streaming import Streamer
from ort_zero.checkpoint.files.allowed_names import is_config_name
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.finding import find_source
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.model_files.config_files import ConfigFile, config_files_beside, with_dtype
from ort_zero.checkpoint.model_files.selection import ADAPTER, Selected, select
from ort_zero.checkpoint.pieces import first_and_count
from ort_zero.checkpoint.reads.checked_reads import check_records_of
from ort_zero.checkpoint.records import MAX_NAMED, File, Source
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.utils.garbage import collection_paused
from ort_zero.utils.masking import masked
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

_NO_LIMIT = 1 << 62
"""Bytes per file that no adapter reaches: PEFT reads a single file."""
_MIN_BYTES_PER_THREAD = 16 << 20
"""Minimum number of bytes per thread: below it, another thread costs more time than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateReport:
    """The report of :func:`aggregate`: the files that it wrote, or that a dry run would write."""

    source: str
    """Folder or URL of the checkpoint that was read."""
    source_format: str
    """Format of the checkpoint: "ort_zero", "deepspeed" or "dcp"."""
    tag: str
    step: int | None
    zero_stage: int
    world_size: int
    destination: str
    files: Mapping[str, int]
    """Size in bytes of each output file by name; approximate in a dry run with format "torch"."""
    copied: Mapping[str, str]
    """Folder or URL from which each configuration file is copied, by file name."""
    bytes: int
    tensors: int
    parameters: int
    """Number of elements of all parameters; tied parameters count once."""
    dtype: str
    """Requested dtype: "keep", "fp32", "fp16" or "bf16"."""
    verified: bool
    """True if all bytes that were read were compared with the checksums that the source has."""
    bytes_read: int
    """Bytes of the shards that all ranks together read."""
    seconds: float
    dry_run: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """An aggregation as rank 0 has planned it: what is read, written and published; the same on all ranks."""

    root: str
    files: Mapping[str, File]
    merges: Mapping[str, Merge]
    report: AggregateReport
    """The report of a dry run."""
    plan: Plan
    small_files: Mapping[str, bytes]
    token: str
    removable: frozenset[str]
    """Names of files of another model in the destination, which this one replaces or removes."""


@collection_paused()
def aggregate(
    src: str | os.PathLike,
    dst: str | os.PathLike,
    *,
    tag: str | None = None,
    what: str = "weights",
    dtype: str = "keep",
    max_shard_size: int | str = "5GB",
    format: str = "safetensors",
    workers: int | None = None,
    exclude_frozen: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    overwrite: bool = False,
    strict: bool = False,
    tp_split: Sequence[str] = (),
    strip_prefix: Sequence[str] = (),
    rename: Sequence[str] = (),
    merge_lora: bool = False,
    adapter: str | None = None,
    weights_from: str = "masters",
    base: str | os.PathLike | None = None,
    part: bool = False,
    ranks: RankGroup | None = None,
    progress: bool = True,
) -> AggregateReport:
    """Write the whole model of a sharded checkpoint into `dst`, with a few chunks in memory at a time.

    Files get their final names when all files are complete and checked; the index comes last. After an error or an
    interrupt before that moment, `dst` has its earlier content.

    Args:
        src: folder or fsspec URL: of one checkpoint of any format, or of several with a file ``latest``.
        dst: folder or fsspec URL to write into.
        tag: name of the checkpoint, if `src` holds several.
        what: "weights"; "weights+optimizer", also for :func:`~ort_zero.checkpoint.load_optimizer_state`; or "adapter"
            for PEFT's files alone.
        dtype: dtype of floating-point weights: "keep" (as stored; master weights rather than 16-bit weights), "fp32",
            "fp16" or "bf16". Optimizer state keeps its stored dtype.
        max_shard_size: bytes of tensors per file, as a number or "5GB", "2GiB".
        format: "safetensors", or "torch" for ``pytorch_model.bin``; optimizer state is safetensors in either case.
        workers: threads of one rank; by default ``OMP_NUM_THREADS``, else the rank's share of the cores.
        exclude_frozen: leave out parameters that the optimizer does not train.
        dry_run: write nothing; return the report of the files that would be written.
        verify: compare the bytes that are read with the checksums of the format.
        overwrite: allow a `dst` that is not empty. Files of the same names, the other files of a model in several
            files, and the optimizer's state are replaced or removed; other files stay. Weights under other names, which
            could be loaded in place of the new ones, are an error.
        strict: refuse weights with NaN or inf, or with values too large for `dtype`, instead of a warning.
        tp_split: how tensor-parallel ranks share tensors, if the checkpoint does not record it: rules such as
            "*.o_proj.weight=1", or names of JSON files of rules.
        strip_prefix: prefixes to remove from the names of tensors, one after the other.
        rename: ``FROM=TO``, a regular expression and its replacement, applied to the names without the prefixes.
        merge_lora: add LoRA's matrices to the base weights, in float32, and write the base model.
        adapter: name of the PEFT adapter, if the checkpoint holds several.
        weights_from: "masters", or "module" for weights of the module that are not the masters, cast.
        base: local folder or file of safetensors with the frozen parameters that the save left out.
        part: write a model without the frozen parameters that the save left out, also beside a ``config.json``.
        ranks: ranks that share the files; all must call.
        progress: show a progress bar on a terminal.

    Raises:
        CorruptCheckpointError: the source is damaged.
        CheckpointError: an argument is wrong, the source cannot be read, or `dst` cannot be written or is not empty.
        RankError: another rank failed.
    """
    started = time.perf_counter()
    ranks = ranks or RankGroup()
    target = open_folder(dst)
    job: Any = None
    with ranks.raise_on_all("preparing the aggregation"):
        if weights_from not in ("masters", "module"):
            raise CheckpointError(f"weights_from is {weights_from!r}, choose from masters, module")
        if ranks.rank == 0:
            source = find_source(os.fspath(src), tag, tp_split).with_weights_of(weights_from)
            configs = _configs(source, os.fspath(src))
            selected = select(
                source,
                {name: file.content for name, file in configs.items()},
                what=what,
                strip_prefix=strip_prefix,
                rename=rename,
                merge_lora=merge_lora,
                adapter=adapter,
            )
            is_adapter = what == ADAPTER
            if base is not None:
                selected = replace(selected, source=_filled(selected.source, os.fspath(base)))
            elif not (part or exclude_frozen):
                _refuse_part(selected, configs)
            plan = make_plan(
                selected.source,
                what="weights" if is_adapter else what,
                dtype=dtype,
                max_shard_size=_NO_LIMIT if is_adapter else max_shard_size,
                format=format,
                exclude_frozen=exclude_frozen,
                stem=selected.stem,
            )
            job = _prepare(selected, plan, configs, target, overwrite, dtype)
            if exclude_frozen and source.format == "dcp" and selected.source.frozen:
                frozen = shortened(sorted(selected.source.frozen), MAX_NAMED)
                note = f"--exclude-frozen leaves out what the optimizer has no state of, maybe also buffers: {frozen}"
                job = replace(job, report=replace(job.report, warnings=(*job.report.warnings, note)))
            if not dry_run:
                make_folder(target)
    job = ranks.broadcast(job)
    folder, report = open_folder(job.root), job.report
    if not dry_run:
        notes, sizes = _write(job, folder, target, ranks, workers=workers, verify=verify, strict=strict, shown=progress)
        report = replace(
            report,
            files={name: sizes[name] for name in report.files},
            bytes=sum(sizes.values()),
            verified=verify,
            dry_run=False,
            warnings=(*report.warnings, *notes),
        )
    return replace(report, bytes_read=sum(ranks.gather(folder.bytes_read)), seconds=time.perf_counter() - started)


def _filled(source: Source, base: str) -> Source:
    """Return the checkpoint with the parameters that its save left out, from the local model `base`.

    DeepSpeed's files do not name what a save left out: there these are all weights of `base` that the checkpoint lacks.
    """
    if any(not isinstance(open_folder(place), LocalFolder) for place in (source.root, base)):
        raise CheckpointError(f"--base takes a local model for a local checkpoint, not {base} for {source.root}")
    model = open_safetensors(base)
    stored = model.weights()
    stored |= {alias: stored[name] for alias, name in model.aliases.items()}
    lacking = sorted(source.left_out - stored.keys())
    if lacking:
        raise CheckpointError(f"{base} lacks {shortened(lacking, MAX_NAMED)}, which {source.root} was saved without")
    taken = sorted(source.left_out or stored.keys() - source.weights().keys() - source.aliases.keys())
    if not taken:
        raise CheckpointError(f"{source.root} has every weight of {base}: leave --base out")
    place = os.path.relpath(base if os.path.isdir(base) else os.path.dirname(base) or ".", source.root)
    more = [
        replace(
            stored[name], name=name, pieces=tuple(p._replace(file=f"{place}/{p.file}") for p in stored[name].pieces)
        )
        for name in taken
    ]
    files = {f"{place}/{name}": replace(file, name=f"{place}/{name}") for name, file in model.files.items()}
    notes = [note for note in source.notes if note not in source.remarks()]
    notes += replace(source, left_out=frozenset()).remarks()
    return replace(
        source,
        tensors=(*source.tensors, *more),
        files={**source.files, **files},
        left_out=frozenset(),
        notes=(*notes, f"{shortened(taken, MAX_NAMED)} are from {base}"),
    )


def _refuse_part(selected: Selected, configs: Mapping[str, ConfigFile]) -> None:
    """Raise CheckpointError if ``from_pretrained`` would draw parameters at random that the save left out."""
    source = selected.source
    if source.left_out and "config.json" in configs.keys() - selected.left_out:
        raise CheckpointError(
            f"{source.root} was saved without the frozen parameters {shortened(sorted(source.left_out), MAX_NAMED)}, "
            f"which from_pretrained would draw at random; --base MODEL takes them from a model, --part leaves them out"
        )


def _configs(source: Source, src: str) -> dict[str, ConfigFile]:
    refused = [name for name in source.config if not is_config_name(name)]
    if refused:  # checked again after the manifest's reader, since a name becomes a path here
        raise CheckpointError(f"{source.root} contains a file named {refused[0]!r}, which is no configuration file")
    stored = {name: ConfigFile(text.encode(), masked(source.root)) for name, text in source.config.items()}
    return {**config_files_beside(source.root, src), **stored}


def _prepare(
    selected: Selected, plan: Plan, configs: Mapping[str, ConfigFile], target: Folder, overwrite: bool, dtype: str
) -> _Job:
    """Check the destination; return the job for all ranks."""
    source = selected.source
    configs = {name: file for name, file in configs.items() if name not in selected.left_out}
    contents = {name: file.content for name, file in configs.items()}
    if "config.json" in contents:
        contents["config.json"] = with_dtype(contents["config.json"], plan.most_written_dtype())
    written = {file.name for file in plan.files} | plan.texts.keys()
    existing = existing_names(target, source.root, overwrite)
    removable = removable_names(target, existing, written)
    small_files = {**contents, **{name: text.encode() for name, text in plan.texts.items()}}
    sizes = {file.name: file.size for file in plan.files} | {name: len(data) for name, data in small_files.items()}
    report = AggregateReport(
        source=masked(source.root),
        source_format=source.format,
        tag=source.tag,
        step=source.step,
        zero_stage=source.zero_stage,
        world_size=source.world_size,
        destination=target.path(),
        files=sizes,
        copied={name: file.origin for name, file in configs.items()},
        bytes=sum(sizes.values()),
        tensors=plan.tensors,
        parameters=plan.parameters,
        dtype=dtype,
        verified=False,
        bytes_read=0,
        seconds=0.0,
        dry_run=True,
        warnings=tuple(map(masked, (*source.notes, *_missing_files(selected, contents, existing)))),
    )
    return _Job(
        root=source.root,
        files=source.files,
        merges=selected.merges,
        plan=plan,
        small_files=small_files,
        token=uuid.uuid4().hex[:8],
        removable=removable,
        report=report,
    )


def _missing_files(selected: Selected, small_files: Mapping[str, bytes], existing: list[str]) -> list[str]:
    """Return one sentence per kind of file that ``from_pretrained`` needs and that the destination will lack."""
    sentences = []
    has_code = any(name.endswith(".py") for name in existing)
    if not has_code and any(b'"auto_map"' in content for content in small_files.values()):
        sentences.append(
            "the configuration names Python code (auto_map), which is not copied: put its files into the destination"
        )
    if "config.json" not in {*small_files, *existing, *selected.left_out}:
        sentences.append(
            "no config.json beside the checkpoint: put the model's config.json into the destination for from_pretrained"
        )
    return sentences


def _write(
    job: _Job,
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
    """
    rank_files = split(job.plan, ranks.rank, ranks.size)
    threads = _thread_count(workers, sum(file.size for file in rank_files))
    stored = (item for file in rank_files for entry in file.entries for item in first_and_count(entry.tensor.pieces))
    total = sum(count * piece.length for piece, count in stored)
    try:
        with ranks.raise_on_all("writing"), bar(total, "aggregate", shown=shown and not ranks.rank) as progress:
            streamer = Streamer(
                folder, job.files, target, job.token, merges=job.merges, verify=verify, advance=progress.update
            )
            streamer.write(rank_files, threads)
        if verify:
            check_records_of(folder, job.files, streamer.parts, ranks)
        warnings = _warnings(ranks, streamer)
        if strict and warnings:
            raise CheckpointError(f"{job.root}: {'; '.join(warnings)}; refused by --strict")
        names = {file.name for file in job.plan.files}
        own = [file.name for file in rank_files]
        return warnings, publish(target, names, own, job.small_files, job.removable, job.token, ranks)
    except BaseException:
        for file in job.plan.files:
            target.discard(file.name, job.token)
        raise


def _warnings(ranks: RankGroup, streamer: Streamer) -> tuple[str, ...]:
    gathered = ranks.gather((streamer.not_finite, streamer.overflown))
    texts = ("NaN or inf in {}", "values too large for the dtype became inf in {}")
    names_by_text = (sorted(set().union(*(pair[i] for pair in gathered))) for i in range(len(texts)))
    return tuple(text.format(shortened(names, MAX_NAMED)) for text, names in zip(texts, names_by_text) if names)


def _thread_count(requested: int | None, size: int) -> int:
    if requested is not None and requested < 1:
        raise CheckpointError(f"workers is {requested}, must be at least 1")
    return requested or max(1, min(env.threads_per_rank(), size // _MIN_BYTES_PER_THREAD))

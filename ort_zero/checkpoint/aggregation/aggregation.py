"""Makes one model out of a sharded checkpoint: what ``transformers`` loads, and the optimizer by parameter name."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_zero import env
from ort_zero.checkpoint.aggregation import model_card as model_card_stub
from ort_zero.checkpoint.aggregation.aggregation_plan import OutputFile, Plan, make_plan, split
from ort_zero.checkpoint.aggregation.aggregation_ranges import shares
from ort_zero.checkpoint.aggregation.aggregation_stream import Findings, Streamer
from ort_zero.checkpoint.aggregation.output_files import OutputFiles
from ort_zero.checkpoint.aggregation.publishing import Publication, publish
from ort_zero.checkpoint.files.allowed_names import is_config_name, is_module_config_name
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.finding import open_found
from ort_zero.checkpoint.model_files import output_record, remote_code
from ort_zero.checkpoint.model_files.adapters import Merge
from ort_zero.checkpoint.model_files.config_files import ConfigFile, config_files_beside, with_dtype
from ort_zero.checkpoint.model_files.selection import ADAPTER, Choices, Selected, select
from ort_zero.checkpoint.opening import format_in
from ort_zero.checkpoint.reads.record_checks import Part, check_record
from ort_zero.checkpoint.records import MOST_NAMED, File, Source
from ort_zero.distributed.process_group import RENDEZVOUS, RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.masking import masked
from ort_zero.utils.atomic_write import PARTIAL
from ort_zero.utils.garbage import collection_paused
from ort_zero.utils.progress import bar
from ort_zero.utils.text import shortened

_OURS = re.compile(
    r"(model|optimizer|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5}(\.[0-9a-f]{8})?)?\.safetensors|(model|optimizer|diffusion_pytorch_model)\.safetensors\.index\.json|optimizer\.json"
    r"|(pytorch_model|adapter_model|diffusion_pytorch_model)(-\d{5}-of-\d{5}(\.[0-9a-f]{8})?)?\.bin"
    r"|(diffusion_)?pytorch_model\.bin\.index\.json"
)
_LEAST_OF_A_THREAD = 16 << 20
"""Bytes below which another thread does not pay."""
_UNCUT = 1 << 62
"""Number of bytes per file that no adapter reaches: PEFT reads a single file."""
_LEFT_OVER = re.compile(rf"\.(?P<name>.+?)(\.data)?\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateReport:
    """Report of :func:`aggregate`: what it wrote, or in a dry run would write."""

    source: str
    """Folder or URL of the checkpoint that was read."""
    source_format: str
    """Who wrote it: "ort_zero" or "deepspeed"."""
    tag: str
    step: int | None
    zero_stage: int
    world_size: int
    destination: str
    files: Mapping[str, int]
    """Size in bytes of each output file by name; approximate in a dry run of torch's format."""
    copied: Mapping[str, str]
    """Folder or URL that each configuration file comes from, by name."""
    bytes: int
    tensors: int
    parameters: int
    """Number of elements of all parameters, tied ones counted once."""
    dtype: str
    """Dtype that was asked for: "keep", "fp32", "fp16" or "bf16"."""
    verified: bool
    """True if what was read was compared with its checksums, as far as the source has any."""
    bytes_read: int
    """Number of bytes of the shards that all ranks together read."""
    seconds: float
    dry_run: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
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
    trust_pickle: bool = False,
    model_card: bool = False,
    tp_split: Sequence[str] = (),
    strip_prefix: Sequence[str] = (),
    rename: Sequence[str] = (),
    merge_lora: bool = False,
    adapter: str | None = None,
    ranks: RankGroup | None = None,
    progress: bool = True,
) -> AggregateReport:
    """Write the whole model of a sharded checkpoint into `dst`, file by file, a few chunks in memory at a time.

    Files get their final names when all of them are complete and checked; the index comes last. After an error or an
    interrupt before that, what was in `dst` is as it was.

    Args:
        src: folder or fsspec URL of a checkpoint of ours or DeepSpeed's, or of several with a file ``latest``.
        dst: folder or fsspec URL to write into.
        tag: which checkpoint of several.
        what: "weights", "weights+optimizer" for :func:`~ort_zero.checkpoint.load_optimizer_state` as well, or "adapter"
            for PEFT's files alone.
        dtype: dtype of floating-point weights: "keep" (as stored, masters before weights), "fp32", "fp16" or "bf16".
            Optimizer state keeps its own.
        max_shard_size: bytes of tensors per file, as a number or "5GB", "2GiB".
        format: "safetensors", or "torch" for ``pytorch_model.bin``; optimizer state is safetensors in either case.
        workers: threads of one rank; by default ``OMP_NUM_THREADS``, else its share of the cores.
        exclude_frozen: leave out what the optimizer does not train.
        dry_run: only say what would be written.
        verify: compare what is read with the checksums of the format.
        overwrite: allow a `dst` that is not empty. What an earlier call wrote there and nobody changed since is
            replaced or removed; other files stay, and one that has the name of a file of this function is refused.
        strict: refuse weights that hold NaN or inf, or that `dtype` has no finite value for; else they are warned of.
        trust_pickle: unpickle whatever DeepSpeed's files hold.
        model_card: write the stub of a model card as well, ``README.md``.
        tp_split: how tensor-parallel ranks share tensors, where the checkpoint does not say it itself: rules such as
            "*.o_proj.weight=1", or names of JSON files of rules.
        strip_prefix: beginnings that are taken off the names of tensors, one after the other.
        rename: ``FROM=TO`` of a regular expression and its replacement, applied to all names after that.
        merge_lora: add LoRA to the base weights, in float32, and write the base model.
        adapter: which adapter of PEFT, of several.
        ranks: ranks that share the files; all must call.
        progress: show a bar on a terminal.

    Raises:
        CorruptCheckpointError: the source is damaged.
        CheckpointError: bad choices, a source that cannot be read, a `dst` that cannot be written or is not empty.
        RankError: another rank failed.
    """
    started = time.perf_counter()
    ranks = ranks or RankGroup()
    target = open_folder(dst)
    job: Any = None
    with ranks.raise_on_all("preparing the aggregation"):
        if ranks.rank == 0:
            source = open_found(os.fspath(src), tag, trust_pickle, tp_split)
            beside = config_files_beside(source.root, os.fspath(src))
            choices = Choices(
                what=what, strip_prefix=strip_prefix, rename=rename, merge_lora=merge_lora, adapter=adapter
            )
            selected = _select(source, choices, beside, target)
            is_adapter = what == ADAPTER
            plan = make_plan(
                selected.source,
                what="weights" if is_adapter else what,
                dtype=dtype,
                max_shard_size=_UNCUT if is_adapter else max_shard_size,
                format=format,
                exclude_frozen=exclude_frozen,
                stem=selected.stem,
                places=selected.places,
            )
            job = _prepare(selected, plan, beside, target, overwrite, model_card)
            if not dry_run:
                for name in (*(file.name for file in plan.files), *job.publication.extras):
                    _make(target.child(name.rpartition("/")[0]) if "/" in name else target)
    job = ranks.broadcast(job)
    folder = open_folder(job.root)
    sizes = {file.name: file.size for file in job.plan.files}
    warnings = job.warnings
    if not dry_run:
        found, sizes = _write(job, folder, target, ranks, workers=workers, verify=verify, strict=strict, shown=progress)
        warnings += found
    sizes = {**sizes, **{name: len(data) for name, data in job.publication.small_files().items()}}
    return AggregateReport(
        **job.about,
        destination=target.path(),
        files=sizes,
        bytes=sum(sizes.values()),
        tensors=job.plan.tensors,
        parameters=job.plan.parameters,
        dtype=dtype,
        verified=verify and not dry_run,
        bytes_read=sum(ranks.gather(folder.bytes_read)),
        seconds=time.perf_counter() - started,
        dry_run=dry_run,
        warnings=warnings,
    )


def _select(source: Source, choices: Choices, beside: Mapping[str, ConfigFile], target: Folder) -> Selected:
    """Return what is written of the checkpoint.

    Raises:
        CheckpointError: see :func:`select`, or LoRA is to be merged into a remote file, which cannot be changed.
    """
    texts = {name: text.encode() for name, text in source.config.items()}
    selected = select(source, choices, {**{name: file.content for name, file in beside.items()}, **texts})
    if selected.merges and not isinstance(target, LocalFolder):
        raise CheckpointError(
            f"LoRA is merged in local files only: write to a local folder, then copy to {target.path()}"
        )
    return selected


def _prepare(
    selected: Selected,
    plan: Plan,
    beside: Mapping[str, ConfigFile],
    target: Folder,
    overwrite: bool,
    with_card: bool,
) -> _Job:
    """Return the job after the checks of the destination.

    Raises:
        CheckpointError: it lies in the checkpoint, or is not empty.
    """
    source = selected.source
    if _is_within(target.url, source.root):
        raise CheckpointError(f"the destination {target.path()} lies in the checkpoint {source.root}; choose another")
    there = _names(target)
    for inner in dict.fromkeys(name.rpartition("/")[0] for name in (*_written(plan), *beside) if "/" in name):
        there += [f"{inner}/{name}" for name in _names(target.child(inner))]
    others = [name for name in there if not _is_left_over(name) and name != output_record.NAME]
    if others and not overwrite:
        raise CheckpointError(
            f"the destination {target.path()} is not empty (it holds {others[0]}); choose another or pass --overwrite"
        )
    if format_in(target) is not None:  # another file in it would damage it
        raise CheckpointError(f"the destination {target.path()} is itself a checkpoint; choose another")
    odd = [name for name in source.config if not is_config_name(name)]
    if odd:  # the manifest's reader refuses it as well; here a name becomes a path
        raise CheckpointError(f"{source.root} brings a file named {odd[0]!r}, which is no configuration file")
    own = {name: text.encode() for name, text in source.config.items()}
    extras = {**{name: file.content for name, file in beside.items()}, **own}
    copied = {**{name: file.origin for name, file in beside.items()}, **dict.fromkeys(own, masked(source.root))}
    for name in selected.left_out:
        extras.pop(name, None)
        copied.pop(name, None)
    if "config.json" in extras:
        extras["config.json"] = with_dtype(extras["config.json"], plan.most_written_dtype())
    if with_card:
        extras[model_card_stub.NAME] = model_card_stub.model_card(source, plan, extras)
    removable = _removable(target, there, plan, extras)
    warnings = list(source.notes)
    code = [name for name in remote_code.missing_from(extras) if name not in there]
    if code:
        warnings.append(
            f"the configuration names remote code that is not beside the checkpoint: {', '.join(code)}; put it into "
            "the destination, from_pretrained needs it"
        )
    if "config.json" not in extras and "config.json" not in there and "config.json" not in selected.left_out:
        warnings.append(
            "no config.json beside the checkpoint: put the model's into the destination, from_pretrained needs it"
        )
    return _Job(
        publication=Publication(
            plan=plan, extras=extras, token=uuid.uuid4().hex[:8], there=frozenset(there), removable=removable
        ),
        root=source.root,
        files=source.files,
        merges=selected.merges,
        about={
            "source": masked(source.root),
            "source_format": source.format,
            "tag": source.tag,
            "step": source.step,
            "zero_stage": source.zero_stage,
            "world_size": source.world_size,
            "copied": copied,
        },
        warnings=tuple(map(masked, warnings)),
    )


def _removable(target: Folder, there: list[str], plan: Plan, extras: Mapping[str, bytes]) -> frozenset[str]:
    """Return the names in the destination that this run may replace or remove.

    Raises:
        CheckpointError: files that no record of ours names stand where files are written, or would be loaded with them.
    """
    ours = output_record.ours_among(target, there)
    written = _written(plan)
    foreign = [n for n in there if n not in ours and (n in written or _OURS.fullmatch(n.rpartition("/")[2]))]
    foreign += [n for n, data in extras.items() if n in there and n not in ours and not _holds(target, n, data)]
    if foreign:
        raise CheckpointError(
            f"the destination {target.path()} holds files that ort_zero did not write there, or that were changed "
            f"since: {shortened(sorted(foreign), MOST_NAMED)}; move them away, or choose another destination"
        )
    return frozenset(n for n in there if n in ours or _is_left_over(n) or n in extras)


def _written(plan: Plan) -> set[str]:
    """Return the names of the files of a plan, the small ones too."""
    return {file.name for file in plan.files} | plan.texts.keys()


def _holds(target: Folder, name: str, content: bytes) -> bool:
    return target.size(name) == len(content) and target.read(name) == content


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
    """Write and publish everything; return the warnings and the bytes of each file of the plan."""
    mine = split(job.plan, ranks.rank, ranks.size)
    cut = [file for file in job.plan.files if target.takes_ranges and file.format == "safetensors"]
    whole = [file for file in mine if file not in cut]
    threads = _workers(workers, sum(file.size for file in job.plan.files), ranks.size)
    ranges = shares(cut, threads * ranks.size)[threads * ranks.rank :][:threads]
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
    job: _Job, folder: Folder, file: OutputFile, outputs: OutputFiles, findings: Findings, verify: bool
) -> None:
    """Add LoRA to the base weights in a file whose data is there, if that is asked for."""
    if job.merges:
        from ort_zero.checkpoint.aggregation.lora_merge import merge_into

        place = outputs.place_of(file)
        findings.not_finite.update(merge_into(file, job.merges, folder, job.files, place, job.token, verify))


def _check_records(job: _Job, folder: Folder, ranks: RankGroup, parts: list[Part]) -> None:
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


def _is_left_over(name: str) -> bool:
    """Return True for what a run that was killed left: nobody else writes such names."""
    match = _LEFT_OVER.fullmatch(name.rpartition("/")[2])
    if match is None:
        return False
    name = match["name"]
    return (
        is_module_config_name(name)
        or name in (output_record.NAME, model_card_stub.NAME)
        or name.endswith(".py")
        or bool(_OURS.fullmatch(name))
    )


def _is_within(inner: str, outer: str) -> bool:
    if "://" not in inner and "://" not in outer:
        inner, outer = os.path.realpath(inner), os.path.realpath(outer)
    return f"{inner}/".startswith(f"{outer}/")


def _names(target: Folder) -> list[str]:
    try:
        return [name for name in target.names() if not name.startswith(RENDEZVOUS)]
    except OSError as error:
        raise CheckpointError(f"cannot write into {target.path()}: {error.strerror or error}") from error


def _make(target: Folder) -> None:
    try:
        target.make()
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {target.path()}: {error.strerror or error}") from error


def _source_bytes(files: tuple[OutputFile, ...]) -> int:
    return sum(piece.length for file in files for entry in file.entries for piece in entry.tensor.pieces)


def _workers(wanted: int | None, size: int, ranks: int) -> int:
    """Return how many threads of one rank write `size` bytes, of which all ranks write their share.

    Raises:
        CheckpointError: `wanted` is not above zero.
    """
    if wanted is not None and wanted < 1:
        raise CheckpointError(f"workers is {wanted}, must be at least 1")
    return wanted or max(1, min(env.threads_per_rank(), size // (ranks * _LEAST_OF_A_THREAD)))

"""Makes one model out of a sharded checkpoint: what ``transformers`` loads, and the optimizer by parameter name."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ort_zero.checkpoint.aggregation import model_card as model_card_stub
from ort_zero.checkpoint.aggregation.aggregation_plan import Plan, make_plan
from ort_zero.checkpoint.aggregation.destination import make_folder, names_there, removable_names
from ort_zero.checkpoint.aggregation.publishing import Publication
from ort_zero.checkpoint.aggregation.writing import Job, write
from ort_zero.checkpoint.files.allowed_names import is_config_name
from ort_zero.checkpoint.files.storage import Folder, LocalFolder, open_folder
from ort_zero.checkpoint.finding import open_found
from ort_zero.checkpoint.model_files import remote_code
from ort_zero.checkpoint.model_files.config_files import ConfigFile, config_files_beside, with_dtype
from ort_zero.checkpoint.model_files.selection import ADAPTER, Choices, Selected, select
from ort_zero.checkpoint.records import Source
from ort_zero.distributed.process_group import RankGroup
from ort_zero.errors import CheckpointError
from ort_zero.masking import masked
from ort_zero.utils.garbage import collection_paused

_UNCUT = 1 << 62
"""Number of bytes per file that no adapter reaches: PEFT reads a single file."""


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
                    make_folder(target.child(name.rpartition("/")[0]) if "/" in name else target)
    job = ranks.broadcast(job)
    folder = open_folder(job.root)
    sizes = {file.name: file.size for file in job.plan.files}
    warnings = job.warnings
    if not dry_run:
        found, sizes = write(job, folder, target, ranks, workers=workers, verify=verify, strict=strict, shown=progress)
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
) -> Job:
    """Return the job after the checks of the destination.

    Raises:
        CheckpointError: it lies in the checkpoint, is not empty, or the checkpoint brings a name that no model has.
    """
    source = selected.source
    written = {file.name for file in plan.files} | plan.texts.keys()
    there = names_there(target, source.root, (*written, *beside), overwrite)
    small_files, copied = _config_files(selected, plan, beside)
    if with_card:
        small_files[model_card_stub.NAME] = model_card_stub.model_card(source, plan, small_files)
    removable = removable_names(target, there, written, small_files)
    return Job(
        publication=Publication(
            plan=plan, extras=small_files, token=uuid.uuid4().hex[:8], there=frozenset(there), removable=removable
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
        warnings=tuple(map(masked, (*source.notes, *_what_is_missing(selected, small_files, there)))),
    )


def _config_files(
    selected: Selected, plan: Plan, beside: Mapping[str, ConfigFile]
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the content of each configuration file to write, and the folder or URL that it comes from, by name.

    Raises:
        CheckpointError: the checkpoint brings a name that is no configuration file's.
    """
    source = selected.source
    odd = [name for name in source.config if not is_config_name(name)]
    if odd:  # the manifest's reader refuses it as well; here a name becomes a path
        raise CheckpointError(f"{source.root} brings a file named {odd[0]!r}, which is no configuration file")
    own = {name: text.encode() for name, text in source.config.items()}
    contents = {**{name: file.content for name, file in beside.items()}, **own}
    origins = {**{name: file.origin for name, file in beside.items()}, **dict.fromkeys(own, masked(source.root))}
    for name in selected.left_out:
        contents.pop(name, None)
        origins.pop(name, None)
    if "config.json" in contents:
        contents["config.json"] = with_dtype(contents["config.json"], plan.most_written_dtype())
    return contents, origins


def _what_is_missing(selected: Selected, small_files: Mapping[str, bytes], there: list[str]) -> list[str]:
    """Return a sentence for each kind of file that ``from_pretrained`` needs and will not find."""
    sentences = []
    code = [name for name in remote_code.missing_from(small_files) if name not in there]
    if code:
        sentences.append(
            f"the configuration names remote code that is not beside the checkpoint: {', '.join(code)}; put it into "
            "the destination, from_pretrained needs it"
        )
    if "config.json" not in {*small_files, *there, *selected.left_out}:
        sentences.append(
            "no config.json beside the checkpoint: put the model's into the destination, from_pretrained needs it"
        )
    return sentences

"""Find values that no master tells: weights put into the module under ZeRO-1 and 2, and buffers that differ by rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from ort_zero import log
from ort_zero.checkpoint.records import MASTER, MAX_NAMED, MODULE
from ort_zero.checkpoint.saves.shard_writer import ShardEntry
from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.utils.text import shortened

Digests = Mapping[str, tuple[str, str]]
"""Dtype and shape, and the checksum of the values, of tensors by name."""
_STEP = 1 << 17
"""Number of elements that are cast at a time: they stay in the processor's cache."""


MasterDigests = Sequence[tuple[str, int, int, str]]
"""Name, first element, number of elements and checksum of masters, cast to the dtype of the module's weights."""


def master_digests(weights: Mapping[str, torch.Tensor], entries: Iterable[ShardEntry]) -> MasterDigests:
    """Return the digests of the masters among `entries`, cast to the dtypes of the module's `weights`."""
    return [
        (entry.name, entry.start, entry.tensor.numel(), _cast_digest(entry.tensor, weights[entry.name].dtype))
        for entry in entries
        if entry.kind == MASTER and entry.name in weights
    ]


def weights_unlike_masters(
    weights: Mapping[str, torch.Tensor], masters: MasterDigests, ranks: RankGroup
) -> list[ShardEntry]:
    """Return on rank 0 its weights of the module that are not the masters, cast, with a warning. All ranks must call.

    As in DeepSpeed, the module of rank 0 is the one that is saved.
    """
    everyone = ranks.gather(masters) if weights else []
    differing: set[str] = set()
    with ranks.raise_on_all("comparing the module's weights"):
        for name, start, length, digest in itertools.chain(*everyone) if ranks.rank == 0 else ():
            live = weights[name].narrow(0, start, length)
            if name not in differing and _cast_digest(live, live.dtype) != digest:
                differing.add(name)
    if differing:
        log.get_logger().warning(
            "the module's weights of %s are not the masters, cast: the checkpoint stores both",
            shortened([name for name in weights if name in differing], MAX_NAMED),
        )
    return [ShardEntry(name=n, kind=MODULE, start=0, tensor=w) for n, w in weights.items() if n in differing]


def _cast_digest(values: torch.Tensor, dtype: torch.dtype) -> str:
    """Return the checksum of flat values in another dtype; any NaN counts as the same.

    DeepSpeed's vector code writes other NaN than its scalar code.
    """
    digest = xxhash.xxh3_64()
    for part in values.detach().split(_STEP):
        cast = part.to(dtype).cpu()
        missing = cast.isnan()
        cast = cast.masked_fill(missing, torch.nan) if missing.any() else cast
        digest.update(cast.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, str]]:
    """Return the digests of tensors by name."""
    found = {}
    for name, tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).cpu().view(torch.uint8).numpy().data
        found[name] = (f"{tensor.dtype} {list(tensor.shape)}", xxhash.xxh3_64_hexdigest(raw))
    return found


def buffers_unlike_first(everyone: list[Digests], rank: int) -> set[str]:
    """Return the names of the buffers of `rank` that differ from rank 0's; rank 0 warns of all ranks' buffers."""
    first, mine = everyone[0], everyone[rank]
    differing = [name for name in first if any(other.get(name, first[name]) != first[name] for other in everyone)]
    if rank == 0 and differing:
        log.get_logger().warning(
            "the buffers %s differ between the ranks: each comes back to its rank on as many ranks; on another number "
            "all get rank 0's",
            shortened(differing, MAX_NAMED),
        )
    return {name for name in first.keys() & mine if mine[name] != first[name] and mine[name][0] == first[name][0]}

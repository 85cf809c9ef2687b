"""Find values that no master tells: weights put into the module under ZeRO-1 and 2, and buffers that differ by rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def changed_weights(weights: Mapping[str, torch.Tensor], entries: Iterable[ShardEntry]) -> set[str]:
    """Return the names of the masters among `entries` that, cast, are not the module's `weights`, bit by bit."""
    names = set()
    for entry in entries:
        if entry.kind == MASTER and entry.name in weights:
            live = weights[entry.name].narrow(0, entry.start, entry.tensor.numel())
            if not all(map(_is_cast, entry.tensor.split(_STEP), live.split(_STEP))):
                names.add(entry.name)
    return names


def _is_cast(masters: torch.Tensor, weights: torch.Tensor) -> bool:
    cast, live = masters.to(weights.dtype).cpu(), weights.cpu()
    if _digest(cast) == _digest(live):
        return True
    # any NaN counts as the same: DeepSpeed's vector code writes others than its scalar code
    return _digest(cast.masked_fill(cast.isnan(), torch.nan)) == _digest(live.masked_fill(live.isnan(), torch.nan))


def weights_unlike_masters(weights: Mapping[str, torch.Tensor], names: set[str], ranks: RankGroup) -> list[ShardEntry]:
    """Return on rank 0 its weights of the module that are not the masters, cast, with a warning. All ranks must call.

    `weights` are all of the module, flattened; `names` are those that differ from masters of this rank.
    """
    differing = set().union(*ranks.gather(names)) if weights else set()
    if not differing:
        return []
    with ranks.raise_on_all("comparing the module's weights"):
        mine = digests(weights.items())
    differing |= unlike_first(ranks.gather(mine))  # weights that rank 0 alone has changed, as DeepSpeed saves them
    chosen = [ShardEntry(name=n, kind=MODULE, start=0, tensor=w) for n, w in weights.items() if n in differing]
    if ranks.rank:
        return []
    log.get_logger().warning(
        "the module's weights of %s are not the masters, cast: the checkpoint stores both",
        shortened([entry.name for entry in chosen], MAX_NAMED),
    )
    return chosen


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, str]]:
    """Return the digests of tensors by name."""
    return {n: (f"{t.dtype} {list(t.shape)}", _digest(t.detach().contiguous().view(-1).cpu())) for n, t in tensors}


def unlike_first(everyone: list[Digests]) -> set[str]:
    """Return the names of rank 0's tensors of which another rank has other digests."""
    first, *others = everyone
    return {name for name in first if any(other.get(name, first[name]) != first[name] for other in others)}


def buffers_unlike_first(everyone: list[Digests], rank: int) -> set[str]:
    """Return the names of the buffers of `rank` that differ from rank 0's; rank 0 warns of all ranks' buffers."""
    first, mine = everyone[0], everyone[rank]
    if rank == 0 and (names := unlike_first(everyone)):
        log.get_logger().warning(
            "the buffers %s differ between the ranks: each comes back to its rank on as many ranks; on another number "
            "all get rank 0's",
            shortened([name for name in first if name in names], MAX_NAMED),
        )
    return {name for name in first.keys() & mine if mine[name] != first[name] and mine[name][0] == first[name][0]}


def _digest(values: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(values.view(torch.uint8).numpy().data)

"""Read checkpoints of ``torch.distributed.checkpoint`` (DCP) without torch and without the data of their tensors.

FSDP1, FSDP2, torchtitan, Lightning, Megatron (``torch_dist``), Accelerate and the Trainer write this format:

* ``.metadata``: a pickle with the shape of each tensor, its shards, and where each shard lies.
* ``__RANK_N.distcp``: the bytes of ``torch.save`` for each shard or value, one after the other.

:func:`.reader.open_dcp` returns a :class:`~ort_zero.checkpoint.records.Source`.
"""

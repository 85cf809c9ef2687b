"""Read checkpoints of ``torch.distributed.checkpoint`` (DCP) without torch and without the data of their tensors.

FSDP1, FSDP2, torchtitan, Lightning, Megatron (``torch_dist``), Accelerate and the Trainer write this format:

* ``.metadata``: a pickle with the shape of each tensor, its shards, and where each shard lies.
* ``__RANK_N.distcp``: the bytes of ``torch.save`` for each shard or value, one after the other.
* A shard is a block of an n-dimensional tensor; :mod:`.blocks` makes ranges of elements out of the blocks.
* :mod:`.names` tells weights, optimizer states and other values apart by their keys.
* :mod:`.rank_files` reads files of single ranks, each one ``torch.save`` of a state dict of DTensors.
* :mod:`.safetensors_shards` reads the folders of torch's ``HuggingFaceStorageWriter``.

:func:`.reader.open_dcp` joins all of this to a :class:`~ort_zero.checkpoint.records.Source`.
"""

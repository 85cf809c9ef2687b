"""Put a seed into each Dropout node of an exported model."""

from __future__ import annotations

import zlib

import onnx
from onnx import helper

_SEEDS = 1 << 31


def seed_dropout(model: onnx.ModelProto) -> None:
    """Give every Dropout node a seed made of its name, in place.

    With a seed of its own a node draws the same masks whatever else runs, and ORT's memory optimizer, which gives
    seeds to what it computes again, changes nothing.
    """
    for node in model.graph.node:
        if node.op_type == "Dropout" and not node.domain and not any(a.name == "seed" for a in node.attribute):
            seed = zlib.crc32(node.output[0].encode()) % _SEEDS
            node.attribute.append(helper.make_attribute("seed", seed))


def with_run_seed(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """Return `model` whose nodes draw other random numbers for each `seed`; a copy draws what its original draws."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        for attribute in node.attribute:
            if attribute.name == "seed" and attribute.type == onnx.AttributeProto.INT:
                attribute.i = (attribute.i + seed) % _SEEDS
    return result

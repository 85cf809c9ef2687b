"""What goes where in an aggregation: sizes, sharding, headers, names, the share of each rank."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load, save

from ort_zero.checkpoint.aggregation.aggregation_plan import make_plan, split
from ort_zero.checkpoint.files import safetensors_header
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.records import BUFFER, MASTER, WEIGHT, Optimizer, ParamGroup, Piece, Source, Tensor
from ort_zero.checkpoint.saves.checkpoint_writer import ShardEntry, write_shard
from ort_zero.errors import CheckpointError


def tensor(name: str, *shape: int, kind: str = MASTER, dtype: str = "F32") -> Tensor:
    whole = Tensor(name=name, kind=kind, dtype=dtype, shape=shape, pieces=())
    return Tensor(name=name, kind=kind, dtype=dtype, shape=shape, pieces=(Piece("f", 0, whole.nbytes, 0),))


def source(*tensors: Tensor, **changes) -> Source:
    fields = dict(
        format="ort_zero", root="/ckpt", tag="t", step=1, world_size=1, zero_stage=1, tensors=tensors, files={},
        aliases={}, frozen=frozenset(), optimizer=None,
    )  # fmt: skip
    return Source(**{**fields, **changes})


@pytest.mark.parametrize("text", ["", "GB", "5G", "0"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(CheckpointError, match="is not a size; write it as 5GB"):
        make_plan(source(tensor("a", 2)), max_shard_size=text)


def test_files_are_filled_in_order_and_a_large_tensor_has_its_own():
    plan = make_plan(source(*(tensor(n, k) for n, k in zip("abcde", (2, 2, 9, 1, 3)))), max_shard_size=16)
    assert [[e.name for e in f.entries] for f in plan.files] == [["a", "b"], ["c"], ["d", "e"]]
    assert [f.name for f in plan.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads(plan.texts["model.safetensors.index.json"])
    assert index["metadata"] == {"total_size": 17 * 4}
    assert index["weight_map"]["c"] == "model-00002-of-00003.safetensors" and len(index["weight_map"]) == 5
    assert plan.tensors == 5 and plan.parameters == 17


def test_masters_before_weights_and_only_floats_are_cast():
    plan = make_plan(
        source(
            tensor("a", 2, kind=WEIGHT, dtype="BF16"),
            tensor("a", 2),
            tensor("n", kind=BUFFER, dtype="I64"),
            tensor("m", 2, kind=BUFFER),
        ),
        dtype="fp16",
    )
    assert [(e.name, e.dtype, e.tensor.kind, e.offset) for e in plan.files[0].entries] == [
        ("n", "I64", BUFFER, 0),
        ("a", "F16", MASTER, 8),
        ("m", "F16", BUFFER, 12),
    ]
    assert plan.parameters == 2


def test_the_header_is_what_the_library_reads_and_writes():
    values = {"wide": torch.arange(3), "b": torch.rand(2, 3), "a": torch.rand(5), "c": torch.tensor([True, False])}
    plan = make_plan(source(*(tensor(n, *v.shape, dtype={"wide": "I64", "c": "BOOL"}.get(n, "F32"))
                              for n, v in values.items())))  # fmt: skip
    file = plan.files[0]
    data = file.header + b"".join(values[e.name].numpy().tobytes() for e in file.entries)
    assert len(file.header) % 8 == 0 and len(data) == file.size
    loaded = load(data)
    assert loaded.keys() == values.keys() and all(torch.equal(loaded[n], values[n]) for n in values)
    library = save({"b": values["b"]}, {"format": "pt"})
    assert make_plan(source(tensor("b", 2, 3))).files[0].header == library[:-24]


def test_a_header_longer_than_the_library_reads_is_refused_for_either_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MAX_HEADER_BYTES", 100)
    with pytest.raises(CheckpointError, match="too many tensors .*, choose a smaller --max-shard-size"):
        make_plan(source(tensor("a", 2), tensor("b", 2)))
    entries = [ShardEntry(name=n, kind=MASTER, start=0, tensor=torch.zeros(2)) for n in "ab"]
    with pytest.raises(CheckpointError, match='too many tensors .*"sharded": false'):
        write_shard(open_folder(tmp_path), "shard.safetensors", entries, {}, "t")
    assert not list(tmp_path.iterdir())


def test_aliases_are_notes_in_the_file_of_their_tensor():
    kinds = {"safetensors": False, "torch": True}
    for format, promised in kinds.items():
        plan = make_plan(
            source(tensor("a", 4), tensor("b", 4), aliases={"tied": "b"}), max_shard_size=16, format=format
        )
        assert [dict(f.aliases) for f in plan.files] == [{}, {"tied": "b"}]
        assert b'"tied":"b"' in plan.files[1].header and b"tied" not in plan.files[0].header
        (index,) = plan.texts.values()
        assert ("tied" in json.loads(index)["weight_map"]) is promised


def test_frozen_parameters_and_their_ties_can_be_left_out():
    plan = make_plan(
        source(tensor("a", 4), tensor("ice", 4, kind=WEIGHT), frozen=frozenset({"ice"}), aliases={"t": "ice"}),
        exclude_frozen=True,
    )
    assert [e.name for e in plan.files[0].entries] == ["a"] and b"ice" not in plan.files[0].header


def test_optimizer_state_is_keyed_by_state_and_name_and_keeps_its_dtype():
    moments = [tensor(n, 4, kind=k) for n in ("a", "b") for k in ("exp_avg", "exp_avg_sq")]
    optimizer = Optimizer(
        class_name="AdamW",
        groups=(ParamGroup(names=("a",), options={"lr": 0.1}), ParamGroup(names=("b",), options={"lr": 0.2})),
        scalars={"step": {"a": 3.0, "b": 3.0}},
    )
    plan = make_plan(
        source(tensor("a", 4), tensor("b", 4), *moments, optimizer=optimizer),
        what="weights+optimizer",
        dtype="bf16",
        max_shard_size=32,
    )
    assert [f.name for f in plan.files] == [
        "model.safetensors", "optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors",
    ]  # fmt: skip
    assert [(e.name, e.dtype) for e in plan.files[1].entries] == [("exp_avg/a", "F32"), ("exp_avg_sq/a", "F32")]
    about = json.loads(plan.texts["optimizer.json"])
    assert about["class"] == "AdamW" and about["states"] == ["exp_avg", "exp_avg_sq"]
    assert about["groups"][1] == {"names": ["b"], "options": {"lr": 0.2}} and about["scalars"]["step"]["a"] == 3.0
    assert list(plan.texts) == ["optimizer.safetensors.index.json", "optimizer.json"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (source(tensor("a", 2), tensor("a", 3)), r"name clash in /ckpt: two tensors \(master\) are named 'a'"),
        (source(tensor("a", 2), tensor("a", 2, kind=BUFFER)), "a parameter and a buffer are named 'a'"),
        (source(tensor("a", 2), tensor("b", 2), aliases={"b": "a"}), "'b' is a tensor and an alias of 'a'"),
        (source(tensor("__metadata__", 2)), "no tensor may be named '__metadata__'"),
        (source(tensor("a", 2), aliases={"b": "gone"}), "'b' is tied to 'gone', which the checkpoint does not hold"),
        (source(tensor("a", 2, kind="exp_avg")), "holds no weights"),
    ],
)
def test_names_that_clash_or_lead_nowhere_are_refused(what, message):
    with pytest.raises(CheckpointError, match=message):
        make_plan(what)


@pytest.mark.parametrize("wrong", [{"what": "all"}, {"dtype": "fp8"}, {"format": "gguf"}])
def test_unknown_choices_are_named(wrong):
    (name,) = wrong
    with pytest.raises(CheckpointError, match=f"{name} is .*, choose from"):
        make_plan(source(tensor("a", 2)), **wrong)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_ranks_share_all_files_once_and_evenly(size):
    plan = make_plan(source(*(tensor(f"t{i}", 100 + i % 5) for i in range(20))), max_shard_size=4)
    shares = [split(plan, rank, size) for rank in range(size)]
    assert sorted(f.name for share in shares for f in share) == [f.name for f in plan.files]
    loads = [sum(f.size for f in share) for share in shares]
    assert max(loads) - min(loads) <= max(f.size for f in plan.files)


@pytest.mark.parametrize("seed", range(20))
def test_no_file_can_be_moved_to_a_rank_that_writes_less(seed):
    draw = random.Random(seed)
    size = draw.randint(2, 5)
    tensors = [
        tensor(f"t{i}", draw.choice([10, 300, 5000, draw.randint(1, 40_000)])) for i in range(draw.randint(2, 30))
    ]
    shares = [split(make_plan(source(*tensors), max_shard_size=4), rank, size) for rank in range(size)]
    loads = [sum(f.size for f in share) for share in shares]
    for share, written in zip(shares, loads):
        if share:
            assert written - min(f.size for f in share) <= min(loads)

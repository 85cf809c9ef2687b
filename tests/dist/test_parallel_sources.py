"""Our readers of DeepSpeed's pipeline, expert-parallel, tensor-parallel and universal checkpoints, bit by bit.

What they make of the files is compared with what the ranks themselves held and gathered. One launch writes everything.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed_checkpoints import assert_same, bits, read, values
from parallel_checkpoints import ALL, SPLITS, STEPS, WORLD, Variant, resume, written
from rank_processes.ranks import run_on_ranks
from safetensors.torch import load_file

from ort_zero.checkpoint.aggregation.aggregation import aggregate
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.deepspeed.tensor_parallel import SplitUnknownError
from ort_zero.checkpoint.finding import find_source
from ort_zero.checkpoint.inspection.differences import diff
from ort_zero.checkpoint.inspection.listing import list_checkpoints
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.records import MASTER
from ort_zero.errors import CheckpointError, CorruptCheckpointError

RULES = [f"{name}={dim}/{fused}" if fused > 1 else f"{name}={dim}" for name, (dim, fused) in SPLITS.items()]
UNIVERSAL = [variant for variant in ALL if variant.universal]


def rules(variant: Variant) -> list[str]:
    return RULES if variant.train == "megatron" else []


@pytest.fixture(params=ALL, ids=lambda variant: variant.name)
def case(request, tmp_path_factory):
    root, held = written(tmp_path_factory)
    return request.param, root / request.param.name / "step", held[request.param.name]


def test_all_values_are_those_that_the_ranks_held(case):
    variant, folder, held = case
    source = find_source(str(folder), tp_split=rules(variant))
    assert (source.world_size, source.zero_stage, source.step) == (WORLD, variant.stage, STEPS)
    for kind in (MASTER, "exp_avg", "exp_avg_sq"):
        assert_same(values(source, kind), held.get(kind, {}))
    weights = {name: read(source, tensor) for name, tensor in source.weights().items()}
    weights |= {alias: weights[name] for alias, name in source.aliases.items()}
    expected = held["module"] | held.get(MASTER, {})
    if variant.stage == 3:  # there the ranks' modules hold no values
        assert set(weights) - set(held[MASTER]) == {"frozen.weight", "table"}
        expected |= {name: weights[name] for name in ("frozen.weight", "table")}
        assert weights["table"].equal(torch.arange(5.0)) and weights["frozen.weight"].shape == (8, 6)
    assert_same(weights, expected)
    if MASTER in held:
        groups = source.optimizer.groups
        assert sorted(n for group in groups for n in group.names) == sorted(held[MASTER])
        assert all(group.options["lr"] == 0.01 for group in groups)
        assert source.optimizer.scalars["step"] == dict.fromkeys(held[MASTER], float(STEPS))
    else:
        assert source.optimizer is None and any("the weights are from the module file" in note for note in source.notes)


def test_commands_read_every_variant(case, tmp_path):
    variant, folder, held = case
    expected = find_source(str(folder), tp_split=rules(variant))
    if variant.train == "megatron":
        with pytest.raises(SplitUnknownError, match="--tp-split"):
            convert(folder, tmp_path / "ours", progress=False)
        assert list_checkpoints(folder)[0].whole is None and not (tmp_path / "ours").exists()
    report = verify(str(folder), progress=False, tp_split=rules(variant))
    assert report.ok and report.tensors, report.problems
    what = "weights+optimizer" if MASTER in held else "weights"
    aggregate(folder, tmp_path / "out", what=what, tp_split=rules(variant), progress=False)
    made = load_file(tmp_path / "out" / "model.safetensors")
    weights = held.get(MASTER) or held["module"]
    assert_same({name: made[name] for name in weights}, weights)
    if MASTER in held:
        moments = load_file(tmp_path / "out" / "optimizer.safetensors")
        assert_same(moments, {f"{kind}/{n}": v for kind in ("exp_avg", "exp_avg_sq") for n, v in held[kind].items()})
    convert(folder, tmp_path / "ours", world_size=3, tp_split=rules(variant), progress=False)
    made = find_source(str(tmp_path / "ours"))
    assert verify(str(tmp_path / "ours"), progress=False).ok and made.world_size == 3
    for kind in {tensor.kind for tensor in expected.tensors}:
        assert_same(values(made, kind), values(expected, kind))
    assert (made.optimizer is None) == (MASTER not in held)
    assert diff(folder, tmp_path / "ours", tp_split=rules(variant), progress=False).same
    (listed,) = list_checkpoints(folder, tp_split=rules(variant))
    assert listed.whole and (listed.step, listed.zero_stage) == (STEPS, variant.stage)


@pytest.mark.parametrize("variant", UNIVERSAL, ids=lambda variant: variant.name)
def test_universal(variant: Variant, tmp_path_factory, tmp_path):
    root, every = written(tmp_path_factory)
    held, folder = every[variant.name], root / f"{variant.name}_universal" / "step"
    source = find_source(str(folder))
    for kind in (MASTER, "exp_avg", "exp_avg_sq"):
        assert_same(values(source, kind), held[kind])
    plain = find_source(str(root / variant.name / "step"))
    assert source.optimizer == plain.optimizer and (source.step, source.zero_stage) == (STEPS, variant.stage)
    others = {name: read(plain, tensor) for name, tensor in plain.weights().items() if name not in held[MASTER]}
    if variant.train == "pipeline":  # DeepSpeed's converter leaves them behind
        assert set(others) == {f"{layer}.seen" for layer in (0, 1, 3, 4)}
        assert any("0.seen, 1.seen, 3.seen, 4.seen" in note for note in source.notes)
        others = {}
    weights = {name: read(source, tensor) for name, tensor in source.weights().items()}
    assert_same(weights, held[MASTER] | others)
    assert source.frozen == (frozenset() if variant.train == "pipeline" else {"frozen.weight"})
    report = verify(str(folder), progress=False)
    assert report.ok and report.files == len(list(folder.rglob("*.pt"))), report.problems
    aggregate(folder, tmp_path / "out", what="weights+optimizer", progress=False)
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert_same({name: made[name] for name in held[MASTER]}, held[MASTER])


def test_resumed_on_other_ranks_with_the_whole_model_on_each(tmp_path_factory):
    root, held = written(tmp_path_factory)
    names = ["autotp_1_bf16", "autotp_tied", "plain_2_bf16_universal", "plain_3_universal"]
    resumed = run_on_ranks(resume, 2, str(root), names, timeout=800)[0]
    for name in names:
        expected = held[name.removesuffix("_universal")]
        for kind in (MASTER, "exp_avg", "exp_avg_sq"):
            assert_same(resumed[name][kind], expected[kind])
        plain = find_source(str(root / name.removesuffix("_universal") / "step"))
        frozen = read(plain, plain.weights()["frozen.weight"])
        assert bits(resumed[name]["module"]["frozen.weight"]) == bits(frozen.float())
        assert resumed[name]["module"]["table"].equal(torch.arange(5.0)) and resumed[name]["steps"]["global"] == STEPS


# ---- what is wrong --------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path_factory, tmp_path):
    def make(name: str) -> Path:
        return Path(shutil.copytree(written(tmp_path_factory)[0] / name / "step", tmp_path / name / "step"))

    return make


REMOVED = [
    ("pipeline_1_bf16", "layer_03-model_states.pt"),
    ("pipeline_1_bf16", "mp_rank_01_model_states.pt"),
    ("pipeline_model", "layer_01-model_01-model_states.pt"),
    ("experts_1", "layer_0_expert_3_mp_rank_00_model_states.pt"),
    ("experts_1", "zero_pp_rank_2_mp_rank_00_optim_states.pt"),
    ("megatron_3", "zero_pp_rank_1_mp_rank_01_model_states.pt"),
    ("plain_3_universal", "zero/up.weight/fp32.pt"),
]


@pytest.mark.parametrize(("name", "file"), REMOVED)
def test_a_missing_file_is_named(copy, name, file):
    folder = copy(name)
    (folder / file).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{file} is missing"):
        find_source(str(folder), tp_split=RULES)
    report = verify(str(folder), progress=False, tp_split=RULES)
    assert len(report.problems) == 1 and f"{file} is missing" in report.problems[0]


# without ZeRO nothing but the optimizer's states tells that there is another layer
def test_the_last_layer_of_a_pipeline_without_zero_is_missed(copy):
    folder = copy("pipeline_0")
    sorted(folder.glob("layer_*"))[-1].unlink()
    with pytest.raises(CorruptCheckpointError, match="layer.* is missing"):
        find_source(str(folder))
    report = verify(str(folder), progress=False)
    assert len(report.problems) == 1 and "is missing" in report.problems[0]


def test_the_optimizers_of_experts_without_zero_are_checked(copy):
    folder = copy("experts_0")
    assert any("saved without ZeRO, and is not read" in note for note in find_source(str(folder)).notes)
    path = folder / "expp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (problem,) = verify(str(folder), progress=False).problems
    assert path.name in problem


SWAPPED = [
    ("megatron_2", "mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
    ("megatron_2", "zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_0_mp_rank_01_optim_states.pt"),
    ("pipeline_1_bf16", "layer_00-model_states.pt", "layer_01-model_states.pt"),
    ("experts_1", "layer_0_expert_0_mp_rank_00_model_states.pt", "layer_0_expert_2_mp_rank_00_model_states.pt"),
]


@pytest.mark.parametrize(("name", "one", "other"), SWAPPED)
def test_swapped_files_are_found(copy, name, one, other):
    folder = copy(name)
    (folder / one).rename(folder / "x")
    (folder / other).rename(folder / one)
    (folder / "x").rename(folder / other)
    with pytest.raises(CorruptCheckpointError, match=f"{one}.* was written as {Path(other).stem}.pt"):
        find_source(str(folder), tp_split=RULES)


def test_without_rules_the_split_is_asked_for_by_name(copy):
    folder = copy("megatron_1_bf16")
    with pytest.raises(SplitUnknownError, match=r"embed.weight \[4, 6\], .*--tp-split.*o_proj") as caught:
        find_source(str(folder))
    text = str(caught.value)
    assert all(name in text for name in SPLITS) and "norm.weight" not in text and "down.bias" not in text
    report = verify(str(folder), progress=False)
    assert report.ok and any("cannot be put together yet" in note for note in report.notes)


def test_a_file_of_rules_and_rules_that_do_not_fit(copy, tmp_path):
    folder = copy("megatron_1_bf16")
    table = {rule.partition("=")[0]: rule.partition("=")[2] for rule in RULES}
    (tmp_path / "rules.json").write_text(json.dumps(table))
    expected = find_source(str(folder), tp_split=RULES)
    assert find_source(str(folder), tp_split=[str(tmp_path / "rules.json")]).tensors == expected.tensors
    for rule, reason in (
        ("up.weight=2", "no dimension 2"),
        ("up.weight=replicated", "different values of up.weight"),
        ("up.weight=0/3", "not 3 fused tensors"),
        ("up.weight=x", "is no rule"),
        ("no_file", "neither a rule nor a file"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            find_source(str(folder), tp_split=[rule, *RULES])


def test_sizes_in_config_json_tell_the_split(copy):
    folder = copy("megatron_1_bf16")
    config = {"model_type": "x", "hidden_size": 6, "intermediate_size": 8}
    (folder / "config.json").write_text(json.dumps(config))
    fused = ["gate_up.weight=0/2", "out.weight=1"]  # 6 x 6 on each rank: both dimensions are sizes of the model
    source = find_source(str(folder), tp_split=fused)
    assert source.tensors == find_source(str(folder), tp_split=RULES).tensors
    assert any("config.json" in note and "down.weight" in note for note in source.notes)


def test_megatrons_own_notes_tell_the_split(copy):
    folder = copy("megatron_1_bf16")
    before = find_source(str(folder), tp_split=RULES)
    expected = {(tensor.kind, tensor.name): read(before, tensor) for tensor in before.tensors}
    for path in folder.glob("mp_rank_*"):
        info = {
            "universal_checkpoint_version": 0.2,
            "parameter_with_row_parallelism_patterns": ["down.weight", "out.weight"],
            "tp_replicated_parameter_patterns": ["norm.*", "down.bias"],
            "parameter_with_2_sub_params_cat_dim_0": ["gate_up.weight"],
            "vocabulary_parameter_patterns": ["embed.weight"],
            "original_vocab_size": 7,
        }
        torch.save({**torch.load(path, weights_only=False), "universal_checkpoint_info": info}, path)
    source = find_source(str(folder))
    assert {(tensor.kind, tensor.name) for tensor in source.tensors} == expected.keys()
    for tensor in source.tensors:
        whole = expected[tensor.kind, tensor.name]
        assert bits(read(source, tensor)) == bits(whole[:7] if tensor.name == "embed.weight" else whole), tensor.name

"""The reader of DeepSpeed's checkpoints on files of their structure: what it reads, and what it refuses."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_checkpoints import read
from deepspeed_states import GROUPS, MASTERS, deepspeed_names, module_values, write

from ort_zero.checkpoint import torch_file
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.finding import open_checkpoint
from ort_zero.checkpoint.inspection.verification import verify
from ort_zero.checkpoint.records import MASTER
from ort_zero.checkpoint.restored_values import restored
from ort_zero.checkpoint.restricted_pickle.values import StoredTensor, TorchConstant
from ort_zero.errors import CheckpointError, CorruptCheckpointError

OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
RANK_MODULE = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
MODULE = "mp_rank_00_model_states.pt"
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class Foreign:
    """A class that DeepSpeed does not write."""

    made = 0

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: dict) -> None:
        Foreign.made += 1


@STAGES
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_every_value_is_found(tmp_path, stage, world):
    held = write(tmp_path / "c", stage, world)
    source = open_checkpoint(str(tmp_path / "c"))
    for kind in MASTERS:
        assert {n: read(source, t).tolist() for n, t in source.by_name(kind).items()} == {
            n: v.tolist() for n, v in held[kind].items()
        }
    mine = {name: read(source, source.weights()[name]) for name in ("ice", "count")}
    assert all(mine[name].equal(value) for name, value in module_values().items())
    assert source.aliases == {"head.weight": "embed.weight", "tied.weight": "embed.weight"}
    assert source.frozen == {"ice"} and source.step == 4 and not source.notes
    assert source.optimizer.class_name == "AdamW"
    assert [g.names for g in source.optimizer.groups] == [tuple(g) for g in GROUPS]
    assert source.optimizer.groups[0].options == {"lr": 0.1, "betas": [0.9, 0.95]}
    assert source.optimizer.scalars == {"step": dict.fromkeys(held["master"], 4.0)}
    assert all(piece.length for tensor in source.tensors for piece in tensor.pieces)


def test_a_transposed_frozen_parameter_keeps_its_strides(tmp_path):
    write(tmp_path / "c", 1, 2)
    assert open_checkpoint(str(tmp_path / "c")).weights()["ice"].strides == (1, 3)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_padding_after_each_parameter(tmp_path, world):
    held = write(tmp_path / "c", 2, world, paddings=True)
    source = open_checkpoint(str(tmp_path / "c"))
    assert all(read(source, t).equal(held["exp_avg"][n]) for n, t in source.by_name("exp_avg").items())
    assert all(read(source, t).equal(held["master"][n]) for n, t in source.by_name(MASTER).items())


def test_files_of_a_gpu_run_are_read_without_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    held = write(tmp_path / "c", 3, 2)
    source = open_checkpoint(str(tmp_path / "c"))
    assert all(read(source, t).equal(held["master"][n]) for n, t in source.by_name(MASTER).items())


def test_nothing_but_plain_values_is_read_and_deepspeed_is_not_needed(tmp_path):
    write(tmp_path / "c", 2, 2)
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from ort_zero.checkpoint.finding import open_checkpoint\n"
        "print(len(open_checkpoint(sys.argv[1]).tensors))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True)
    assert done.stdout.strip() == "14", done.stderr


def test_parameters_without_elements_are_not_taken_for_tied(tmp_path):
    def change(name: str, content: dict[str, Any]) -> None:
        if name == MODULE:
            content["module"] |= {"none.a": torch.zeros(0, 4), "none.b": torch.zeros(3, 0)}
            content["shared_params"]["none.b"] = "none.a"  # DeepSpeed goes by the address, which is 0 for both

    write(tmp_path / "c", 1, 2, change=change)
    source = open_checkpoint(str(tmp_path / "c"))
    assert source.weights()["none.b"].shape == (3, 0) and "none.b" not in source.aliases


def test_state_without_a_value_per_element_is_left_out_with_a_note(tmp_path):
    def change(name: str, content: dict[str, Any]) -> None:
        if "optim" in name:
            for entry in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                entry["factors"] = torch.zeros(2, 2)

    write(tmp_path / "c", 1, 2, change=change)
    source = open_checkpoint(str(tmp_path / "c"))
    assert not source.by_name("factors") and "factors" in source.notes[0]


@STAGES
def test_before_the_first_step_there_are_masters_only(tmp_path, stage):
    def change(name: str, content: dict[str, Any]) -> None:
        if "optim" in name:
            zero = content["optimizer_state_dict"]
            zero["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"] = {}

    write(tmp_path / "c", stage, 2, change=change)
    source = open_checkpoint(str(tmp_path / "c"))
    assert len(source.by_name(MASTER)) == 4 and not source.by_name("exp_avg") and source.optimizer.scalars == {}


# ---- faults: each ends in one message that names the file and the reason ---------------------------------------------


def refused(folder: Path, file: str, reason: str, kind: type[Exception] = CorruptCheckpointError) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert file in message and re.search(reason, message) and "\n" not in message, message


@STAGES
@pytest.mark.parametrize("keep", [0.999, 0.5, 0.01])
def test_truncated_file(tmp_path, stage, keep):
    write(tmp_path / "c", stage, 2)
    path = tmp_path / "c" / OPTIMIZER.format(1)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    refused(tmp_path / "c", path.name, "truncated")


@STAGES
def test_empty_missing_and_extra_file(tmp_path, stage):
    write(tmp_path / "c", stage, 3)
    path = tmp_path / "c" / OPTIMIZER.format(1)
    data = path.read_bytes()
    path.write_bytes(b"")
    refused(tmp_path / "c", path.name, "is empty")
    path.unlink()
    refused(tmp_path / "c", path.name, "is missing: 3 ranks")
    path.write_bytes(data)
    (tmp_path / "c" / OPTIMIZER.format(3)).write_bytes(data)
    refused(tmp_path / "c", OPTIMIZER.format(3), "one too many")


def test_missing_module_file(tmp_path):
    write(tmp_path / "c", 1, 2)
    (tmp_path / "c" / MODULE).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"{MODULE} is missing"):
        open_checkpoint(str(tmp_path / "c"))
    write(tmp_path / "d", 3, 2)
    (tmp_path / "d" / RANK_MODULE.format(1)).unlink()
    refused(tmp_path / "d", RANK_MODULE.format(1), "is missing")


@STAGES
@pytest.mark.parametrize("rank", [0, 1])
def test_file_of_another_step(tmp_path, stage, rank):
    write(tmp_path / "c", stage, 2)
    write(tmp_path / "other", stage, 2, step=9)
    shutil.copy(tmp_path / "other" / OPTIMIZER.format(rank), tmp_path / "c")
    refused(tmp_path / "c", OPTIMIZER.format(rank), r"another step: \(9.0, 9.0\)")


def test_module_file_of_another_step(tmp_path):
    write(tmp_path / "other", 3, 2, step=9)
    write(tmp_path / "c", 3, 2)
    shutil.copy(tmp_path / "other" / RANK_MODULE.format(1), tmp_path / "c")
    refused(tmp_path / "c", RANK_MODULE.format(1), "another global step: 9")
    write(tmp_path / "other1", 1, 2, step=9)
    write(tmp_path / "c1", 1, 2)
    shutil.copy(tmp_path / "other1" / MODULE, tmp_path / "c1")
    refused(tmp_path / "c1", MODULE, "is of another step than the masters: it counts 9 steps")

    def later(name: str, content: dict[str, Any]) -> None:
        if name == MODULE:
            content["global_steps"] = 9

    write(tmp_path / "started_anew", 1, 2, change=later)
    assert "different saves" in open_checkpoint(str(tmp_path / "started_anew")).notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_a_program_has_put_into_the_module_are_read(tmp_path, dtype):
    """Such as an average of earlier weights."""

    def as_cast(shift: float):
        def change(name: str, content: dict[str, Any]) -> None:
            if name == MODULE:
                weights = content["module"]
                content["module"] = {
                    n: v if n in ("ice", "count") else (v + shift).to(dtype) for n, v in weights.items()
                }
            else:
                for flat in content["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                    flat += shift

        return change

    write(tmp_path / "c", 2, 2, change=as_cast(0.0))
    write(tmp_path / "other", 2, 2, change=as_cast(0.25))
    for name in ("c", "other"):
        assert not open_checkpoint(str(tmp_path / name)).notes
    shutil.copy(tmp_path / "other" / MODULE, tmp_path / "c")
    source = open_checkpoint(str(tmp_path / "c"))
    assert source.by_name("module").keys() == source.by_name("master").keys()
    assert any("--from module" in note for note in verify(str(tmp_path / "c"), progress=False).notes)


def test_nan_in_weights_and_masters_alike_is_no_mixture(tmp_path):
    def change(name: str, content: dict[str, Any]) -> None:
        if name == MODULE:
            for name_of, weight in content["module"].items():
                if name_of not in ("ice", "count"):
                    content["module"][name_of] = torch.full_like(weight, torch.nan).bfloat16()
        else:
            for flat in content["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                flat.fill_(torch.nan)

    write(tmp_path / "c", 2, 2, change=change)
    assert not open_checkpoint(str(tmp_path / "c")).notes


@STAGES
def test_file_of_another_world_size(tmp_path, stage):
    write(tmp_path / "c", stage, 2)
    write(tmp_path / "other", stage, 3)
    shutil.copy(tmp_path / "other" / OPTIMIZER.format(1), tmp_path / "c")
    refused(tmp_path / "c", OPTIMIZER.format(1), "another world size: it was written by 3 ranks, the others by 2")


@STAGES
def test_file_of_another_run(tmp_path, stage):
    write(tmp_path / "c", stage, 3)
    write(tmp_path / "other", stage, 3, lr=0.7)
    shutil.copy(tmp_path / "other" / OPTIMIZER.format(2), tmp_path / "c")
    refused(tmp_path / "c", OPTIMIZER.format(2), "another run")


@STAGES
def test_file_of_another_model(tmp_path, stage):
    def change(name: str, content: dict[str, Any]) -> None:
        zero = content.get("optimizer_state_dict", {})
        for key in ("single_partition_of_fp32_groups", "fp32_flat_groups"):
            if key in zero and "rank_1" in name:
                zero[key][0] = torch.zeros(zero[key][0].numel() + 3)

    write(tmp_path / "c", stage, 2, change=change)
    refused(tmp_path / "c", OPTIMIZER.format(1), "another run or another world size: its part of group 0 has")


@STAGES
def test_swapped_files(tmp_path, stage):
    write(tmp_path / "c", stage, 2)
    first, second = (tmp_path / "c" / OPTIMIZER.format(rank) for rank in (0, 1))
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    refused(tmp_path / "c", OPTIMIZER.format(0), "rank 1's file")


def test_a_flipped_bit_in_the_pickle_is_found_before_unpickling(tmp_path):
    write(tmp_path / "c", 1, 2)
    path = tmp_path / "c" / OPTIMIZER.format(0)
    data = bytearray(path.read_bytes())
    offset, length, _ = torch_file.open_torch_file(open_folder(tmp_path / "c"), path.name).file.records[0]
    for at in range(offset, offset + length, 97):
        data[at] ^= 4
        path.write_bytes(data)
        refused(tmp_path / "c", path.name, "CRC-32 of its record .*data.pkl")
        data[at] ^= 4


def test_every_byte_before_the_directory_is_checked(tmp_path):
    write(tmp_path / "c", 1, 2)
    name = OPTIMIZER.format(0)
    folder, path = open_folder(tmp_path / "c"), tmp_path / "c" / name
    data = bytearray(path.read_bytes())
    end = bytes(data).index(b"PK\x01\x02")

    def is_sound() -> bool:
        try:
            return all(torch_file.crc_is_right(folder, name, r) for r in torch_file.read_records(folder, name))
        except CheckpointError as error:
            assert name in str(error)
            return False

    assert is_sound()
    unnoticed = []
    with open(path, "r+b", buffering=0) as stream:
        for at in range(end):
            stream.seek(at)
            stream.write(bytes([data[at] ^ 16]))
            if is_sound():
                unnoticed.append(at)
            stream.seek(at)
            stream.write(bytes([data[at]]))
    assert is_sound() and unnoticed == []


def test_a_tensor_that_repeats_its_elements_beyond_its_file_is_refused(tmp_path):
    """Four bytes describe a tensor of any size; what is written of it would have all of them."""
    write(tmp_path / "c", 1, 2)
    for shape, fits in (((1 << 18,), True), ((1 << 19,), False), ((1 << 60,), False)):
        with deepspeed_names():
            content = torch.load(tmp_path / "c" / MODULE, weights_only=False)
            content["module"]["mask"] = torch.zeros(1).expand(shape)
            torch.save(content, tmp_path / "c" / MODULE)
        if fits:
            torch_file.open_torch_file(open_folder(tmp_path / "c"), MODULE)
        else:
            refused(tmp_path / "c", MODULE, "repeats its elements to")


def test_values_that_are_nested_too_deeply_are_one_error(tmp_path):
    write(tmp_path / "c", 1, 2)
    count = 100_000
    with zipfile.ZipFile(tmp_path / "c" / MODULE, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"]" * count + b"a" * (count - 1) + b".")
        archive.writestr("archive/version", "3\n")
    refused(tmp_path / "c", MODULE, "nested too deeply", CheckpointError)


@STAGES
def test_an_object_of_a_foreign_class_is_a_record_and_not_made(tmp_path, stage):
    name = OPTIMIZER.format(1)
    write(tmp_path / "c", stage, 2)
    Foreign.made = 0
    with deepspeed_names():
        content = torch.load(tmp_path / "c" / name, weights_only=False)
        content["extra"] = Foreign()
        torch.save(content, tmp_path / "c" / name)
    found = open_checkpoint(str(tmp_path / "c"))
    assert len(found.tensors) == 14 and Foreign.made == 0
    assert any(f"{Foreign.__module__}.Foreign" in note for note in found.notes)
    with deepspeed_names():
        assert len(open_checkpoint(str(tmp_path / "c"), trust_pickle=True).tensors) == 14
    assert Foreign.made == 1


def test_a_function_in_a_pickle_is_not_called(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "exploded",)

    write(tmp_path / "c", 1, 1, change=lambda name, content: content.update(bomb=Bomb()))
    refused(tmp_path / "c", OPTIMIZER.format(0).replace("zero_pp_rank_0_", "")[:5], "--trust-pickle", CheckpointError)
    assert not (tmp_path / "exploded").exists()


def test_values_of_users_are_restored_where_their_class_is_harmless(tmp_path):
    held = {
        "args": argparse.Namespace(dtype=torch.bfloat16, device=torch.device("cuda", 1)),
        "table": defaultdict(int, {"best": torch.arange(6.0).view(2, 3).t()}),
        "order": (OrderedDict(a=np.float64(1.5)), {torch.float16}),
        "other": [Foreign()],
    }
    write(tmp_path / "c", 1, 1, change=lambda name, content: content.update(client=held))
    folder = open_folder(tmp_path / "c")

    def value(stored: StoredTensor) -> torch.Tensor:
        raw = torch.frombuffer(bytearray(folder.read(MODULE, stored.storage_offset, 24)), dtype=torch.float32)
        return raw.as_strided(stored.shape, stored.strides)

    content = torch_file.open_torch_file(folder, MODULE).content["client"]
    found, left = restored(content, value, "client_state")
    assert found["args"] == held["args"] and found["order"] == held["order"]
    assert type(found["order"][0]) is OrderedDict and found["table"].default_factory is int
    assert found["table"]["best"].equal(held["table"]["best"])
    assert left == {"client_state['other'][0]": f"{Foreign.__module__}.Foreign"}
    unknown = TorchConstant("device", "no_such_device:1")  # of a later version of torch, or of a hostile file
    assert restored([unknown], value, "v") == ([unknown], {"v[0]": "torch.device"})


def test_unknown_dtype(tmp_path):
    def change(name: str, content: dict[str, Any]) -> None:
        if name == MODULE:
            content["module"]["ice"] = torch.zeros(3, 2, dtype=torch.complex128)

    write(tmp_path / "c", 1, 2, change=change)
    refused(tmp_path / "c", MODULE, "ice: tensors of torch.complex128", CheckpointError)


def test_masters_of_different_dtypes(tmp_path):
    def change(name: str, content: dict[str, Any]) -> None:
        if name == OPTIMIZER.format(1):
            flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
            flat[:] = [value.half() for value in flat]

    write(tmp_path / "c", 1, 3, change=change)
    refused(tmp_path / "c", OPTIMIZER.format(1), "another dtype of master of group 0: 'F16'")


def test_other_formats_of_files(tmp_path):
    write(tmp_path / "c", 1, 1)
    path = tmp_path / "c" / MODULE
    torch.save({"module": {}}, path, _use_new_zipfile_serialization=False)
    refused(tmp_path / "c", MODULE, "before torch 1.6", CheckpointError)
    path.write_bytes(b"hello, this is text" * 9)
    refused(tmp_path / "c", MODULE, "not a file of torch.save")
    torch.save({"weights": {}}, path)
    refused(tmp_path / "c", MODULE, "not a file of DeepSpeed's module states")
    torch.save([1], path)
    refused(tmp_path / "c", MODULE, "not a file of DeepSpeed's module states")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("expert_3_mp_rank_00_model_states.pt", "mixture of experts of a DeepSpeed before 0.5"),
        ("layer_00-slice_01-model_states.pt", "pipeline with custom axes of parallelism"),
        ("offloaded_tensors/rank0/x.swp", "NVMe"),
    ],
)
def test_what_is_not_supported_says_so(tmp_path, name, reason):
    write(tmp_path / "c", 1, 1)
    path = tmp_path / "c" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    refused(tmp_path / "c", str(tmp_path / "c"), reason, CheckpointError)


@pytest.mark.parametrize(
    ("name", "named", "reason"),
    [
        ("mp_rank_01_model_states.pt", "mp_rank_01_model_states.pt", "1 model-parallel ranks wrote this"),
        ("layer_00-model_00-model_states.pt", MODULE, "files of a pipeline .* are of another checkpoint"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "expp_rank_0_mp_rank_00_optim_states.pt", "mixture of experts"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "layer_0_expert_0_mp_rank_00_model_states.pt", "is missing"),
        ("zero/a.weight/fp32.pt", "zero", "universal checkpoint.*mixed"),
    ],
)
def test_files_of_other_kinds_of_parallelism_in_a_plain_checkpoint(tmp_path, name, named, reason):
    write(tmp_path / "c", 1, 1)
    path = tmp_path / "c" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = torch.load(tmp_path / "c" / MODULE, weights_only=False) if name.startswith("mp_rank_01") else {}
    torch.save(content, path)
    refused(tmp_path / "c", named, reason)


def test_large_numbers_in_names_of_files_cost_nothing(tmp_path):
    many = 10**15
    write(tmp_path / "a", 1, 1)
    torch.save({}, tmp_path / "a" / f"layer_{many}_expert_{many}_mp_rank_00_model_states.pt")
    refused(tmp_path / "a", "layer_1000000000000000_expert_0_mp_rank_00_model_states.pt", "is missing")
    write(tmp_path / "b", 1, 1)
    shutil.copy(tmp_path / "b" / MODULE, tmp_path / "b" / f"mp_rank_{many}_model_states.pt")
    with pytest.raises(CorruptCheckpointError):
        open_checkpoint(str(tmp_path / "b"))


def test_layers_of_a_pipeline_without_a_file_are_named_whatever_their_numbers(tmp_path):
    many = 10**15
    write(tmp_path / "c", 1, 1)
    states = torch.load(tmp_path / "c" / MODULE, weights_only=False)
    (tmp_path / "c" / OPTIMIZER.format(0)).unlink()
    states |= {"module": None, "optimizer": None, "param_shapes": None, "buffer_names": [], "shared_params": {}}
    torch.save(states, tmp_path / "c" / MODULE)
    for number in (many, 1, 2, 4):
        torch.save({"weight": torch.full((2,), number % 7.0)}, tmp_path / "c" / f"layer_{number:02}-model_states.pt")
    source = open_checkpoint(str(tmp_path / "c"))
    assert f"layers 0, 3, 5 to {many - 1} of the pipeline have no file: they have no tensors, or share them" in (
        source.notes
    )
    assert {name: read(source, t).tolist() for name, t in source.weights().items()} == {
        f"{number}.weight": [number % 7] * 2 for number in (1, 2, 4, many)
    }


def test_experts_of_autoep(tmp_path):
    write(tmp_path / "c", 1, 1, change=lambda name, content: content.update(ds_autoep_layers=[{"x": 1}]))
    refused(tmp_path / "c", MODULE, "AutoEP", CheckpointError)
    write(
        tmp_path / "d", 1, 2, change=lambda name, content: content.get("optimizer_state_dict", {}).update(
            partition_count=[2, 1]
        )
    )  # fmt: skip
    refused(tmp_path / "d", OPTIMIZER.format(0), "experts", CheckpointError)


def test_files_of_two_checkpoints_in_one_folder(tmp_path):
    write(tmp_path / "c", 1, 2)
    write(tmp_path / "other", 3, 2)
    for rank in (0, 1):
        shutil.copy(tmp_path / "other" / RANK_MODULE.format(rank), tmp_path / "c")
    refused(tmp_path / "c", MODULE, "two checkpoints")

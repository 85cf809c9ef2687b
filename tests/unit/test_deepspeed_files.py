"""The reader of DeepSpeed's checkpoints on files of their structure: what it reads, and what it refuses."""

from __future__ import annotations

import argparse
import re
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_checkpoints import read
from deepspeed_states import TENSORS, write
from safetensors.torch import load_file

from ort_zero.checkpoint import aggregate, torch_file
from ort_zero.checkpoint.aggregation import streaming
from ort_zero.checkpoint.deepspeed.training_state import TorchValues
from ort_zero.checkpoint.files.storage import open_folder
from ort_zero.checkpoint.finding import find_source
from ort_zero.checkpoint.records import MASTER
from ort_zero.checkpoint.restricted_pickle.values import TorchConstant
from ort_zero.errors import CheckpointError, CorruptCheckpointError

OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODULE = "mp_rank_00_model_states.pt"
FROM_MASTERS = {"gain", "embed.weight", "norm.weight", "norm.bias", "hidden.weight", "hidden.bias", "head.weight"}


class Foreign:
    """A class that DeepSpeed does not write."""

    made = 0

    def __init__(self) -> None:
        self.value = 1

    def __setstate__(self, state: dict) -> None:
        Foreign.made += 1


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_a_transposed_frozen_parameter_is_written_row_major(tmp_path, monkeypatch, dtype):
    weight = torch.rand(50, 70).bfloat16().float().t()
    monkeypatch.setattr(streaming, "CHUNK", 64)  # several windows for it

    def change(name: str, content: dict[str, Any]) -> None:
        if name == MODULE:
            content["module"]["frozen.weight"] = weight

    write(tmp_path / "c", 2, change)
    aggregate(tmp_path / "c", tmp_path / "out", dtype=dtype, progress=False)
    assert load_file(tmp_path / "out" / "model.safetensors")["frozen.weight"].float().equal(weight)


def test_files_of_a_gpu_run_are_read_without_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:3")
    held = write(tmp_path / "c", 3, lambda name, content: None)
    source = find_source(str(tmp_path / "c"))
    assert all(read(source, t).equal(held[f"master/{n}"]) for n, t in source.by_name(MASTER).items())


def test_parameters_without_elements_are_not_taken_for_tied(tmp_path):
    def change(name: str, content: dict[str, Any]) -> None:
        if name == MODULE:
            content["module"] |= {"none.a": torch.zeros(0, 4), "none.b": torch.zeros(3, 0)}
            content["shared_params"]["none.b"] = "none.a"  # DeepSpeed goes by the address, which is 0 for both

    write(tmp_path / "c", 2, change)
    source = find_source(str(tmp_path / "c"))
    assert source.weights()["none.b"].shape == (3, 0) and "none.b" not in source.aliases


def test_state_without_a_value_per_element_is_left_out_with_a_note(tmp_path):
    def change(name: str, content: dict[str, Any]) -> None:
        if "optim" in name:
            for entry in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                entry["factors"] = torch.zeros(2, 2)

    write(tmp_path / "c", 2, change)
    source = find_source(str(tmp_path / "c"))
    assert not source.by_name("factors") and "factors" in source.notes[0]


# ---- faults: each ends in one message that names the file and the reason ---------------------------------------------


def refused(folder: Path, file: str, reason: str, kind: type[Exception] = CorruptCheckpointError) -> None:
    with pytest.raises(CheckpointError) as caught:
        find_source(str(folder))
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert file in message and re.search(reason, message) and "\n" not in message, message


def test_module_file_of_another_step(tmp_path):
    def later(name: str, content: dict[str, Any]) -> None:
        if name == MODULE:
            content["global_steps"] = 9

    def trained_on(name: str, content: dict[str, Any]) -> None:
        later(name, content)
        if name == MODULE:
            content["module"]["hidden.weight"] += 1

    write(tmp_path / "c", 2, trained_on)
    refused(tmp_path / "c", MODULE, "is of another step than the masters: it counts 9 steps")
    write(tmp_path / "started_anew", 2, later)
    assert "different saves" in find_source(str(tmp_path / "started_anew")).notes[0]


def test_nan_in_weights_and_masters_alike_is_no_mixture(tmp_path):
    def change(name: str, content: dict[str, Any]) -> None:
        if name == MODULE:
            for name_of, weight in content["module"].items():
                if name_of in FROM_MASTERS:
                    content["module"][name_of] = torch.full_like(weight, torch.nan).bfloat16()
        else:
            for flat in content["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
                flat.detach().fill_(torch.nan)

    write(tmp_path / "c", 2, change)
    assert not find_source(str(tmp_path / "c")).notes


@pytest.mark.parametrize("stage", [2, 3])
def test_an_object_of_a_foreign_class_is_a_record_and_not_made(tmp_path, stage):
    name = OPTIMIZER.format(1)
    write(tmp_path / "c", stage, lambda file, content: content.update({"extra": Foreign()} if file == name else {}))
    Foreign.made = 0
    found = find_source(str(tmp_path / "c"))
    assert len(found.tensors) == TENSORS and Foreign.made == 0
    assert any(f"{Foreign.__module__}.Foreign" in note for note in found.notes)


def test_a_function_in_a_pickle_is_not_called(tmp_path):
    class Bomb:
        def __reduce__(self) -> tuple:
            return Path.touch, (tmp_path / "exploded",)

    write(tmp_path / "c", 2, lambda name, content: content.update(bomb=Bomb()))
    refused(tmp_path / "c", MODULE, "nothing was called", CheckpointError)
    assert not (tmp_path / "exploded").exists()


def test_values_of_users_are_restored_where_their_class_is_harmless(tmp_path):
    held = {
        "args": argparse.Namespace(dtype=torch.bfloat16, device=torch.device("cuda", 1)),
        "table": defaultdict(int, {"best": torch.arange(6.0).view(2, 3).t()}),
        "order": (OrderedDict(a=np.float64(1.5)), {torch.float16}),
        "other": [Foreign()],
    }
    write(tmp_path / "c", 2, lambda name, content: content.update(client=held))
    folder = open_folder(tmp_path / "c")
    file = torch_file.open_torch_file(folder, MODULE)
    read, content = TorchValues(folder, file), file.content["client"]
    other = content.pop("other")
    found = read(content, "client_state")
    assert found["args"] == held["args"] and found["order"] == held["order"]
    assert type(found["order"][0]) is OrderedDict and found["table"].default_factory is int
    assert found["table"]["best"].equal(held["table"]["best"])
    with pytest.raises(CheckpointError, match=rf"client_state\['other'\]\[0\] is a {Foreign.__module__}.Foreign"):
        read(other, "client_state['other']")
    unknown = TorchConstant("device", "no_such_device:1")  # of a later version of torch, or of a hostile file
    with pytest.raises(CheckpointError, match=r"v\[0\] is a torch.device"):
        read([unknown], "v")


def test_layers_of_a_pipeline_without_a_file_are_named_whatever_their_numbers(tmp_path):
    many = 10**15
    write(tmp_path / "c", 2)
    states = torch.load(tmp_path / "c" / MODULE, weights_only=False)
    for rank in range(2):
        (tmp_path / "c" / OPTIMIZER.format(rank)).unlink()
    states |= {"module": None, "optimizer": None, "param_shapes": None, "buffer_names": [], "shared_params": {}}
    torch.save(states, tmp_path / "c" / MODULE)
    for number in (many, 1, 2, 4):
        torch.save({"weight": torch.full((2,), number % 7.0)}, tmp_path / "c" / f"layer_{number:02}-model_states.pt")
    source = find_source(str(tmp_path / "c"))
    assert f"layers 0, 3, 5 to {many - 1} of the pipeline have no file: they have no tensors, or share them" in (
        source.notes
    )
    assert {name: read(source, t).tolist() for name, t in source.weights().items()} == {
        f"{number}.weight": [number % 7] * 2 for number in (1, 2, 4, many)
    }

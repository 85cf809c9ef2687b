"""Files that a stranger has planted: commands say one clear thing, quickly, without memory, and write nowhere else."""

from __future__ import annotations

import os
import pickle
import re
import resource
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_files
import deepspeed_states
import pytest
import torch
from damage import MANIFEST, Change, copied, edited, flipped, removed, swapped, truncated, written

from ort_zero.cli.main import main

SHARD, EXTRA = "rank_00000_master.safetensors", "rank_00000_extra.json"
MODULE, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODULE3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def tensor(content: dict[str, Any], name: str) -> dict[str, Any]:
    return next(entry for entry in content["tensors"] if entry["name"] == name and entry["kind"] == "master")


def rename(content: dict[str, Any], old: str, new: str) -> None:
    for entry in content["tensors"]:
        if entry["name"] == old:
            entry["name"] = new


def signed(name: str, size: int) -> Change:
    """Make a file long, and let the manifest say so."""

    def act(folder: Path) -> None:
        os.truncate(folder / name, size)
        edited(lambda m: [file.update(size=size) for file in m["files"] if file["name"] == name])(folder)

    return act


def saved(change: Callable[[dict[str, Any]], Any], name: str = MODULE) -> Change:
    """Change what DeepSpeed has saved in a file."""

    def act(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        change(content)
        torch.save(content, folder / name)

    return act


def zero(change: Callable[[dict[str, Any]], Any], name: str = OPTIMIZER) -> Change:
    """Change what ZeRO's optimizer has saved."""
    return saved(lambda content: change(content["optimizer_state_dict"]), name)


def both(change: Callable[[dict[str, Any]], Any]) -> Change:
    """Change what ZeRO's optimizer has saved on both ranks."""
    return lambda folder: [zero(change, OPTIMIZER.replace("rank_1_", f"rank_{rank}_"))(folder) for rank in range(2)]


def entries_of(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]


def write_zip(path: Path, entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)


def zipped(name: str, data: bytes) -> Change:
    """Add a record to a file of optimizer states."""
    return lambda folder: write_zip(folder / OPTIMIZER, [*entries_of(folder / OPTIMIZER), (name, data)])


def pickled(data: bytes) -> Change:
    """Put another pickle into a file of optimizer states."""

    def act(folder: Path) -> None:
        found = entries_of(folder / OPTIMIZER)
        write_zip(folder / OPTIMIZER, [(n, data if n.endswith("data.pkl") else old) for n, old in found])

    return act


def added(name: str, content: Any = None) -> Change:
    return lambda folder: torch.save(content or {}, folder / name)


def linked(name: str, target: str) -> Change:
    """Put a link in the place of a file."""
    return lambda folder: [(folder / name).unlink(), (folder / name).symlink_to(target)]


def a_record_twice(folder: Path) -> None:
    name, data = next(entry for entry in entries_of(folder / OPTIMIZER) if "/data/" in entry[0] and len(entry[1]) > 8)
    zipped(name, bytes(len(data)))(folder)


def a_comment_behind_the_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / OPTIMIZER, "a") as archive:
        archive.comment = b"hello"


def terabytes_before_the_zip(folder: Path) -> None:
    data = (folder / OPTIMIZER).read_bytes()
    with open(folder / OPTIMIZER, "r+b") as file:
        file.seek(1 << 40)
        file.write(data)


def a_fifo(folder: Path) -> None:
    (folder / OPTIMIZER).unlink()
    os.mkfifo(folder / OPTIMIZER)


def a_billion_ranks(folder: Path) -> None:
    both(lambda state: state.update(partition_count=[10**9] * 2))(folder)
    saved(lambda content: content.update(dp_world_size=10**9))(folder)


def a_parameter_of_a_universal_checkpoint(folder: Path) -> None:
    (folder / "zero" / "a.weight").mkdir(parents=True)
    torch.save({}, folder / "zero" / "a.weight" / "fp32.pt")


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x05\x00\x00\x00../..X\x03\x00\x00\x00cpuK\x01tQ"
ODD = "content is not what DeepSpeed writes"
OURS: dict[str, tuple[str | None, Change]] = {
    "links in a circle": ("Too many levels", linked(SHARD, SHARD)),
    "a link to a device": ("is a device", linked(SHARD, "/dev/zero")),
    "a hard link under another name": ("one too many",
        lambda folder: os.link(folder / SHARD, folder / "rank_00009_master.safetensors")),
    "a shard of terabytes": ("too long", truncated(SHARD, 1 << 42)),
    "a signed shard of terabytes": ("its tensors end at byte", signed(SHARD, 1 << 42)),
    "a manifest of gigabytes": ("no JSON object", truncated(MANIFEST, 3 << 30)),
    "an extra file of terabytes": ("too long|too many", truncated(EXTRA, 1 << 40)),
    "a signed extra file of gigabytes": ("too many for it", signed(EXTRA, 3 << 30)),
    "a key twice": ("occurs twice", written(lambda text: text[:-1] + ', "step": 9}')),
    "all tensors hidden by a second key": ("occurs twice", written(lambda text: text[:-1] + ', "tensors": []}')),
    "no tensors": ("lists no weights", edited(lambda m: m.update(tensors=[]))),
    "a step that is no number": ("finite number",
        edited(lambda m: m["optimizer"]["scalars"]["step"].update({"a.bias": float("nan")}))),
    "a step of a hundred thousand digits": ("digits",
        written(lambda text: text.replace('"step": 7', '"step": ' + "9" * 100_000))),
    "escapes in a name": ("not printable", edited(lambda m: rename(m, "a.bias", "a\x1b[2J\nok: all fine"))),
    "half a surrogate in a configuration": ("no text that UTF-8",
        edited(lambda m: m["config"].update({"config.json": "\ud800"}))),
    "a configuration without end": (None, edited(lambda m: m["config"].update({"config.json": "[" * 200_000}))),
    "a tensor twice": ("lists the tensor master of a.bias twice",
        edited(lambda m: m["tensors"].append(dict(tensor(m, "a.bias"))))),
    "a file twice": ("lists the file .* twice", edited(lambda m: m["files"].append(dict(m["files"][0])))),
    "dots in a file name": ("own folder", edited(lambda m: m["files"][0].update(name=f"../{SHARD}"))),
    "a line break in a file name": ("own folder", edited(lambda m: m["files"][0].update(name="a\nok: b"))),
    "overlapping pieces": ("in two pieces", edited(lambda m: tensor(m, "a.weight")["pieces"][1].__setitem__(3, 3))),
    "a version that is a truth": ("format version True", edited(lambda m: m.update(version=True))),
    "a key from the future": ("future_field", edited(lambda m: m.update(future_field=1))),
    "a weight of the module without a master": ("module of nothing: no other has its shape",
        edited(lambda m: m["tensors"].append({**m["tensors"][0], "kind": "module", "name": "nothing"}))),
    "a buffer of a rank that is no buffer": (
        "buffer_of_rank_1 of .*: no other has its shape",
        edited(
            lambda m: m["tensors"].append({**m["tensors"][0], "kind": "buffer_of_rank_1", "shape": [0], "pieces": []})
        ),
    ),
    "a world of a billion ranks": ("wrong at world_size", edited(lambda m: m.update(world_size=10**12))),
    "names tied in a circle": (None, edited(lambda m: m.update(aliases={"x": "y", "y": "x"}))),
    "an unknown dtype": ("unknown dtype", edited(lambda m: tensor(m, "a.bias").update(dtype="F8_E9"))),
    "a tag that leads outside": ("leads out of", edited(lambda m: m.update(tag="../../outside"))),
    "escapes in a tag": ("cannot be the name of a folder", edited(lambda m: m.update(tag="\x1b[2Jx\nok: y"))),
    "a tag of megabytes": ("cannot be the name of a folder", edited(lambda m: m.update(tag="t" * (1 << 20)))),
    "a missing shard": ("is missing", removed(SHARD)),
    "an empty shard": ("is empty", truncated(SHARD, 0)),
    "a truncated shard": ("is truncated", truncated(SHARD, -1)),
    "a flipped bit in a tensor": ("does not match its xxh3-128, in .*(master|weight|buffer) of ", flipped(SHARD, -1)),
    "a flipped bit in a header": ("xxh3-128, outside of its tensors", flipped(SHARD, 12)),
    "a flipped bit in the manifest": ("does not match its own digest", flipped(MANIFEST, b'"zero_stage": 1')),
}  # fmt: skip
ZERO2: dict[str, tuple[str | None, Change]] = {
    "a record twice": ("two of its records are named", a_record_twice),
    "a second pickle in another folder": ("does not lie in its folder", zipped("other/data.pkl", pickle.dumps({}))),
    "dots in the name of a record": ("does not lie in its folder", zipped("../../x", b"1")),
    "a zip bomb": ("compressed",
        lambda folder: write_zip(folder / OPTIMIZER, [("archive/data.pkl", bytes(64 << 20))], zipfile.ZIP_DEFLATED)),
    "a comment behind the zip": ("too long or damaged", a_comment_behind_the_zip),
    # zipfile of Python 3.13 refuses the file itself
    "terabytes before the zip": ("does not fit|is truncated", terabytes_before_the_zip),
    "terabytes behind the zip": ("no readable zip directory", truncated(OPTIMIZER, 1 << 42)),
    "a list that holds itself": ("holds no masters that can be read",
        pickled(pickle.dumps({"optimizer_state_dict": {"a": CIRCLE}}))),
    "a call of a name from the stack": ("calls os.system",
        pickled(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.")),
    "a storage with dots in its name": ("no record for its storage",
        pickled(b"\x80\x02}(X\x14\x00\x00\x00optimizer_state_dict" + STORAGE + b"u.")),
    "a billion ranks": ("world size|ranks", a_billion_ranks),
    "a negative size": ("has 10 elements", saved(lambda m: m["param_shapes"][1].update({"norm.bias": (-7,)}))),
    "a size that is a fraction": (ODD, saved(lambda m: m["param_shapes"][1].update({"norm.bias": (7.0,)}))),
    "a shape that is a text": (ODD, saved(lambda m: m["param_shapes"][1].update({"norm.bias": "7"}))),
    "a name that moves the cursor": (r"the name of a tensor cannot be '.x1b",
        saved(lambda m: m["module"].update({"\x1b[2J": torch.ones(2)}))),
    "a parameter whose name is a number": ("other numbers of parameters|content is not",
        saved(lambda m: m["param_shapes"][0].update({5: torch.Size((3,))}))),
    "names of buffers that are a number": (ODD, saved(lambda m: m.update(buffer_names=5))),
    "tied names that are a number": (ODD, saved(lambda m: m.update(shared_params=7))),
    "tied names in a circle": (None, saved(lambda m: m["shared_params"].update(x="y", y="x"))),
    "a buffer that is not there": (None, saved(lambda m: m["buffer_names"].append("nope"))),
    "steps that are a text": (ODD, saved(lambda m: m.update(global_steps="4"))),
    "a module that is a list": ("no .module. in it", saved(lambda m: m.update(module=[1]))),
    "a sparse buffer": (ODD, saved(lambda m: m["module"].update(scale=torch.eye(3).to_sparse()))),
    "a moment that is too short": ("its state .exp_avg. has the shape",
        zero(lambda state: state["base_optimizer_state"]["state"][0].update(exp_avg=torch.zeros(1)))),
    "an infinite step": ("step",
        zero(lambda state: state["base_optimizer_state"]["state"][0].update(step=torch.tensor(float("inf"))))),
    "a fifo": ("is a FIFO", a_fifo),
    "the rank of a sextillion": ("is rank 1's file",
        copied(OPTIMIZER, f"zero_pp_rank_{'9' * 60}_mp_rank_00_optim_states.pt")),
    "a rank in arabic digits": ("are both rank 1",
        copied(OPTIMIZER, "zero_pp_rank_\N{ARABIC-INDIC DIGIT ONE}_mp_rank_00_optim_states.pt")),
    "a truncated file": ("truncated", truncated(OPTIMIZER, -1000)),
    "an empty file": ("is empty", truncated(OPTIMIZER, 0)),
    "a missing module": (f"{MODULE} is missing", removed(MODULE)),
    "two ranks swapped": ("rank_1_.* is rank 0's file|rank_0_.* is rank 1's file",
        swapped(OPTIMIZER, OPTIMIZER.replace("rank_1_", "rank_0_"))),
    "a rank of another world size": ("is of another world size",
        zero(lambda state: state.update(partition_count=[3, 3]))),
    "a rank of another model": ("another run or another world size: its part of group 0 has",
        zero(lambda state: state["single_partition_of_fp32_groups"].__setitem__(0, torch.zeros(99)))),
    "a flipped bit in a pickle": ("CRC-32 of its record .*data.pkl|do not match their CRC-32",
        flipped(OPTIMIZER, b"single_partition_of_fp32_groups")),
    "a mask of exabytes": ("repeats its elements to",
        saved(lambda m: m["module"].update(mask=torch.zeros(1).expand(1 << 60)))),
    "a dtype that is not stored": ("frozen.weight: tensors of torch.complex128",
        saved(lambda m: m["module"].update({"frozen.weight": torch.zeros(7, 5, dtype=torch.complex128)}))),
    "a file of an old torch": ("before torch 1.6",
        lambda folder: torch.save({"module": {}}, folder / MODULE, _use_new_zipfile_serialization=False)),
    "a text": ("not a file of torch.save", lambda folder: (folder / MODULE).write_bytes(b"hello, this is text" * 9)),
    "weights alone": ("no file of module states", added(MODULE, {"weights": {}})),
    "an expert of a huge number": ("layer_1000000000000000_expert_0_mp_rank_00_model_states.pt is missing",
        added(f"layer_{10**15}_expert_{10**15}_mp_rank_00_model_states.pt")),
    "a model rank of a huge number": ("", copied(MODULE, f"mp_rank_{10**15}_model_states.pt")),
    "an expert of an old deepspeed": ("mixture of experts of a DeepSpeed before 0.5",
        added("expert_3_mp_rank_00_model_states.pt")),
    "a layer with custom axes": ("pipeline with custom axes of parallelism",
        added("layer_00-slice_01-model_states.pt")),
    "an optimizer on nvme": ("offloaded to NVMe", lambda folder: (folder / "offloaded_tensors").mkdir()),
    "a layer of a pipeline": ("files of a pipeline .* are of another checkpoint",
        added("layer_00-model_00-model_states.pt")),
    "an expert alone": ("layer_0_expert_0_mp_rank_00_model_states.pt is missing",
        added("layer_0_expert_3_mp_rank_00_model_states.pt")),
    "a second model rank": (
        "mp_rank_01_model_states.pt is one too many",
        lambda folder: torch.save(
            torch.load(folder / MODULE, weights_only=False), folder / "mp_rank_01_model_states.pt"
        ),
    ),
    "a parameter of a universal checkpoint": ("universal checkpoint.*mixed", a_parameter_of_a_universal_checkpoint),
    "experts of autoep": ("AutoEP", saved(lambda m: m.update(ds_autoep_layers=[{"x": 1}]))),
    "groups over fewer ranks": ("as experts have", both(lambda state: state.update(partition_count=[2, 1]))),
    "a module of zero3": ("written as mp_rank_00_model_states.pt, then renamed", copied(MODULE, MODULE3)),
}  # fmt: skip
ZERO3: dict[str, tuple[str | None, Change]] = {
    "another length of a frozen parameter": ("piece of the frozen parameter frozen.bias",
        saved(lambda m: m["frozen_param_fragments"].update({"frozen.bias": torch.zeros(100)}), MODULE3)),
    "other shapes on another rank": ("another set of parameters",
        saved(lambda m: m["param_shapes"][1].update({"norm.bias": torch.Size((8,))}), MODULE3)),
    "masters that are too short": ("",
        zero(lambda state: state.update(fp32_flat_groups=[flat[:-1] for flat in state["fp32_flat_groups"]]))),
    "masters of another dtype": ("",
        zero(lambda state: state.update(fp32_flat_groups=[flat.int() for flat in state["fp32_flat_groups"]]))),
    "a missing module of a rank": (f"{MODULE3} is missing", removed(MODULE3)),
    "a module of another step": (f"{MODULE3} is of another global step|is of another global step: 9",
        saved(lambda m: m.update(global_steps=9), MODULE3)),
}  # fmt: skip
FAULTS = {"ours": OURS, "zero2": ZERO2, "zero3": ZERO3}
"""By kind of checkpoint and name: what ``verify`` says of it (None: it is harmless), and the change of the folder."""


# -- what the commands say ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint of each kind."""
    root = tmp_path_factory.mktemp("whole")
    checkpoint_files.write(root / "ours", tag="t")
    deepspeed_states.write(root / "zero2", 2)
    deepspeed_states.write(root / "zero3", 3)
    return root


@pytest.mark.parametrize(("base", "name"), [(base, name) for base, faults in FAULTS.items() for name in faults])
def test_planted_files(whole, tmp_path, capsys, base, name):
    says, change = FAULTS[base][name]
    folder = tmp_path / "run" / "t"
    shutil.copytree(whole / base, folder)
    change(folder)
    to = "deepspeed" if base == "ours" else "ort_zero"
    commands = {
        "verify": [str(folder)],
        "aggregate": [str(folder), str(tmp_path / "out"), "--what", "weights+optimizer"],
        "ls": [str(tmp_path / "run")],
        "diff": [str(folder), str(whole / base)],
        "convert": [str(folder), str(tmp_path / "converted"), "--to", to],
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for command, arguments in commands.items():
        started = time.monotonic()
        status = main([command, *arguments])
        said = capsys.readouterr()
        text = said.out + said.err
        assert time.monotonic() - started < 10, command
        assert status in (0, 1, 2) and "internal error" not in text and "Traceback" not in text, (command, text)
        assert not status or command == "diff" or len(said.err.splitlines()) <= 1, (command, said.err)
        assert "\x1b" not in text and "\nok: all" not in text, command
        if command == "verify":
            assert (status == 0) == (says is None), text
            assert says is None or re.search(says, text), text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10, "it took memory"
    assert {path.name for path in tmp_path.iterdir()} <= {"run", "out", "converted"}

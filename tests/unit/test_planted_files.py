"""Files that a stranger has planted: commands say one clear thing, quickly, without memory, and write nowhere else."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import struct
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
import xxhash

from ort_zero.cli.main import main

SHARD, EXTRA = "rank_00000_master.safetensors", "rank_00000_extra.json"
MODULE, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODULE3 = "zero_pp_rank_1_mp_rank_00_model_states.pt"
Change = Callable[[Path], Any]
FAULTS: dict[str, tuple[str, str | None, Change]] = {}
"""By name: the kind of checkpoint, what ``verify`` says of it (None: it is harmless), the change of the folder."""


def planted(base: str, says: str | None) -> Callable[[Change], Change]:
    def add(change: Change) -> Change:
        FAULTS[change.__name__] = (base, says, change)
        return change

    return add


def sign(text: str) -> bytes:
    """Return the text of a manifest with the digest that belongs to it."""
    body = text.rstrip()[:-1].rstrip()
    return f'{body},\n"xxh3_128": "{xxhash.xxh3_128(body.encode()).hexdigest()}"\n}}\n'.encode()


def manifest_of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "manifest.json").read_text())
    del content["xxh3_128"]
    return content


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and sign it."""
    content = manifest_of(folder)
    change(content)
    (folder / "manifest.json").write_bytes(sign(json.dumps(content)))


def tensor(content: dict[str, Any], name: str, kind: str = "master") -> dict[str, Any]:
    return next(entry for entry in content["tensors"] if entry["name"] == name and entry["kind"] == kind)


def rename(content: dict[str, Any], old: str, new: str) -> None:
    for entry in content["tensors"]:
        if entry["name"] == old:
            entry["name"] = new


def sign_file(folder: Path, name: str, size: int | None = None) -> None:
    """Let the manifest say of a file what it is now, or only the size, of one that is too long to be read."""
    entry: dict[str, Any] = {"size": size}
    if size is None:
        data = (folder / name).read_bytes()
        entry = {"size": len(data), "xxh3_128": xxhash.xxh3_128(data).hexdigest()}
    edit(folder, lambda content: [file.update(entry) for file in content["files"] if file["name"] == name])


def edit_torch(folder: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    content = torch.load(folder / name, weights_only=False)
    change(content)
    torch.save(content, folder / name)


def zero(change: Callable[[dict[str, Any]], Any], name: str = OPTIMIZER) -> Change:
    """Return a change of what ZeRO's optimizer has saved."""
    return lambda folder: edit_torch(folder, name, lambda content: change(content["optimizer_state_dict"]))


def entries_of(path: Path) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        return [(entry.filename, archive.read(entry)) for entry in archive.infolist()]


def write_zip(path: Path, entries: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, data in entries:
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)


def pickled(folder: Path, data: bytes) -> None:
    """Put another pickle into a file of optimizer states."""
    found = entries_of(folder / OPTIMIZER)
    write_zip(folder / OPTIMIZER, [(n, data if n.endswith("data.pkl") else old) for n, old in found])


def in_place_of(folder: Path, name: str, target: str | Path) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(target)


@planted("ours", "Too many levels")
def links_in_a_circle(folder: Path) -> None:
    in_place_of(folder, SHARD, folder / SHARD)


@planted("ours", "is a device")
def a_link_to_a_device(folder: Path) -> None:
    in_place_of(folder, SHARD, "/dev/zero")


@planted("ours", "one too many")
def a_hard_link_under_another_name(folder: Path) -> None:
    os.link(folder / SHARD, folder / "rank_00009_master.safetensors")


@planted("ours", "too long")
def a_shard_of_terabytes(folder: Path) -> None:
    os.truncate(folder / SHARD, 1 << 42)


@planted("ours", "its tensors end at byte")
def a_signed_shard_of_terabytes(folder: Path) -> None:
    os.truncate(folder / SHARD, 1 << 42)
    sign_file(folder, SHARD, 1 << 42)


@planted("ours", "no JSON object")
def a_manifest_of_gigabytes(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 3 << 30)


@planted("ours", "too long|too many")
def an_extra_file_of_terabytes(folder: Path) -> None:
    os.truncate(folder / EXTRA, 1 << 40)


@planted("ours", "too many for it")
def a_signed_extra_file_of_gigabytes(folder: Path) -> None:
    os.truncate(folder / EXTRA, 3 << 30)
    sign_file(folder, EXTRA, 3 << 30)


@planted("ours", "occurs twice")
def a_key_twice(folder: Path) -> None:
    text = json.dumps(manifest_of(folder))
    (folder / "manifest.json").write_bytes(sign(text[:-1] + ', "step": 9}'))


@planted("ours", "occurs twice")
def all_tensors_hidden_by_a_second_key(folder: Path) -> None:
    text = json.dumps(manifest_of(folder))
    (folder / "manifest.json").write_bytes(sign(text[:-1] + ', "tensors": []}'))


@planted("ours", "lists no weights")
def no_tensors(folder: Path) -> None:
    edit(folder, lambda content: content.update(tensors=[]))


@planted("ours", "finite number")
def a_step_that_is_no_number(folder: Path) -> None:
    edit(folder, lambda content: content["optimizer"]["scalars"]["step"].update({"a.bias": float("nan")}))


@planted("ours", "digits")
def a_step_of_a_hundred_thousand_digits(folder: Path) -> None:
    text = json.dumps(manifest_of(folder)).replace('"step": 7', '"step": ' + "9" * 100_000)
    (folder / "manifest.json").write_bytes(sign(text))


@planted("ours", "not printable")
def escapes_in_a_name(folder: Path) -> None:
    edit(folder, lambda content: rename(content, "a.bias", "a\x1b[2J\nok: all fine"))


@planted("ours", "not printable")
def half_a_surrogate_in_a_name(folder: Path) -> None:
    edit(folder, lambda content: rename(content, "a.bias", "a\ud800"))


@planted("ours", "no text that UTF-8")
def half_a_surrogate_in_a_configuration(folder: Path) -> None:
    edit(folder, lambda content: content["config"].update({"config.json": "\ud800"}))


@planted("ours", None)
def a_configuration_without_end(folder: Path) -> None:
    edit(folder, lambda content: content["config"].update({"config.json": "[" * 200_000}))


@planted("ours", "lists the tensor master of a.bias twice")
def a_tensor_twice(folder: Path) -> None:
    edit(folder, lambda content: content["tensors"].append(dict(tensor(content, "a.bias"))))


@planted("ours", "lists the file .* twice")
def a_file_twice(folder: Path) -> None:
    edit(folder, lambda content: content["files"].append(dict(content["files"][0])))


@planted("ours", "own folder")
def dots_in_a_file_name(folder: Path) -> None:
    edit(folder, lambda content: content["files"][0].update(name=f"../{SHARD}"))


@planted("ours", "own folder")
def an_absolute_file_name(folder: Path) -> None:
    edit(folder, lambda content: content["files"][0].update(name="/etc/passwd"))


@planted("ours", "own folder")
def a_line_break_in_a_file_name(folder: Path) -> None:
    edit(folder, lambda content: content["files"][0].update(name="a\nok: b"))


@planted("ours", "0 or more")
def a_negative_offset(folder: Path) -> None:
    edit(folder, lambda content: tensor(content, "a.weight")["pieces"][0].__setitem__(1, -4))


@planted("ours", "in two pieces")
def overlapping_pieces(folder: Path) -> None:
    edit(folder, lambda content: tensor(content, "a.weight")["pieces"][1].__setitem__(3, 3))


@planted("ours", "format version 5")
def a_manifest_from_the_future(folder: Path) -> None:
    edit(folder, lambda content: content.update(version=5))


@planted("ours", "format version True")
def a_version_that_is_a_truth(folder: Path) -> None:
    edit(folder, lambda content: content.update(version=True))


@planted("ours", "future_field")
def a_key_from_the_future(folder: Path) -> None:
    edit(folder, lambda content: content.update(future_field=1))


@planted("ours", "module of nothing: no other has its shape")
def a_weight_of_the_module_without_a_master(folder: Path) -> None:
    add = {"kind": "module", "name": "nothing"}
    edit(folder, lambda content: content.update(tensors=[*content["tensors"], {**content["tensors"][0], **add}]))


@planted("ours", "buffer_of_rank_1 of .*: no other has its shape")
def a_buffer_of_a_rank_that_is_no_buffer(folder: Path) -> None:
    add = {"kind": "buffer_of_rank_1", "shape": [0], "pieces": []}
    edit(folder, lambda content: content.update(tensors=[*content["tensors"], {**content["tensors"][0], **add}]))


@planted("ours", "wrong at world_size")
def a_world_of_a_billion_ranks(folder: Path) -> None:
    edit(folder, lambda content: content.update(world_size=10**12))


@planted("ours", None)
def names_tied_in_a_circle(folder: Path) -> None:
    edit(folder, lambda content: content.update(aliases={"x": "y", "y": "x"}))


@planted("ours", "unknown dtype")
def an_unknown_dtype(folder: Path) -> None:
    edit(folder, lambda content: tensor(content, "a.bias").update(dtype="F8_E9"))


@planted("ours", "leads out of")
def a_tag_that_leads_outside(folder: Path) -> None:
    edit(folder, lambda content: content.update(tag="../../outside"))


@planted("ours", "cannot be the name of a folder")
def escapes_in_a_tag(folder: Path) -> None:
    edit(folder, lambda content: content.update(tag="\x1b[2Jx\nok: y"))


@planted("ours", "cannot be the name of a folder")
def a_tag_of_megabytes(folder: Path) -> None:
    edit(folder, lambda content: content.update(tag="t" * (1 << 20)))


@planted("zero2", "two of its records are named")
def a_record_twice(folder: Path) -> None:
    found = entries_of(folder / OPTIMIZER)
    name, data = next((name, data) for name, data in found if "/data/" in name and len(data) > 8)
    write_zip(folder / OPTIMIZER, [*found, (name, bytes(len(data)))])


@planted("zero2", "does not lie in its folder")
def a_second_pickle_in_another_folder(folder: Path) -> None:
    write_zip(folder / OPTIMIZER, [*entries_of(folder / OPTIMIZER), ("other/data.pkl", pickle.dumps({}))])


@planted("zero2", "does not lie in its folder")
def dots_in_the_name_of_a_record(folder: Path) -> None:
    write_zip(folder / OPTIMIZER, [*entries_of(folder / OPTIMIZER), ("../../x", b"1")])


@planted("zero2", "compressed")
def a_zip_bomb(folder: Path) -> None:
    write_zip(folder / OPTIMIZER, [("archive/data.pkl", bytes(64 << 20))], zipfile.ZIP_DEFLATED)


@planted("zero2", "too long or damaged")
def a_comment_behind_the_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / OPTIMIZER, "a") as archive:
        archive.comment = b"hello"


@planted("zero2", "does not fit")
def terabytes_before_the_zip(folder: Path) -> None:
    data = (folder / OPTIMIZER).read_bytes()
    with open(folder / OPTIMIZER, "r+b") as file:
        file.seek(1 << 40)
        file.write(data)


@planted("zero2", "no readable zip directory")
def terabytes_behind_the_zip(folder: Path) -> None:
    os.truncate(folder / OPTIMIZER, 1 << 42)


@planted("zero2", "holds no masters that can be read")
def a_list_that_holds_itself(folder: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    pickled(folder, pickle.dumps({"optimizer_state_dict": {"a": circle}}))


@planted("zero2", "memo number")
def a_place_in_the_memo_that_is_far_away(folder: Path) -> None:
    pickled(folder, b"\x80\x02}r" + struct.pack("<I", 0xFFFFFFFF) + b".")


@planted("zero2", "a key at byte")
def a_key_whose_hash_never_ends(folder: Path) -> None:
    pickled(folder, b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.")


@planted("zero2", "a key at byte")
def a_key_that_overflows_the_stack(folder: Path) -> None:
    pickled(folder, b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.")


@planted("zero2", "is not a file|calls")
def a_call_of_getattr(folder: Path) -> None:
    pickled(folder, b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\n\x85R.")


@planted("zero2", "calls os.system")
def a_call_of_a_name_from_the_stack(folder: Path) -> None:
    pickled(folder, b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.")


@planted("zero2", "an integer at byte")
def an_integer_of_gigabytes(folder: Path) -> None:
    pickled(folder, b"\x80\x02\x8b" + struct.pack("<i", 0x7FFFFFFF) + b".")


@planted("zero2", "are announced")
def bytes_of_exabytes(folder: Path) -> None:
    pickled(folder, b"\x80\x05\x8e" + struct.pack("<Q", 1 << 62) + b".")


@planted("zero2", "no record for its storage")
def a_storage_with_dots_in_its_name(folder: Path) -> None:
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x05\x00\x00\x00../..X\x03\x00\x00\x00cpuK\x01tQ"
    pickled(folder, b"\x80\x02}(X\x14\x00\x00\x00optimizer_state_dict" + storage + b"u.")


@planted("zero2", "cannot be unpickled")
def an_empty_pickle(folder: Path) -> None:
    pickled(folder, b"")


@planted("zero2", "world size|ranks")
def a_billion_ranks(folder: Path) -> None:
    for rank in range(2):
        name = OPTIMIZER.replace("rank_1_", f"rank_{rank}_")
        edit_torch(folder, name, lambda content: content["optimizer_state_dict"].update(partition_count=[10**9] * 2))
    edit_torch(folder, MODULE, lambda content: content.update(dp_world_size=10**9))


@planted("zero2", "has 10 elements")
def a_negative_size(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content["param_shapes"][0].update({"a.bias": (-3,)}))


@planted("zero2", "content is not what DeepSpeed writes")
def a_size_that_is_a_fraction(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content["param_shapes"][0].update({"a.bias": (3.0,)}))


@planted("zero2", "content is not what DeepSpeed writes")
def a_shape_that_is_a_text(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content["param_shapes"][0].update({"a.bias": "3"}))


@planted("zero2", r"the name of a tensor cannot be '.x1b")
def a_name_that_moves_the_cursor(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content["module"].update({"\x1b[2J": torch.ones(2)}))


@planted("zero2", "other numbers of parameters|content is not")
def a_parameter_whose_name_is_a_number(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content["param_shapes"][0].update({5: torch.Size((3,))}))


@planted("zero2", "content is not what DeepSpeed writes")
def names_of_buffers_that_are_a_number(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content.update(buffer_names=5))


@planted("zero2", "content is not what DeepSpeed writes")
def tied_names_that_are_a_number(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content.update(shared_params=7))


@planted("zero2", None)
def tied_names_in_a_circle(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content.update(shared_params={"x": "y", "y": "x"}))


@planted("zero2", None)
def a_buffer_that_is_not_there(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content.update(buffer_names=["count", "nope"]))


@planted("zero2", "content is not what DeepSpeed writes")
def steps_that_are_a_text(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content.update(global_steps="4"))


@planted("zero2", "no .module. in it")
def a_module_that_is_a_list(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content.update(module=[1]))


@planted("zero2", "content is not what DeepSpeed writes")
def a_sparse_buffer(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content["module"].update(count=torch.eye(3).to_sparse()))


@planted("zero2", "its state .exp_avg. has the shape")
def a_moment_that_is_too_short(folder: Path) -> None:
    zero(lambda state: state["base_optimizer_state"]["state"][0].update(exp_avg=torch.zeros(1)))(folder)


@planted("zero2", "step")
def an_infinite_step(folder: Path) -> None:
    zero(lambda state: state["base_optimizer_state"]["state"][0].update(step=torch.tensor(float("inf"))))(folder)


@planted("zero2", "is a FIFO")
def a_fifo(folder: Path) -> None:
    (folder / OPTIMIZER).unlink()
    os.mkfifo(folder / OPTIMIZER)


@planted("zero2", "is rank 1's file")
def the_rank_of_a_sextillion(folder: Path) -> None:
    shutil.copy(folder / OPTIMIZER, folder / f"zero_pp_rank_{'9' * 60}_mp_rank_00_optim_states.pt")


@planted("zero2", "are both rank 1")
def a_rank_in_arabic_digits(folder: Path) -> None:
    shutil.copy(folder / OPTIMIZER, folder / "zero_pp_rank_\N{ARABIC-INDIC DIGIT ONE}_mp_rank_00_optim_states.pt")


@planted("zero3", "piece of the frozen parameter ice")
def another_length_of_a_frozen_parameter(folder: Path) -> None:
    edit_torch(folder, MODULE3, lambda content: content["frozen_param_fragments"].update(ice=torch.zeros(100)))


@planted("zero3", "another set of parameters")
def other_shapes_on_another_rank(folder: Path) -> None:
    edit_torch(folder, MODULE3, lambda content: content["param_shapes"][0].update({"a.bias": torch.Size((4,))}))


@planted("zero3", "")
def masters_that_are_too_short(folder: Path) -> None:
    zero(lambda state: state.update(fp32_flat_groups=[flat[:-1] for flat in state["fp32_flat_groups"]]))(folder)


@planted("zero3", "")
def masters_of_another_dtype(folder: Path) -> None:
    zero(lambda state: state.update(fp32_flat_groups=[flat.int() for flat in state["fp32_flat_groups"]]))(folder)


@planted("zero2", "truncated")
def a_truncated_file(folder: Path) -> None:
    os.truncate(folder / OPTIMIZER, (folder / OPTIMIZER).stat().st_size // 2)


@planted("zero3", "truncated")
def a_file_without_its_last_bytes(folder: Path) -> None:
    os.truncate(folder / MODULE3, (folder / MODULE3).stat().st_size - 3)


@planted("zero2", "is empty")
def an_empty_file(folder: Path) -> None:
    os.truncate(folder / OPTIMIZER, 0)


@planted("zero2", f"{OPTIMIZER} is missing: 2 ranks")
def a_missing_file_of_a_rank(folder: Path) -> None:
    (folder / OPTIMIZER).unlink()


@planted("zero2", f"{MODULE} is missing")
def a_missing_module(folder: Path) -> None:
    (folder / MODULE).unlink()


@planted("zero3", f"{MODULE3} is missing")
def a_missing_module_of_a_rank(folder: Path) -> None:
    (folder / MODULE3).unlink()


@planted("zero2", "rank_1_.* is rank 0's file|rank_0_.* is rank 1's file")
def two_ranks_swapped(folder: Path) -> None:
    other = folder / OPTIMIZER.replace("rank_1_", "rank_0_")
    (folder / OPTIMIZER).rename(folder / "aside")
    other.rename(folder / OPTIMIZER)
    (folder / "aside").rename(other)


@planted("zero2", "is of another step")
def a_rank_of_another_step(folder: Path) -> None:
    zero(lambda state: [row.update(step=torch.tensor(9.0)) for row in state["base_optimizer_state"]["state"].values()])(
        folder
    )


@planted("zero3", f"{MODULE3} is of another global step|is of another global step: 9")
def a_module_of_another_step(folder: Path) -> None:
    edit_torch(folder, MODULE3, lambda content: content.update(global_steps=9))


@planted("zero2", "is of another world size")
def a_rank_of_another_world_size(folder: Path) -> None:
    zero(lambda state: state.update(partition_count=[3, 3]))(folder)


@planted("zero2", "another run or another world size: its part of group 0 has")
def a_rank_of_another_model(folder: Path) -> None:
    zero(lambda state: state["single_partition_of_fp32_groups"].__setitem__(0, torch.zeros(99)))(folder)


@planted("zero2", "CRC-32 of its record .*data.pkl")
def a_flipped_bit_in_a_pickle(folder: Path) -> None:
    data = bytearray((folder / OPTIMIZER).read_bytes())
    data[bytes(data).index(b"single_partition_of_fp32_groups")] ^= 4
    (folder / OPTIMIZER).write_bytes(data)


@planted("zero2", "repeats its elements to")
def a_mask_of_exabytes(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content["module"].update(mask=torch.zeros(1).expand(1 << 60)))


@planted("zero2", "nested too deeply")
def values_nested_too_deeply(folder: Path) -> None:
    pickled(folder, b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")


@planted("zero2", "ice: tensors of torch.complex128")
def a_dtype_that_is_not_stored(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content["module"].update(ice=torch.zeros(3, 2, dtype=torch.complex128)))


@planted("zero2", "before torch 1.6")
def a_file_of_an_old_torch(folder: Path) -> None:
    torch.save({"module": {}}, folder / MODULE, _use_new_zipfile_serialization=False)


@planted("zero2", "not a file of torch.save")
def a_text(folder: Path) -> None:
    (folder / MODULE).write_bytes(b"hello, this is text" * 9)


@planted("zero2", "not a file of DeepSpeed's module states")
def weights_alone(folder: Path) -> None:
    torch.save({"weights": {}}, folder / MODULE)


@planted("zero2", "mixture of experts of a DeepSpeed before 0.5")
def an_expert_of_an_old_deepspeed(folder: Path) -> None:
    torch.save({}, folder / "expert_3_mp_rank_00_model_states.pt")


@planted("zero2", "pipeline with custom axes of parallelism")
def a_layer_with_custom_axes(folder: Path) -> None:
    torch.save({}, folder / "layer_00-slice_01-model_states.pt")


@planted("zero2", "offloaded to NVMe")
def an_optimizer_on_nvme(folder: Path) -> None:
    (folder / "offloaded_tensors").mkdir()


@planted("zero2", "files of a pipeline .* are of another checkpoint")
def a_layer_of_a_pipeline(folder: Path) -> None:
    torch.save({}, folder / "layer_00-model_00-model_states.pt")


@planted("zero2", "layer_0_expert_0_mp_rank_00_model_states.pt is missing")
def an_expert_alone(folder: Path) -> None:
    torch.save({}, folder / "layer_0_expert_3_mp_rank_00_model_states.pt")


@planted("zero2", "mp_rank_01_model_states.pt is one too many")
def a_second_model_rank(folder: Path) -> None:
    content = torch.load(folder / MODULE, weights_only=False)
    torch.save(content, folder / "mp_rank_01_model_states.pt")


@planted("zero2", "universal checkpoint.*mixed")
def a_parameter_of_a_universal_checkpoint(folder: Path) -> None:
    (folder / "zero" / "a.weight").mkdir(parents=True)
    torch.save({}, folder / "zero" / "a.weight" / "fp32.pt")


@planted("zero2", "AutoEP")
def experts_of_autoep(folder: Path) -> None:
    edit_torch(folder, MODULE, lambda content: content.update(ds_autoep_layers=[{"x": 1}]))


@planted("zero2", "as experts have")
def groups_over_fewer_ranks(folder: Path) -> None:
    for name in (OPTIMIZER, OPTIMIZER.replace("rank_1_", "rank_0_")):
        zero(lambda state: state.update(partition_count=[2, 1]), name)(folder)


@planted("zero2", "holds files of two checkpoints")
def a_module_of_zero3(folder: Path) -> None:
    shutil.copy(folder / MODULE, folder / MODULE3)


@planted("ours", "is missing")
def a_missing_shard(folder: Path) -> None:
    (folder / SHARD).unlink()


@planted("ours", "is empty")
def an_empty_shard(folder: Path) -> None:
    os.truncate(folder / SHARD, 0)


@planted("ours", "is truncated")
def a_truncated_shard(folder: Path) -> None:
    os.truncate(folder / SHARD, (folder / SHARD).stat().st_size - 1)


@planted("ours", "does not match its xxh3-128, in .*(master|weight|buffer) of ")
def a_flipped_bit_in_a_tensor(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-1] ^= 1
    (folder / SHARD).write_bytes(data)


@planted("ours", "xxh3-128, outside of its tensors")
def a_flipped_bit_in_a_header(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[12] ^= 1
    (folder / SHARD).write_bytes(data)


@planted("ours", "does not match its own digest")
def a_flipped_bit_in_the_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"zero_stage": 1', '"zero_stage": 3'))


# -- what the commands say ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint of each kind."""
    root = tmp_path_factory.mktemp("whole")
    checkpoint_files.write(root / "ours", tag="t")
    deepspeed_states.write(root / "zero2", 2, 2)
    deepspeed_states.write(root / "zero3", 3, 2)
    return root


@pytest.mark.parametrize("name", FAULTS)
def test_planted_files(whole, tmp_path, capsys, name):
    base, says, change = FAULTS[name]
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

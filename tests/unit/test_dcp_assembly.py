"""What a checkpoint of torch's format holds: states go to the right parameters, and no guess is silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import _nested_dict, _traverse

from ort_zero.checkpoint import aggregate, list_checkpoints, verify
from ort_zero.checkpoint.conversions.converting import convert
from ort_zero.checkpoint.finding import find_source
from ort_zero.errors import CheckpointError

IN_ORDER, LEFT_OUT = "whose order is taken to be the model's", "several weights, or none, may have these numbers"


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, width: int = 4) -> torch.optim.Optimizer:
    """Return the optimizer after a step in which each parameter has another gradient."""
    model(torch.arange(2.0 * width).reshape(2, width)).square().sum().backward()
    optimizer.step()
    return optimizer


def layers(count: int) -> nn.Sequential:
    """Return a model of equal layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(count)))


def frozen() -> nn.Sequential:
    """Return a model whose first layer is frozen."""
    model = layers(3)
    model[0].requires_grad_(False)
    return model


def norms() -> nn.Sequential:
    """Return a model with buffers of the shapes of its parameters."""
    return nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))


class Tied(nn.Module):
    """A model with a tied head, and parameters of two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.up, self.head = nn.Linear(4, 6, bias=False), nn.Linear(6, 6), nn.Linear(4, 6, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.up(self.wte(values)) + self.head(values)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters in their order."""
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])


def by_dimensions(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of two groups: biases, then matrices."""
    return torch.optim.AdamW([{"params": [p for p in model.parameters() if p.dim() == axes]} for axes in (1, 2)])


def reversed_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose groups are not in the order of the model."""
    return torch.optim.AdamW([{"params": [p], "lr": 0.1 * n} for n, p in enumerate(reversed(list(model.parameters())))])


def named_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Return such an optimizer, whose state dict has ``param_names``."""
    return torch.optim.AdamW([{"params": [pair]} for pair in reversed(list(model.named_parameters()))])


@pytest.mark.parametrize("form", ["dcp", "ranks"])
@pytest.mark.parametrize(("make", "optimize", "said"), [
    (lambda: layers(3), plain, IN_ORDER),
    (lambda: layers(3), lambda m: torch.optim.Adafactor(m.parameters()), IN_ORDER),
    (Tied, plain, IN_ORDER),
    (Tied, by_dimensions, IN_ORDER),
    (lambda: layers(2), named_groups, None),
    (lambda: layers(2), reversed_groups, LEFT_OUT),
    (frozen, plain, LEFT_OUT),
    (norms, plain, LEFT_OUT),
])  # fmt: skip
def test_counted_states_go_to_their_parameters_or_are_left_out(tmp_path, form, make, optimize, said):
    model, saved = make(), tmp_path / "saved"
    optimizer = trained(optimize(model), model)
    if form == "dcp":
        dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=saved, no_dist=True)
    else:
        saved.mkdir()
        for kind, state in (("model", model.state_dict()), ("optim", optimizer.state_dict())):
            torch.save(state, saved / f"{kind}_world_size_1_rank_0.pt")
    report = aggregate(saved, tmp_path / "out", what="weights+optimizer")
    found = load_file(tmp_path / "out" / "optimizer.safetensors")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    expected = {
        f"{kind}/{names[id(parameter)]}": value
        for parameter, states in optimizer.state.items()
        for kind, value in states.items()
        if kind != "step"
    }
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert found.keys() == (set() if said == LEFT_OUT else expected.keys())
    notes = [note for note in report.warnings if IN_ORDER in note or LEFT_OUT in note]
    assert [said in note for note in notes] == [True] * (said is not None)
    groups = find_source(str(saved)).optimizer.groups
    assert [group.options["lr"] for group in groups] == [group["lr"] for group in optimizer.param_groups]
    if said != LEFT_OUT:
        assert [group.names for group in groups] == [
            tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups
        ]


A, B = torch.arange(16.0).reshape(4, 4), torch.ones(4, 4)


def state(*names: str, **options: Any) -> dict[str, Any]:
    """Return the state dict of an optimizer that trains `names`."""
    return {"state": {name: {"exp_avg": B} for name in names}, "param_groups": [{"params": [*names], **options}]}


@pytest.mark.parametrize("content", [
    {"model": {"w": A}, "net": {"w": B}},
    {"model": {"_orig_mod.w": A, "w": B}},
    {"model": {"w": A}, "optimizer_0": state("w"), "optimizer_1": state("w")},
    {"model": {"w": A}, "optim": state("w", "_orig_mod.w")},
])  # fmt: skip
def test_two_values_with_one_meaning_are_refused(tmp_path, content):
    dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match="w twice, of two models or optimizers"):
        find_source(str(tmp_path))


def test_groups_of_two_optimizers_stay_apart_and_numbers_in_tensors_are_read(tmp_path):
    model = {"a": A, "b": B, "c": torch.ones(2), "_extra_state": {"calls": 3}}
    optimizers = {"optimizer_0": state("a", lr=torch.tensor([0.5])), "optimizer_1": state("b", lr=0.25)}
    optimizers["optimizer_1"]["param_groups"][0]["params"].append("c")
    dcp.save({"model": model, **optimizers}, checkpoint_id=tmp_path, no_dist=True)
    source = find_source(str(tmp_path))
    assert [(group.names, group.options) for group in source.optimizer.groups] == [
        (("a",), {"lr": 0.5}),
        (("b", "c"), {"lr": 0.25}),
    ]
    convert(str(tmp_path), tmp_path.with_name("converted"), to="dcp")
    converted = find_source(str(tmp_path.with_name("converted") / tmp_path.name))
    assert [group.names for group in converted.optimizer.groups] == [("a",), ("b", "c")]
    assert any("no state of c" in note and "taken to be frozen" in note for note in source.notes)
    assert any("left out: model._extra_state.calls" in note for note in source.notes)


@pytest.mark.parametrize("names", [["a", "b"], [0, 1]])
@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_param_groups_that_torch_2_3_pickled_whole_are_read(tmp_path, monkeypatch, names, lr):
    monkeypatch.setattr(_nested_dict, "traverse_state_dict", _traverse.traverse_state_dict_v_2_3)
    content = {"model": {"a": A, "b": A[0]}, "optim": state(*names, betas=(0.8, 0.9))}
    content["optim"]["state"][names[1]] = {"exp_avg": B[0]}
    content["optim"]["param_groups"].append({"params": [], "lr": lr})
    dcp.save(content, checkpoint_id=tmp_path, no_dist=True)
    keys = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert any(key.partition("param_groups")[2] in ("", ".0") for key in keys if "param_groups" in key)
    source = find_source(str(tmp_path))
    assert source.optimizer is not None
    assert [(group.names, group.options) for group in source.optimizer.groups] == [
        (("a", "b"), {"betas": [0.8, 0.9]}),
        ((), {"lr": 0.5}),
    ]
    assert set(source.by_name("exp_avg")) == {"a", "b"} and not any("left out" in note for note in source.notes)


@pytest.mark.parametrize("optimizer", ["optimizer", "chained_0.optimizer"])
def test_megatrons_states_by_bucket_are_named_with_the_way_out(tmp_path, optimizer):
    bucket = f"{optimizer}.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    states = {f"{bucket}.{kind}": torch.ones(16) for kind in ("exp_avg", "exp_avg_sq", "param")}
    dcp.save({"decoder.weight": A, f"{optimizer}.odd": A, **states}, checkpoint_id=tmp_path, no_dist=True)
    source = find_source(str(tmp_path))
    assert [tensor.name for tensor in source.tensors] == ["decoder.weight"]
    (note,) = (note for note in source.notes if "dp_reshardable" in note)
    assert "save with --dist-ckpt-optim-fully-reshardable" in note and all(key in note for key in states)
    (note,) = (note for note in source.notes if "or are no numbers, are left out" in note)
    assert note.endswith(f": {optimizer}.odd")


@pytest.mark.parametrize(("weights", "tied"), [
    ({"wte.weight": A, "lm_head.weight": A}, {"lm_head.weight": "wte.weight"}),
    ({"wte.weight": A, "lm_head.weight": A.clone(), "teacher.wte.weight": A}, {}),
    ({"wte.weight": A, "old.wte.weight": A}, {}),
    ({"student.weight": A, "teacher.weight": A}, {}),
    ({"wte.weight": A, "lm_head.weight": A.t()}, {}),
])  # fmt: skip
def test_only_a_tied_embedding_is_dropped_and_a_note_says_so(tmp_path, weights, tied):
    dcp.save({"model": weights, "optim": state(next(iter(weights)))}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    source = find_source(str(tmp_path / "dcp"))
    assert source.aliases == tied
    assert [note for note in source.notes if "lm_head.weight = wte.weight" in note] == [
        note for note in source.notes if "one tied weight" in note
    ]
    assert any("one tied weight" in note for note in source.notes) == bool(tied)
    (tmp_path / "ranks").mkdir()
    torch.save(weights, tmp_path / "ranks" / "model_world_size_1_rank_0.pt")
    aggregate(tmp_path / "ranks", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], weights[name]) for name in found)


def test_accelerates_folder_with_two_models_or_an_interrupted_part(tmp_path):
    saves = {"pytorch_model_fsdp_0": {"model": {"w": A}}, "optimizer_0": {"optimizer": state("w", lr=0.5)}}
    for name, content in saves.items():
        dcp.save(content, checkpoint_id=tmp_path / "run" / name, no_dist=True)
    assert verify(str(tmp_path / "run")).ok
    assert find_source(str(tmp_path / "run")).optimizer.groups[0].options == {"lr": 0.5}
    dcp.save({"model": {"w": B}}, checkpoint_id=tmp_path / "run" / "pytorch_model_fsdp_1", no_dist=True)
    with pytest.raises(CheckpointError, match=r"give a tag; tags there: .*pytorch_model_fsdp_0, pytorch_model_fsdp_1"):
        aggregate(tmp_path / "run", tmp_path / "out")
    aggregate(tmp_path / "run", tmp_path / "out", tag="pytorch_model_fsdp_1")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], B)
    for part in saves:
        metadata = tmp_path / "run" / part / ".metadata"
        metadata.rename(tmp_path / "away")
        for file in (tmp_path / "run" / "pytorch_model_fsdp_1").glob("*"):
            file.unlink()
        assert verify(str(tmp_path / "run")).problems == (f"{metadata} is missing: the save was interrupted",)
        assert [listed.whole for listed in list_checkpoints(str(tmp_path / "run"))] == [False]
        (tmp_path / "away").rename(metadata)

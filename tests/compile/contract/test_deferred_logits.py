"""A head that is a unit leaves its logits to the loss; whoever reads them gets PyTorch's."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from head_models import (
    CASES,
    CLASSES,
    LOSSES,
    WIDTH,
    Model,
    as_module,
    assert_same,
    batch,
    padded,
    shifted,
    smoothed,
    step_of,
)  # fmt: skip
from largest_result import Largest
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ort_zero
from ort_zero.compile import head_loss
from ort_zero.compile.deferred_logits import DeferredLogits, DeferringHead, is_head
from ort_zero.units.finding import find_units


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def wrapped(model: nn.Module, **options: Any) -> tuple[Any, Callable[[], int]]:
    """Return a copy of the model with compiled units, and a function that counts the losses without all logits."""
    section = {"place": "ort", **options}
    compiled = ort_zero.wrap(copy.deepcopy(model), backend="compile", log_level="ERROR", compile=section)

    def losses() -> int:
        status = ort_zero.status()["models"][-1]
        assert status["fallbacks"] == 0 and status["backend"] == "onnxruntime", status
        return status["compiled"]["losses_in_chunks"]

    return compiled, losses


def trained(model: nn.Module, loss_of: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss, and the gradients of all parameters that have one."""
    return step_of(model, loss_of(model(inputs[0]), *inputs[1:]))


@pytest.mark.parametrize(("loss", "options", "share"), CASES)
def test_loss_and_gradients_are_those_of_pytorch(loss: str, options: dict[str, bool], share: float, monkeypatch):
    monkeypatch.setattr(head_loss, "_CHUNK", 13 * CLASSES)  # several chunks, the last one smaller
    model, inputs = Model(**options), batch(share)
    compiled, losses = wrapped(model)
    assert_same(trained(compiled, LOSSES[loss], *inputs), trained(model, LOSSES[loss], *inputs))
    assert losses() == 1


@pytest.mark.parametrize("loss_of", [shifted, padded])
def test_in_bf16(loss_of):
    model, inputs = Model(dtype=torch.bfloat16), batch()
    compiled, losses = wrapped(model)
    results, wanted = trained(compiled, loss_of, *inputs), trained(model, loss_of, *inputs)
    assert [each.dtype for each in results] == [each.dtype for each in wanted]
    assert_same(results, wanted, tolerance=2e-2)
    assert losses() == 1


MODELS = {
    "bert": lambda **sizes: hf.BertForMaskedLM(hf.BertConfig(**sizes)),
    "t5": lambda **sizes: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=CLASSES, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                    decoder_start_token_id=0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers_and_their_logits_after_the_step(kind: str):
    sizes = dict(vocab_size=CLASSES, num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32)
    model = MODELS[kind](**sizes).eval()
    compiled, losses = wrapped(model)
    ids, labels = batch()
    results = []
    for each in (model, compiled):
        optimizer = torch.optim.SGD(each.parameters(), lr=1.0)
        outputs = each(input_ids=ids, labels=labels)
        outputs.loss.backward()
        optimizer.step()
        results.append([outputs.loss.detach(), *(p.detach() for p in each.parameters()), outputs.logits.detach() * 1])
    assert_same(results[1], results[0], tolerance=1e-4)
    assert losses() == 1


def test_logits_that_are_read_at_every_call_are_computed_at_once():
    model, (ids, labels) = Model(), batch()
    compiled, losses = wrapped(model)
    deferred = []

    def read(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        deferred.append(isinstance(logits, DeferredLogits))
        return logits.square().mean() + as_module(logits, labels)

    wanted = trained(model, read, ids, labels)
    deferred.clear()
    for _ in range(6):
        assert_same(trained(compiled, read, ids, labels), wanted)
    assert deferred == 3 * [True] + 3 * [False] and losses() == 0


def test_logits_that_are_read_after_the_loss_lead_gradients_on():
    model, (ids, labels) = Model(), batch()
    compiled, losses = wrapped(model)

    def read(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return as_module(logits, labels) + logits.square().mean()

    assert_same(trained(compiled, read, ids, labels), trained(model, read, ids, labels))
    assert losses() == 1


def scaled(logits: torch.Tensor) -> torch.Tensor:
    return logits.mul_(0.5)


def masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 7:] = -10.0
    return logits


def half_masked(logits: torch.Tensor) -> torch.Tensor:
    rows = logits.view(-1, CLASSES)
    logits[:, 3] = 0.0
    return rows


def copied(logits: torch.Tensor) -> torch.Tensor:
    before = logits.clone()
    logits.zero_()
    return before


@pytest.mark.parametrize("change", [scaled, masked, half_masked, copied])
def test_logits_that_are_changed_in_place(change):
    model, inputs = Model(), batch(1.0)
    compiled, losses = wrapped(model)

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return as_module(change(logits), labels.clamp(max=6))

    assert_same(trained(compiled, loss_of, *inputs), trained(model, loss_of, *inputs))
    assert losses() == 0


def by_torch_save(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    return torch.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: torch.from_numpy(logits.detach().numpy()),
        lambda logits: torch.from_numpy(np.asarray(logits.detach())),
        lambda logits: torch.tensor(logits.tolist()),
        lambda logits: pickle.loads(pickle.dumps(logits.detach())),
        lambda logits: copy.deepcopy(logits.detach()),
        lambda logits: torch.stack([logits[0], *logits[1:]]),
        lambda logits: torch.cat([row for row in logits.detach().cpu()]).view(logits.shape),
        lambda logits: torch.from_dlpack(logits.detach()),
        by_torch_save,
    ],
    ids=["numpy", "asarray", "tolist", "pickle", "deepcopy", "rows", "iteration", "dlpack", "torch.save"],
)
def test_whoever_reads_logits_gets_those_of_pytorch(read):
    model, (ids, _) = Model(), batch()
    compiled, _ = wrapped(model)
    logits = compiled(ids)
    assert isinstance(logits, DeferredLogits) and logits.shape == (3, 21, CLASSES) and logits.requires_grad
    torch.testing.assert_close(read(logits).float(), model(ids), check_dtype=False)
    assert repr(logits).startswith("tensor(")


def test_a_frozen_head_gets_no_gradient():
    model, inputs = Model(bias=True), batch()
    model.head.requires_grad_(False)
    compiled, losses = wrapped(model)
    assert_same(trained(compiled, as_module, *inputs), trained(model, as_module, *inputs))
    assert losses() == 1 and compiled.head.weight.grad is None


def weighted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = torch.linspace(0.5, 1.5, CLASSES)
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), weight)


def along_the_second(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def row_by_row(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), reduction="none").square().mean()


def of_tokens(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    chosen = logits.log_softmax(-1).gather(2, labels.clamp(min=0).unsqueeze(2))
    return -(chosen * (labels >= 0).unsqueeze(2)).mean()


@pytest.mark.parametrize("loss_of", [smoothed, weighted, along_the_second, row_by_row, of_tokens])
def test_other_losses_read_the_logits(loss_of):
    model, inputs = Model(), batch()
    compiled, losses = wrapped(model)
    assert_same(trained(compiled, loss_of, *inputs), trained(model, loss_of, *inputs))
    assert losses() == (loss_of is smoothed)  # a part of that loss is a plain cross entropy


def test_a_backward_that_runs_twice_and_a_scaled_loss():
    model, (ids, labels) = Model(), batch()
    compiled, _ = wrapped(model)
    for each in (model, compiled):
        loss = as_module(each(ids), labels) * 3
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same([p.grad for p in compiled.parameters()], [p.grad for p in model.parameters()])


def test_a_penalty_on_gradients():
    model, (ids, labels) = Model(), batch()
    compiled, _ = wrapped(model)

    def penalty(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(as_module(logits, labels), logits, create_graph=True)
        return gradient.square().sum() * 1e3

    assert_same(trained(compiled, penalty, ids, labels), trained(model, penalty, ids, labels), tolerance=1e-4)


def test_within_activation_checkpointing():
    model, inputs = Model(), batch()
    compiled, losses = wrapped(model)
    wanted = trained(model, as_module, *inputs)
    for reentrant in (False, True):
        forward, hidden = compiled.head, []

        def head_and_loss(states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return as_module(forward(states), labels)

        compiled.zero_grad()
        states = compiled.blocks[1](compiled.blocks[0](compiled.embedding(inputs[0])))
        loss = checkpoint(head_and_loss, states, inputs[1], use_reentrant=reentrant)
        loss.backward()
        hidden += [loss.detach(), *(p.grad for p in compiled.parameters() if p.grad is not None)]
        assert_same(hidden, wanted)
    assert losses() >= 2


def test_hooks_see_logits():
    model, inputs = Model(), batch()
    compiled, losses = wrapped(model)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, each in (("torch", model), ("ort", compiled)):
        each.head.register_forward_hook(lambda m, args, result, n=name: seen.setdefault(n, []).append(result.norm()))
        each.head.register_full_backward_hook(
            lambda m, to_inputs, of_results, n=name: seen[n].append(of_results[0].norm())
        )
    assert_same(trained(compiled, as_module, *inputs), trained(model, as_module, *inputs))
    assert_same(seen["ort"], seen["torch"])


@pytest.mark.parametrize("how", ["no gradients", "autocast", "off"])
def test_where_logits_are_computed_at_once(how: str):
    compiled, _ = wrapped(Model(), fuse_loss="off" if how == "off" else "auto")
    ids, _ = batch()
    with torch.set_grad_enabled(how != "no gradients"), torch.autocast("cpu", enabled=how == "autocast"):
        assert type(compiled(ids)) is torch.Tensor


def test_a_head_that_computes_its_logits_is_timed_as_other_units_are():
    compiled, _ = wrapped(Model(), fuse_loss="off", place="measured")
    inputs = batch()
    for _ in range(100):
        trained(compiled, as_module, *inputs)
    assert ort_zero.status()["models"][-1]["compiled"]["settled"]


def test_a_head_on_another_kind_of_device_computes_its_logits():
    head, hidden = nn.Linear(16, CLASSES), torch.randn(3, 16)
    for devices, kind in ((("cpu",), DeferredLogits), (("cuda",), torch.Tensor)):
        call = DeferringHead(nn.Linear.forward, lambda *weights: head_loss.IN_PYTORCH, lambda: None, devices)
        assert type(call(head, hidden)) is kind


def test_which_modules_are_heads():
    assert is_head(nn.Linear(16, 4096)) and not is_head(nn.Linear(16, 4095)) and not is_head(nn.Linear(4096, 4096))
    sizes = dict(vocab_size=CLASSES, num_hidden_layers=2, num_attention_heads=2, hidden_size=16, intermediate_size=32)
    bert = MODELS["bert"](**sizes)
    assert [unit.path for unit in find_units(bert)][2:] == ["cls"]
    parts = ["cls.predictions.transform", "cls.predictions.decoder"]
    assert [unit.path for unit in find_units(bert, stands_alone=is_head)][2:] == parts


def test_no_more_logits_exist_than_a_chunk_has(monkeypatch):
    monkeypatch.setattr(head_loss, "_CHUNK", 4 * CLASSES)
    compiled, losses = wrapped(Model())
    inputs = batch(1.0)
    trained(compiled, as_module, *inputs)
    logits = compiled(inputs[0])  # outside of the mode, within which units run their own forwards
    with Largest() as largest:
        as_module(logits, inputs[1]).backward()
    assert largest.elements == WIDTH * CLASSES == 16 * CLASSES < inputs[0].numel() * CLASSES
    assert losses() == 2

"""Torch's activation checkpointing in ONNX Runtime: what is computed again and kept, and that nothing else changes."""

from __future__ import annotations

import functools
from collections import Counter

import deepspeed
import onnx
import pytest
import torch
from older_versions import older
from tiny_models import bert, gpt2
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ort_zero import config
from ort_zero.errors import ExportError
from ort_zero.ortmodule.compat.ort_kernels import BARRIER, RECOMPUTED
from ort_zero.ortmodule.compat.ortmodule import import_ortmodule
from ort_zero.ortmodule.onnx_edit.topology import input_names
from ort_zero.ortmodule.recompute.graph_model import GraphModel
from ort_zero.ortmodule.wrap import wrap_model
from ort_zero.statistics.collect.subscriber_base import SubscriberBase
from ort_zero.statistics.collect.subscriber_manager import GlobalSubscriberManager

WIDTH, BATCH = 16, 12
BLOCKS = config.MemoryConfig(checkpointing="recompute")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Keep what is stored in a folder of the test's own."""
    import_ortmodule()  # its extensions are built where they always are
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path))


class Layer(nn.Module):
    """A block as of a transformer, without attention."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, scale=None):
        hidden = torch.tanh(self.up(self.norm(x)))
        hidden = hidden if scale is None else hidden * scale
        return x + self.dropout(self.down(hidden))


class Stack(nn.Module):
    """Layers that are given to activation checkpointing in the way `call` says."""

    def __init__(self, call, layers: int = 3, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Layer(dropout) for _ in range(layers)))
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.call = call

    def forward(self, x):
        return self.head(self.call(self.layers, self.first(x))).square().mean()


def one_by_one(layers, x, *, apply=checkpoint, **options):
    for layer in layers:
        x = apply(layer, x, **options)
    return x


def with_closure(layers, x):
    for layer in layers:
        x = checkpoint(lambda layer=layer, x=x: layer(x), use_reentrant=False)
    return x


def with_bound_arguments(layers, x):
    scale = torch.sigmoid(x.mean(-1, keepdim=True))
    for layer in layers:
        x = checkpoint(functools.partial(layer, scale=scale), x, use_reentrant=False)
    return x


def with_nested_results(layers, x):
    def run(given):
        hidden = layers[0](given["x"])
        return {"hidden": layers[1](hidden), "pair": (hidden.relu(), 3)}

    found = checkpoint(run, {"x": x}, use_reentrant=False)
    return layers[2](found["hidden"] + found["pair"][0] * found["pair"][1])


def by_deepspeed(layers, x):
    return one_by_one(layers, x, apply=deepspeed.checkpointing.checkpoint)


def inside_each_other(layers, x):
    def inner(x):
        return checkpoint(layers[1], layers[0](x), use_reentrant=False)

    return checkpoint(layers[2], checkpoint(inner, x, use_reentrant=False), use_reentrant=False)


def with_chosen_operators(layers, x):
    contexts = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
    )
    return one_by_one(layers, x, use_reentrant=False, context_fn=contexts)


def with_changed_argument(layers, x):
    def run(x):
        return layers[0](x.mul_(0.5).add_(1))

    x = torch.tanh(x)
    found = checkpoint(run, x, use_reentrant=False)
    return layers[2](layers[1](found)) + x


FORMS = {
    "reentrant": (functools.partial(one_by_one, use_reentrant=True), 3),
    "not reentrant": (functools.partial(one_by_one, use_reentrant=False), 3),
    "bound early": (functools.partial(one_by_one, apply=functools.partial(checkpoint, use_reentrant=False)), 3),
    "sequential": (lambda layers, x: checkpoint_sequential(layers, 3, x, use_reentrant=False), 2),
    "deepspeed": (by_deepspeed, 3),
    "closure": (with_closure, 3),
    "bound arguments": (with_bound_arguments, 3),
    "nested results": (with_nested_results, 1),
    "inside each other": (inside_each_other, 2),
}
if older("deepspeed", "0.16"):
    del FORMS[
        "deepspeed"
    ]  # wants a process group, and fails with one as later ones do: tests/versions/plain_deepspeed.py
if hasattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts"):  # from torch 2.5 on
    FORMS["chosen operators"] = (with_chosen_operators, 3)


def graph_of(runtime) -> onnx.ModelProto:
    return runtime.modes[True].graphs[0].session.model


def copies(model: onnx.ModelProto) -> Counter:
    return Counter(node.op_type for node in model.graph.node if node.name.endswith(RECOMPUTED))


def held_bytes(runtime, sizes: dict[str, int]) -> int:
    """Return the bytes of the forward's values that the backward reads, weights and arguments apart."""
    model = graph_of(runtime)
    nodes = list(model.graph.node)
    barrier = next(i for i, node in enumerate(nodes) if node.op_type == BARRIER)
    made = {name for node in nodes[:barrier] for name in node.output}
    held = made & {name for node in nodes[barrier + 1 :] for name in input_names(node)}
    graph = GraphModel.from_onnx(model, sizes)
    number = {name: i for i, name in enumerate(graph.values)}
    return sum(graph.sizes[value] for value in {graph.owner(number[name]) for name in held})


def inputs(seed: int = 1) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.parametrize("form", FORMS)
def test_losses_gradients_and_blocks_of_each_form(form):
    call, blocks = FORMS[form]
    plain, ours = Stack(call), Stack(call)
    runtime, wrapped = wrap_model(ours, config.OrtModuleConfig(), 0, memory=BLOCKS)
    for seed in (1, 2):
        expected, got = plain(inputs(seed)), wrapped(inputs(seed))
        expected.backward()
        got.backward()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    status = runtime.status()
    assert status["backend"] == "onnxruntime" and status["graphs"]["training"]["runs"]["backward"] == 2
    (decision,) = status["memory"]
    assert (decision["blocks"]["found"], decision["blocks"]["recomputed"]) == (blocks, blocks)
    assert ("checkpointed blocks", f"{blocks} of {blocks} computed again, {decision['blocks']['nodes']} nodes") in (
        runtime.memory_summary()
    )
    made = copies(graph_of(runtime))
    assert made["Tanh"] + made["FusedGemm"] >= blocks and made["LayerNormalization"] >= blocks


def test_wrapped_modules():
    def model() -> Stack:
        made = Stack(one_by_one_plainly)
        for i, kind in enumerate((CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT)):
            made.layers[i] = checkpoint_wrapper(made.layers[i], checkpoint_impl=kind)
        return made

    plain, ours = model(), model()
    runtime, wrapped = wrap_model(ours, config.OrtModuleConfig(), 0, memory=BLOCKS)
    expected, got = plain(inputs()), wrapped(inputs())
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert runtime.status()["memory"][0]["blocks"]["recomputed"] == 2
    assert list(ours.state_dict()) == list(Stack(one_by_one_plainly).state_dict())


def test_an_argument_that_a_block_changes_is_changed_for_the_rest_too():
    # PyTorch itself would change it twice; plain calls say what is right
    ours, plain = Stack(with_changed_argument), Stack(with_changed_argument)
    runtime, wrapped = wrap_model(ours, config.OrtModuleConfig(), 0, memory=BLOCKS)
    got = wrapped(inputs())
    x = torch.tanh(plain.first(inputs()))
    changed = x * 0.5 + 1
    hidden = plain.layers[2](plain.layers[1](plain.layers[0](changed))) + changed
    expected = plain.head(hidden).square().mean()
    got.backward()
    expected.backward()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_only_the_arguments_of_blocks_are_held():
    """Counted in the graph that runs: of a block its argument is left, not the four times wider values inside."""
    call = FORMS["not reentrant"][0]
    sizes = {"x_dim0": BATCH}
    held = {}
    for name, layers in (("few", 3), ("many", 9)):
        plain, _ = wrap_model(Stack(one_by_one_plainly, layers), config.OrtModuleConfig(), 0), None
        runtime, wrapped = plain
        wrapped(inputs()).backward()
        held["without", name] = held_bytes(runtime, sizes)
        runtime, wrapped = wrap_model(Stack(call, layers), config.OrtModuleConfig(), 0, memory=BLOCKS)
        wrapped(inputs()).backward()
        held["with", name] = held_bytes(runtime, sizes)
    value = BATCH * WIDTH * 4
    per_block = (held["with", "many"] - held["with", "few"]) / 6
    assert value <= per_block < 1.2 * value, held
    assert (held["without", "many"] - held["without", "few"]) / 6 > 5 * value, held


def one_by_one_plainly(layers, x):
    return layers(x)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformers_train_as_without(kind, dropout):
    """Against PyTorch without dropout; with dropout against ORT, whose masks are drawn once and kept."""
    make, options = {
        "gpt2": (gpt2, {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}),
        "bert": (bert, {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}),
    }[kind]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make(words=64, hidden=32, positions=16, **options).train()

    def train(module: nn.Module, forward) -> tuple[list[float], list[torch.Tensor]]:
        losses, optimizer = [], torch.optim.SGD(module.parameters(), 0.1)
        for step in range(3):
            ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
            loss = forward(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone()).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, [parameter.detach().clone() for parameter in module.parameters()]

    plain, ours = model(), model()
    expected = train(plain, plain if not dropout else wrap_model(plain, config.OrtModuleConfig(), 0)[1])
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    runtime, wrapped = wrap_model(ours, config.OrtModuleConfig(), 0, memory=BLOCKS)
    losses, parameters = train(ours, wrapped)
    assert losses == pytest.approx(expected[0], abs=2e-5)
    for mine, theirs in zip(parameters, expected[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)
    assert runtime.status()["memory"][0]["blocks"]["recomputed"] == 2
    made = copies(graph_of(runtime))
    assert made["Softmax"] >= 1 and made["Dropout"] == 0
    if dropout:
        assert made["DropoutGrad"] >= 1


def test_what_must_not_run_twice_runs_once():
    """Random numbers, running statistics and PyTorch's own nodes stay in the forward; the rest of a block does not."""

    class Effects(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)

        def block(self, x):
            return torch.cumprod(torch.tanh(self.norm(torch.tanh(self.up(x)))), -1)

        def forward(self, x, checkpointed: bool):
            h = checkpoint(self.block, x.exp(), use_reentrant=False) if checkpointed else self.block(x.exp())
            return self.head(h.sin()).square().mean()

    plain, ours = Effects(), Effects()
    runtime, wrapped = wrap_model(ours, config.OrtModuleConfig(), 0, memory=BLOCKS)
    for seed in (1, 2):
        expected, got = plain(inputs(seed), False), wrapped(inputs(seed), True)
        expected.backward()
        got.backward()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.norm.running_mean, plain.norm.running_mean)
    torch.testing.assert_close(ours.norm.running_var, plain.norm.running_var)
    assert int(ours.norm.num_batches_tracked) == 2
    made = copies(graph_of(runtime))
    assert made["Tanh"] >= 1 and made["PythonOp"] == 0


def test_refused_by_default_with_the_very_key():
    _, wrapped = wrap_model(Stack(FORMS["not reentrant"][0]), config.OrtModuleConfig(), 0)
    with pytest.raises(ExportError, match=r'uses torch activation checkpointing.*"checkpointing": "recompute"'):
        wrapped(inputs())


def test_a_module_without_checkpointing_runs_as_without_the_key():
    runtime, wrapped = wrap_model(Stack(one_by_one_plainly), config.OrtModuleConfig(), 0, memory=BLOCKS)
    wrapped(inputs()).backward()
    assert runtime.status()["memory"] == [] and not copies(graph_of(runtime))
    assert runtime.memory_summary() == [("checkpointed blocks", "none in the module")]


def test_evaluation_has_no_blocks():
    module = Stack(FORMS["reentrant"][0])
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), 0, memory=BLOCKS)
    wrapped.eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(inputs()), Stack(FORMS["reentrant"][0])(inputs()), rtol=1e-5, atol=1e-6)
    assert runtime.status()["backend"] == "onnxruntime" and runtime.status()["graphs"]["inference"]["exports"] == 1


def test_flags_that_change_in_the_middle_make_another_graph():
    torch.manual_seed(0)
    module = gpt2(words=64, hidden=32, positions=16).train()
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), 0, memory=BLOCKS)
    ids = torch.randint(0, 64, (4, 16))
    expected = module(input_ids=ids, labels=ids, use_cache=False).loss.item()
    found = []
    for change in (lambda: None, module.gradient_checkpointing_enable, module.gradient_checkpointing_disable):
        change()
        loss = wrapped(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        assert loss.item() == pytest.approx(expected, abs=1e-5)
        found.append(bool(copies(graph_of(runtime))))
    assert found == [False, True, False]


def test_a_part_that_runs_in_pytorch_may_checkpoint_inside():
    call = FORMS["reentrant"][0]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stack(call)
            torch.manual_seed(1)
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.inner(self.first(x).tanh()) + self.first.weight.square().sum()

    plain, ours = Outer(), Outer()
    section = config.OrtModuleConfig(exclude=["inner"])
    runtime, wrapped = wrap_model(ours, section, 0, memory=BLOCKS)
    for seed in (1, 2):
        expected, got = plain(inputs(seed)), wrapped(inputs(seed))
        expected.backward()
        got.backward()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(gradients(ours), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert "inner" in runtime.status()["in_torch"]


def test_a_graph_from_the_export_cache_has_the_same_blocks(tmp_path):
    def first_step() -> tuple:
        torch.manual_seed(0)
        module = gpt2(words=64, hidden=32, positions=16).train()
        module.gradient_checkpointing_enable({"use_reentrant": False})
        section = config.OrtModuleConfig(cache_dir=str(tmp_path / "cache"))
        runtime, wrapped = wrap_model(module, section, 0, memory=BLOCKS)
        ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
        loss = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        return runtime, loss.item(), copies(graph_of(runtime))

    _, loss, made = first_step()
    runtime, again, loaded = first_step()
    assert runtime.status()["transitions"][0]["cache"].startswith("hit"), runtime.status()["transitions"]
    assert runtime.status()["graphs"]["training"]["exports"] == 0
    assert (again, loaded) == (loss, made) and made


class Norms(SubscriberBase):
    """Keeps a number for everything it is shown."""

    def __init__(self):
        self.seen: dict[tuple, float] = {}

    def forward_slot_apply(self, step, slot, tensor):
        self._keep("forward", step, slot, tensor)

    def gradient_slot_apply(self, step, slot, gradient):
        self._keep("backward", step, slot, gradient)

    def _keep(self, direction, step, slot, tensor):
        key = (step, direction, slot.call.path, slot.call.occurrence, slot.kind, slot.name)
        self.seen[key] = tensor.detach().double().norm().item()

    def close(self):
        pass


def test_subscribers_see_what_they_see_without_checkpointing():
    call, shown, sizes = FORMS["not reentrant"][0], [], []
    for section, form in ((None, functools.partial(one_by_one, apply=lambda layer, x: layer(x))), (BLOCKS, call)):
        module, norms = Stack(form), Norms()
        runtime, wrapped = wrap_model(module, config.OrtModuleConfig(), 0, memory=section)
        GlobalSubscriberManager.subscribe(module, [norms])
        for seed in (1, 2):
            wrapped(inputs(seed)).backward()
        shown.append(norms.seen)
        sizes.append(held_bytes(runtime, {"x_dim0": BATCH}))
    assert len(shown[0]) > 50 and shown[0].keys() == shown[1].keys()
    for key, value in shown[0].items():
        assert shown[1][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert runtime.status()["memory"][0]["blocks"]["recomputed"] == 3
    assert sizes[1] < 0.5 * sizes[0]

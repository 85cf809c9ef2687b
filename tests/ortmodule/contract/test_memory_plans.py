"""Recomputation in one process: what ORT 1.19.2 does with plans, what we make of it, and that nothing else changes."""

from __future__ import annotations

import json
from collections import Counter

import onnx
import pytest
import torch
from tiny_models import bert, gpt2, t5
from torch import nn

from ort_zero import config
from ort_zero.errors import ExportError, MemoryPlanError
from ort_zero.ortmodule.compat.ort_kernels import RECOMPUTED
from ort_zero.ortmodule.compat.ortmodule import Recompute, import_ortmodule
from ort_zero.ortmodule.recompute import candidates, graph_edits, peak_memory
from ort_zero.ortmodule.recompute.graph_model import GraphModel
from ort_zero.ortmodule.runtime.transitions import MOST_READS
from ort_zero.ortmodule.wrap import wrap_model
from ort_zero.statistics.collect.subscriber_base import SubscriberBase
from ort_zero.statistics.collect.subscriber_manager import GlobalSubscriberManager

WORDS, LENGTH, BATCH = 128, 32, 8
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


@pytest.fixture(autouse=True)
def plans(tmp_path, monkeypatch):
    """Keep plans in a folder of the test's own."""
    import_ortmodule()  # its extensions are built where they always are
    monkeypatch.setenv("ORT_ZERO_CACHE_DIR", str(tmp_path))
    return tmp_path / "plans"


def wrap(module: nn.Module, memory: dict | None = None, **section):
    memory = config.MemoryConfig(**memory) if memory is not None else None
    return wrap_model(module.train(), config.OrtModuleConfig(**section), 0, memory=memory)


def model(kind: str = "gpt2") -> nn.Module:
    torch.manual_seed(0)
    if kind == "t5":
        return t5(words=WORDS, hidden=64, dropout_rate=0.1)
    if kind == "gpt2":
        return gpt2(words=WORDS, hidden=64, positions=LENGTH, **DROPOUT)
    return bert(words=WORDS, hidden=64, positions=LENGTH, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def train(module: nn.Module, wrapped, steps: int = 3) -> list[float]:
    # Adam would divide the rounding of a gradient that is nearly zero by its own size
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9), []
    for step in range(steps):
        loss = wrapped(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def built(kind: str = "gpt2"):
    """Return manager, ORT's optimized training graph, what ORT knows of it, and its table."""
    runtime, wrapped = wrap(model(kind))
    wrapped(**batch())
    manager = runtime.modes[True].builder.manager
    session = runtime.modes[True].graphs[0].session
    agent, optimized = graph_edits.optimized(manager, session.model, session.info)
    return manager, optimized, session.info, candidates.clusters_of(manager.recomputable(agent, "1:0"))


def sizes() -> dict[str, int]:
    return {f"{name}_dim{i}": n for name in batch() for i, n in enumerate((BATCH, LENGTH))}


def copies(graph: onnx.ModelProto) -> list:
    return sorted((n.name, tuple(n.input)) for n in graph.graph.node if n.name.endswith(RECOMPUTED))


def test_ort_alone_ignores_counts(tmp_path):
    """The reason why copies are taken back here; if this fails, ORT has learned to count."""
    manager, optimized, info, clusters = built()
    assert clusters["FastGelu+Reshape+:1"].frequency == 2
    file = tmp_path / "plan.json"
    file.write_text('["FastGelu+Reshape+:1:1"]')
    _, changed = graph_edits.optimized(manager, optimized, info, Recompute(str(file)))
    assert sum(n.op_type == "FastGelu" and n.name.endswith(RECOMPUTED) for n in changed.graph.node) == 2


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_what_is_left_of_everything_is_what_ort_makes_of_each_cluster(kind):
    manager, optimized, info, clusters = built(kind)
    full = graph_edits.with_copies(manager, optimized, info, list(clusters), "1:0")
    everything = GraphModel.from_onnx(full, sizes())
    found = candidates.find_candidates(everything, {c.name: c.kind for c in clusters.values()})
    assert {e.cluster for e in found} == set(clusters)
    for key, cluster in clusters.items():
        mine = [candidate for candidate in found if candidate.cluster == key]
        assert len(mine) >= cluster.frequency - 1, key  # ORT's table leaves out what shares its memory
        alone = graph_edits.with_copies(manager, optimized, info, [key], "1:0")
        assert copies(graph_edits.only_copies(full, candidates.copies_of(mine))) == copies(alone), key
    assert not copies(graph_edits.only_copies(full, []))
    assert peak_memory.peak(candidates.applied(everything, [])) == peak_memory.peak(
        GraphModel.from_onnx(optimized, sizes())
    )


@pytest.mark.parametrize("memory", [{"recompute": "all"}, {"recompute": "auto", "budget": "99%"},
                                    {"recompute": "all", "level": 0}, {"recompute": "all", "level": 2}])  # fmt: skip
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_losses_are_those_without(kind, memory):
    plain, ours = model(kind), model(kind)
    expected = train(plain, wrap(plain)[1])
    runtime, wrapped = wrap(ours, memory)
    assert train(ours, wrapped) == pytest.approx(expected, abs=1e-5)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, dict(plain.named_parameters())[name], rtol=0, atol=1e-5)
    status = runtime.status()
    assert status["backend"] == "onnxruntime" and status["graphs"]["training"]["runs"]["backward"] == 3
    (decision,) = status["memory"]
    if memory["recompute"] == "all":
        assert sum(row["actual"] for row in decision["table"]) > 10
        nodes = [n.name for n in runtime.modes[True].graphs[0].session.model.graph.node]
        assert sum(name.endswith(RECOMPUTED) for name in nodes) > 10


def test_what_ort_does_not_compute_again_is_in_the_plan_of_an_encoder_decoder():
    """Relu is not in ORT's list, and nothing stashes the masks and position biases that its softmaxes read."""
    module = model("t5")
    runtime, wrapped = wrap(module, {"recompute": "all", "level": 0})
    train(module, wrapped, 1)
    nodes = runtime.current(True).session.model.graph.node
    again = Counter(node.op_type for node in nodes if node.name.endswith(RECOMPUTED))
    assert (again["Relu"], again["Softmax"]) == (4, 6)
    masked = [node.name for node in nodes if node.op_type == "DropoutGrad" and node.name.endswith(RECOMPUTED)]
    assert sum("DenseReluDense" in name for name in masked) == 4
    # what all layers share is held, and not computed once more
    assert not again["Log"] and not again["ATen"] and not again["GreaterOrEqual"]
    (decision,) = runtime.status()["memory"]
    rows = {row["cluster"]: row["actual"] for row in decision["table"]}
    assert sum(count for cluster, count in rows.items() if cluster.endswith("Softmax+")) == 6
    sizes = GraphModel.from_onnx(runtime.current(True).session.model, decision["sizes"])
    made = {value: node.operator for node in sizes.nodes for value in node.makes}
    unknown = {made.get(sizes.values.index(name)) for name in sizes.unknown}
    assert not unknown & {"Where", "Greater", "Transpose", "Add"}


def test_masks_differ_from_step_to_step_and_from_seed_to_seed():
    def losses(seed: int) -> list[float]:
        module = model()
        torch.manual_seed(seed)
        _, wrapped = wrap(module)
        return [wrapped(**batch()).loss.item() for _ in range(3)]

    first, second = losses(1), losses(2)
    assert len(set(first)) == 3 and not set(first) & set(second)
    assert losses(1) == first


def test_the_nodes_run_in_the_order_of_the_file(tmp_path, monkeypatch):
    runtime, wrapped = wrap(model(), {"recompute": "all"})
    from ort_zero.ortmodule.compat import ortmodule as ort_compat

    for manager in ort_compat.managers_of(wrapped):
        original = manager._get_session_config

        def profiled(original=original):
            options, *rest = original()
            options.enable_profiling = True
            options.profile_file_prefix = str(tmp_path / "profile")
            return (options, *rest)

        monkeypatch.setattr(manager, "_get_session_config", profiled)
    wrapped(**batch()).loss.backward()
    session = runtime.modes[True].graphs[0].session
    events = json.loads(open(session.agent._inference_session.end_profiling()).read())
    suffix = "_kernel_time"
    ran = [e["name"].removesuffix(suffix) for e in events if e.get("cat") == "Node" and e["name"].endswith(suffix)]
    # ONNX Runtime takes a node that reads sizes as soon as it can: its result has a few bytes
    early = {node.name for node in session.model.graph.node if node.op_type in ("Shape", "YieldOp")}
    in_file = [node.name for node in session.model.graph.node if node.name not in early]
    assert [name for name in ran if name not in early] == in_file and len(in_file) > 100


@pytest.mark.smoke
def test_a_plan_that_was_kept_is_used_at_once(plans):
    memory = {"recompute": "auto", "budget": "99%"}
    first, wrapped = wrap(model(), memory)
    wrapped(**batch()).loss.backward()
    (file,) = plans.glob("*.plan.json")
    again, wrapped = wrap(model(), memory)
    wrapped(**batch()).loss.backward()
    one, two = first.status()["memory"][0], again.status()["memory"][0]
    assert (one["found"], two["found"]) == (False, True)
    assert one["plan"] == two["plan"] and two["kept"] == str(file)
    # another batch is another plan; so is a file that is damaged
    file.write_text("{")
    third, wrapped = wrap(model(), memory)
    wrapped(**batch()).loss.backward()
    assert third.status()["memory"][0]["found"] is False


def test_freezing_makes_a_new_plan_of_the_same_request():
    module = model()
    runtime, wrapped = wrap(module, {"recompute": "all"})
    wrapped(**batch()).loss.backward()
    module.transformer.wte.weight.requires_grad_(False)
    wrapped(**batch()).loss.backward()
    actions = [t["transition"] for t in runtime.status()["transitions"]]
    assert actions == ["export", "re-process"] and len(runtime.status()["memory"]) == 2
    for graph in runtime.modes[True].graphs:
        assert any(n.name.endswith(RECOMPUTED) for n in graph.session.model.graph.node)


class Norms(SubscriberBase):
    """Keeps a number for everything it is shown, in the order in which it comes."""

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


def test_subscribers_see_what_they_see_without():
    shown = []
    for memory in (None, {"recompute": "all"}):
        module, norms = model(), Norms()
        runtime, wrapped = wrap(module, memory)
        GlobalSubscriberManager.subscribe(module, [norms])
        for step in range(2):
            wrapped(**batch(step)).loss.backward()
        shown.append(norms.seen)
    assert runtime.status()["memory"][0]["plan"]
    assert len(shown[0]) > 100 and shown[0].keys() == shown[1].keys()
    for key, value in shown[0].items():
        assert shown[1][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        h = self.a(x)
        return self.b(h * (h < 0.1).float()).sum()


@pytest.mark.parametrize(
    ("memory", "plan"),
    [
        ({"recompute": "all"}, ["Gemm+Less+Cast+:1:1", "Gemm+Mul+:1:1"]),
        ({"recompute": "all", "level": 2}, ["Cast+:2:1", "Gemm+Mul+:1:1"]),
        ({"recompute": "Cast+:2:-1"}, ["Cast+:2:1"]),
    ],
)
def test_compromise(memory, plan):
    torch.manual_seed(0)
    plain, x = Gate(), torch.randn(16, 64)
    expected = plain(x)
    expected.backward()
    ours = Gate()
    ours.load_state_dict(plain.state_dict())
    runtime, wrapped = wrap(ours, memory)
    got = wrapped(x)
    got.backward()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    assert sorted(runtime.status()["memory"][0]["plan"]) == plan


def test_a_plan_of_another_model():
    _, wrapped = wrap(model(), {"recompute": "BiasGelu+:1:-1"})
    with pytest.raises(MemoryPlanError, match=r"'BiasGelu\+:1', which this model does not have; (did you mean|it has)"):
        wrapped(**batch())


def test_a_budget_that_nothing_fits():
    _, wrapped = wrap(model(), {"recompute": "auto", "budget": "2MiB"})
    with pytest.raises(MemoryPlanError, match=r"budget of 2 MiB: it needs .* at least, with the plan .*make the batch"):
        wrapped(**batch())


HALF = {"recompute": "auto", "budget": "50%"}


def many_logits(words: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a model and 32 x 64 tokens for it, whose logits are most of what a step takes."""
    torch.manual_seed(0)
    ids = torch.randint(0, words, (32, 64), generator=torch.Generator().manual_seed(1))
    return gpt2(words=words, hidden=32, layers=1, positions=64), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("words", "why"), [(2048, "with all logits a step needs"), (4096, "32 MiB of logits need not exist at one time")]
)
def test_the_planner_makes_one_node_of_head_and_loss_for_a_budget(words, why, capsys):
    module, given = many_logits(words)
    expected = module.train()(**given)
    expected.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    for found in (False, True):
        module.zero_grad()
        runtime, wrapped = wrap(module, HALF)
        # logits that are read call by call do not break the budget
        for _ in range(MOST_READS + 2):
            module.zero_grad()
            result = wrapped(**given)
            result.loss.backward()
            torch.testing.assert_close(result.logits, expected.logits, rtol=1e-5, atol=1e-5)
        lines = [line for line in capsys.readouterr().err.splitlines() if "one node" in line]
        assert len(lines) == 1 and why in lines[0], lines
        torch.testing.assert_close(result.loss, expected.loss, rtol=1e-5, atol=1e-5)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)
        status = runtime.status()
        (decision,) = status["memory"]
        assert status["graphs"]["training"]["kernels"]["fused_loss"] == 1
        assert why in decision["fused_loss"] and decision["found"] is found
        assert decision["predicted_bytes"] <= decision["budget_bytes"] == decision["unconstrained_bytes"] // 2


def test_a_budget_that_head_and_loss_in_one_node_does_not_keep_either():
    module, given = many_logits(2048)
    _, wrapped = wrap(module, {"recompute": "auto", "budget": "5%"})
    with pytest.raises(MemoryPlanError, match="and head and loss in one node"):
        wrapped(**given)
    _, wrapped = wrap(module, HALF, fuse_loss="off")
    with pytest.raises(MemoryPlanError) as caught:
        wrapped(**given)
    assert "one node" not in str(caught.value)


def test_torch_checkpointing_is_refused_with_what_to_use_instead():
    module = model()
    module.gradient_checkpointing_enable({"use_reentrant": False})
    _, wrapped = wrap(module, {"recompute": "all"})
    with pytest.raises(ExportError, match=r'activation checkpointing.*"memory": \{"recompute": "auto"'):
        wrapped(**batch())


def test_a_graph_that_is_saved_is_the_one_that_runs(tmp_path):
    runtime, wrapped = wrap(model(), {"recompute": "all"}, save_onnx=str(tmp_path / "onnx"))
    wrapped(**batch()).loss.backward()
    saved = onnx.load(tmp_path / "onnx" / "rewritten_training.onnx")
    assert [n.name for n in saved.graph.node] == [
        n.name for n in runtime.modes[True].graphs[0].session.model.graph.node
    ]

"""ORTModule as its own users write it, on today's torch: upstream's class, policies, switches and files."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes.ranks import free_port
from torch import nn

import ort_zero
from ort_zero.runtimes import registry

NO_ENTRY_POINT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
TRAIN = """
def train(wrap):
    import torch, ort_zero
    torch.manual_seed(0)
    for _ in range(2):
        model = torch.nn.Linear(3, 2)
        result = wrap(model)(torch.ones(1, 3))
        result.sum().backward()
        assert model.weight.grad is not None and "_ORTModuleFunction" in type(result.grad_fn).__name__, result.grad_fn
    status = ort_zero.status()
    assert status["enabled"] and not status["models"], status
"""


@pytest.fixture(scope="module")
def ortmodule() -> Any:
    """Yield the package of ORTModule, imported after ort_zero was enabled; a fallback to PyTorch is an error."""
    ort_zero.enable()
    import onnxruntime.training.ortmodule as package

    policy = package.ORTMODULE_FALLBACK_POLICY
    package.ORTMODULE_FALLBACK_POLICY = type(policy).FALLBACK_DISABLE
    yield package
    package.ORTMODULE_FALLBACK_POLICY = policy
    ort_zero.disable()


def run(code: str, **variables: str) -> str:
    """Run a program with some environment variables in a new process, and return its stderr."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH_DEVICE_BACKEND")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=300, env={**clean, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


class Encoder(nn.Module):
    """A small BERT: embeddings, attention with a mask, a convolution over the sequence, named results."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(30, 16), nn.LayerNorm(16)
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.mix, self.head = nn.Conv1d(16, 16, 3, padding=1), nn.Linear(16, 30)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None = None) -> dict:
        """Return logits, and the loss if there are labels."""
        x = self.norm(self.embed(tokens))
        q, k, v = (part(x).view(*x.shape[:2], 2, 8).transpose(1, 2) for part in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / 8**0.5 + (1 - mask[:, None, None, :].float()) * -1e4
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = torch.relu(self.mix(x.transpose(1, 2))).transpose(1, 2)
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize(
    ("code", "variables"),
    [
        ("from onnxruntime.training.ortmodule import ORTModule; import torch", {}),
        ("import ort_zero; ort_zero.enable(); import onnxruntime.training.ortmodule as m; ORTModule = m.ORTModule",
         NO_ENTRY_POINT),
        ("import torch, onnxruntime.training\n"
         "try: import onnxruntime.training.ortmodule\n"
         "except ImportError: pass\n"  # an older torch still has the names
         "import ort_zero; ort_zero.enable()\n"
         "from onnxruntime.training.ortmodule import ORTModule\n"
         "ort_zero.disable(); ort_zero.enable()", NO_ENTRY_POINT),
        ("import sys\n"
         "class NoDeepSpeed:\n"
         "    @staticmethod\n"
         "    def find_spec(name, path=None, target=None):\n"
         "        if name.partition('.')[0] == 'deepspeed': raise ModuleNotFoundError(name)\n"
         "sys.meta_path.insert(0, NoDeepSpeed)\n"
         "import ort_zero; from importlib import metadata; version = metadata.version\n"
         "def missing(name):\n"
         "    if name == 'deepspeed': raise metadata.PackageNotFoundError(name)\n"
         "    return version(name)\n"
         "metadata.version = missing\n"
         "ort_zero.enable()\n"
         "from onnxruntime.training.ortmodule import ORTModule", NO_ENTRY_POINT),
    ],
    ids=["autoload", "enable", "after a failed import", "no deepspeed"],
)  # fmt: skip
def test_the_bare_import_trains_in_onnx_runtime_and_one_line_says_what_is_not_checked(code, variables):
    said = run(f"{code}\n{TRAIN}\ntrain(ORTModule)\n", **variables)
    assert said.count('ort_zero.wrap(model, backend="ortmodule") checks') == 1, said
    assert "Traceback" not in said


def test_rank_1_does_not_say_the_line():
    said = run(f"from onnxruntime.training.ortmodule import ORTModule\n{TRAIN}\ntrain(ORTModule)\n", RANK="1")
    assert "checks" not in said


def test_an_import_alone_leaves_nothing_to_complain_of_at_exit():
    assert "Traceback" not in run("import torch, onnxruntime.training.ortmodule")


def test_an_encoder_trains_as_in_pytorch_with_named_arguments_and_results(ortmodule):
    torch.manual_seed(0)
    eager = Encoder()
    wrapped = ortmodule.ORTModule(copy.deepcopy(eager))
    generator = torch.Generator().manual_seed(1)
    losses: dict[str, list[float]] = {"eager": [], "ort": []}
    for step in range(4):
        tokens = torch.randint(30, (3, 6 + step % 2), generator=generator)
        batch = {"tokens": tokens, "mask": (tokens > 3).long(), "labels": tokens.masked_fill(tokens < 9, -100)}
        for name, model in (("eager", eager), ("ort", wrapped)):
            model.zero_grad()
            result = model(**batch)
            assert list(result) == ["loss", "logits"]
            result["loss"].backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            losses[name].append(result["loss"].item())
    assert losses["ort"] == pytest.approx(losses["eager"], rel=1e-5)
    for one, other in zip(wrapped.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        results = [model.eval()(batch["tokens"], batch["mask"]) for model in (wrapped, eager)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_the_session_has_the_threads_of_the_rank(ortmodule, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    wrapped = ortmodule.ORTModule(nn.Linear(2, 2))
    wrapped(torch.ones(1, 2))
    agent = wrapped._torch_module._execution_manager(True)._execution_agent
    options = agent._inference_session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)


def test_debug_options_write_graphs_by_upstreams_names(ortmodule, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ORTMODULE_SAVE_ONNX_PATH", str(tmp_path))
    options = ortmodule.DebugOptions(save_onnx=True, onnx_prefix="net", log_level=ortmodule.LogLevel.ERROR)
    ortmodule.ORTModule(nn.Linear(4, 2), options)(torch.ones(2, 4)).sum().backward()
    names = {path.name for path in tmp_path.iterdir()}
    kinds = ("torch_exported", "optimized", "execution_model", "optimized_pre_grad")
    assert {f"net_{kind}_training.onnx" for kind in kinds} <= names


@pytest.mark.parametrize("level", ["ERROR", "INFO"])
def test_the_level_decides_whether_the_table_of_the_memory_optimizer_is_shown(ortmodule, monkeypatch, caplog, level):
    monkeypatch.setenv("ORTMODULE_MEMORY_OPT_LEVEL", "1")
    torch.manual_seed(0)
    options = ortmodule.DebugOptions(log_level=getattr(ortmodule.LogLevel, level))
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(2)))
    eager, x, weights = copy.deepcopy(layers), torch.randn(2, 8), torch.randn(2, 8)
    for model in (ortmodule.ORTModule(layers, options), eager):
        (model(x) * weights).sum().backward()
    said = "\n".join(record.getMessage() for record in caplog.records if record.name == "orttraining")
    assert ("Memory Optimizer" in said and "Freq" in said) == (level == "INFO"), said
    for one, other in zip(layers.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


class Unsupported(nn.Linear):
    """Returns a type that ORTModule does not take."""

    def forward(self, x: torch.Tensor) -> set:
        """Return a set of tensors."""
        return {super().forward(x)}


def test_the_fallback_policy_is_upstreams(ortmodule, monkeypatch):
    x = torch.ones(2, 4)
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_DISABLE")
    with pytest.raises(Exception, match="Unsupported flatten data type: <class 'set'>"):
        ortmodule.ORTModule(Unsupported(4, 2))(x)
    monkeypatch.setenv("ORTMODULE_FALLBACK_POLICY", "FALLBACK_UNSUPPORTED_DATA")
    wrapped = ortmodule.ORTModule(Unsupported(4, 2))
    for _ in range(2):
        (result,) = wrapped(x)
        assert torch.equal(result, nn.functional.linear(x, wrapped.weight, wrapped.bias))


def test_the_exporter_is_torchscripts_within_ortmodule_alone(ortmodule, monkeypatch):
    arguments = []

    def export(*args: Any, **kwargs: Any) -> None:
        arguments.append(kwargs)
        todays(*args, **kwargs)

    todays = torch.onnx.export
    monkeypatch.setattr(torch.onnx, "export", export)
    ortmodule.ORTModule(nn.Linear(4, 2))(torch.ones(2, 4))
    assert arguments[0]["dynamo"] is False and torch.onnx.export is export


def test_upstreams_statistics_of_a_plain_model_run_without_cuda(tmp_path):
    run(
        f"""
        import torch
        from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber
        model = torch.nn.Linear(3, 4)
        GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir={str(tmp_path / "out")!r})])
        model(torch.ones(2, 3)).sum().backward()
        """
    )
    assert (tmp_path / "out" / "step_0").exists()


def test_disable_restores_the_very_objects():
    run(
        """
        import sys, torch, torch.onnx, ort_zero
        from onnxruntime.training.utils import torch_profile_utils as ranges
        ort_zero.disable()

        def objects():
            import onnxruntime.training.ortmodule as package
            from onnxruntime.training.ortmodule import _graph_execution_manager as gem, _graph_transition_manager as gtm
            names = [n for n in sys.modules if n.startswith("torch.onnx")]
            return {
                "init": package.ORTModule.__init__, "error": package._FALLBACK_INIT_EXCEPTION,
                "options": gem.GraphExecutionManager._get_session_config,
                "export": gtm.GraphTransitionManager._get_exported_model,
                "torch export": torch.onnx.export, "push": ranges.torch_nvtx_range_push,
                **{n: sys.modules[n] for n in names}, "attributes": sorted(vars(torch.onnx)),
            }

        import torch.onnx.symbolic_opset9
        ort_zero.enable()
        import onnxruntime.training.ortmodule
        ort_zero.disable()
        before = objects()
        ort_zero.enable()
        enabled = objects()
        changed = {k for k in before if enabled[k] is not before[k]}
        assert {"init", "error", "options", "export", "push", "torch.onnx.symbolic_opset9"} <= changed, changed
        ort_zero.disable()
        after = objects()
        assert before.keys() == after.keys()
        assert all(after[k] is before[k] or k == "attributes" and after[k] == before[k] for k in before)
        assert not ort_zero.status()["enabled"] and not ort_zero.status()["patches"]
        """
    )


DDP = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from onnxruntime.training.ortmodule import ORTModule
dist.init_process_group("gloo")
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
import copy
models = [DistributedDataParallel(ORTModule(copy.deepcopy(plain))), DistributedDataParallel(copy.deepcopy(plain))]
x = torch.randn(3, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
gradients = []
for model in models:
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
    gradients.append([parameter.grad for parameter in model.parameters()])
for one, other in zip(*gradients, strict=True):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
"""


def test_ddp_around_reduces_the_gradients():
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DDP],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "ORTMODULE_FALLBACK_POLICY": "FALLBACK_DISABLE"},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said


def test_status_names_the_patches_and_no_model(ortmodule):
    ortmodule.ORTModule(nn.Linear(2, 2))(torch.ones(1, 2))
    status = ort_zero.status()
    assert {"torch.onnx", "ORTModule"} <= registry.patch_sets.keys() and not status["models"]
    assert "onnxruntime.training.ortmodule.ortmodule:ORTModule.__init__" in status["patches"]

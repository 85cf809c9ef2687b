"""The export cache with real graphs: a second run loads what the first one made, and computes the very same."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from ort_zero import config
from ort_zero.errors import ConfigError
from ort_zero.ortmodule.runtime.export_cache.store import ExportCache
from ort_zero.ortmodule.wrap import wrap_model


class Gelus(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.factor = factor

    def forward(self, x, labels=None):
        y = self.last(nn.functional.gelu(self.first(x))) * self.factor
        return {"y": y, "loss": None if labels is None else nn.functional.cross_entropy(y, labels)}


class Grouped(nn.Module):
    """Runs an operator in PyTorch inside of the graph."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.conv(x)).cumprod(-1).mean()


class Guarded(nn.Module):
    """Reads a value, and changes an argument in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x, count):
        count.add_(1)
        if bool((count > 100).any()):
            return self.linear(x)
        return self.linear(x) * 2 + count.float()


class Branching(nn.Module):
    """Has a submodule that stays in PyTorch."""

    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(6, 6), Rows()

    def forward(self, x):
        return self.inner(self.linear(x))


class Sized(nn.Module):
    """Branches on a size of what it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        return y.sum() if y.flatten(0, 1).shape[0] // 2 > 8 else y.mean()


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        rows = (x.sum(-1) > 0).nonzero().flatten()
        return self.last(x[rows]).sum() + sum(row.sum() for row in x[rows])


def options(*sizes, factor=1.0):
    """Return a decorator whose method reads variables of this function, as those of transformers do."""

    def decorator(forward):
        @functools.wraps(forward)
        def wrapper(self, *args):
            return forward(self, *args) * factor * sum(sizes)

        return wrapper

    return decorator


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    @options(2, 3, factor=0.5)
    def forward(self, x):
        return self.linear(x)


def run(module: nn.Module, folder, *args, steps: int = 2, **options):
    """Return results and gradients of a fresh copy, and the last transition of each mode."""
    module = copy.deepcopy(module)
    args = copy.deepcopy(args)
    runtime, wrapped = wrap_model(module, config.OrtModuleConfig(cache_dir=str(folder), **options), stage=0)
    results = []
    for _ in range(steps):
        result = wrapped(*args)
        tensors = [t for t in (result.values() if isinstance(result, dict) else [result]) if t is not None]
        sum(t.sum() for t in tensors).backward()
        results += [t.detach() for t in tensors]
    status = runtime.status()
    assert status["fallbacks"] == 0 and status["graphs"]["training"]["runs"]["backward"] == steps
    state = dict(module.named_buffers()) | {f"{n}.grad": p.grad for n, p in module.named_parameters()}
    return (results, state, args), status


def alike(module: nn.Module, folder, *args) -> tuple[dict, dict]:
    """Run twice with one cache; the second run is exactly the first one. Return both status."""
    (expected, first), (got, second) = (run(module, folder, *args) for _ in range(2))
    assert second["graphs"]["training"]["runs"] == {"forward": 2, "backward": 2}
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    return first, second


def said(status: dict) -> str:
    return status["transitions"][0]["cache"]


@pytest.mark.parametrize(
    ("make", "args"),
    [
        (Gelus, (torch.randn(3, 6), torch.tensor([0, 1, 2]))),
        (Grouped, (torch.randn(2, 4, 6, 6),)),
        (Guarded, (torch.randn(3, 6), torch.tensor([1, 2, 3, 4, 5, 6]))),
    ],
    ids=["gelus", "grouped", "guarded"],
)
def test_a_second_run_loads_the_graph_and_computes_the_very_same(tmp_path, make, args):
    torch.manual_seed(0)
    first, second = alike(make(), tmp_path, *args)
    assert said(first).startswith("miss: no training entry")
    assert said(second) == "hit: the same model, packages, options, inputs, model code"
    assert first["graphs"]["training"]["exports"] == 1 and second["graphs"]["training"]["exports"] == 0
    assert "export" in first["transitions"][0]["steps"] and "export" not in second["transitions"][0]["steps"]
    # what a user waits for, part by part; the parts lie within the whole, but for the first run, which comes after
    made = {step: seconds for step, seconds in first["transitions"][0]["steps"].items() if not step.startswith("first")}
    assert {"trace", "export", "gradient graph", "session"} <= made.keys() and min(made.values()) >= 0
    assert sum(made.values()) <= first["transitions"][0]["seconds"] + 0.01
    assert "trace" not in second["transitions"][0]["steps"]
    for status in (first, second):
        assert {"first forward", "first backward"} <= status["transitions"][0]["steps"].keys()
    assert first["in_torch"] == second["in_torch"]
    assert first["graphs"]["training"]["nodes"] == second["graphs"]["training"]["nodes"]


def test_a_graph_is_loaded_for_sizes_that_it_serves_only(tmp_path):
    torch.manual_seed(0)
    module, found = Sized(), []
    for rows in (2, 8, 3, 9):
        x = torch.randn(rows, 4, 6)
        (got, *_), status = run(module, tmp_path, x, steps=1)
        torch.testing.assert_close(got[0], module(x).detach())
        found.append((said(status).split(":")[0], status["graphs"]["training"]["exports"]))
    assert found == [("miss", 1), ("miss", 1), ("hit", 0), ("hit", 0)]


def test_a_guard_of_a_loaded_graph_still_guards(tmp_path):
    torch.manual_seed(0)
    module, x = Guarded(), torch.randn(3, 6)
    for count in (1, 200):
        number = torch.full((6,), count)
        (got, *_), status = run(module, tmp_path, x, number, steps=1)
        expected = module(x, number.clone())
        torch.testing.assert_close(got[0], expected.detach())
    assert said(status).startswith("hit")
    assert status["graphs"]["training"]["exports"] == 1  # the graph that was loaded did not hold


def test_other_inputs_options_and_freezing_are_other_entries(tmp_path):
    torch.manual_seed(0)
    module, x, labels = Gelus(), torch.randn(3, 6), torch.tensor([0, 1, 2])
    run(module, tmp_path, x, labels)
    for other, args, words in (
        (module, (x,), "inputs differ"),
        (module, (x.double().float(), labels), None),
        (Gelus(3.0), (x, labels), "model differs: factor"),
        (copy.deepcopy(module).requires_grad_(True), (x, labels), None),
    ):
        _, status = run(other, tmp_path, *args)
        assert said(status).startswith("hit" if words is None else f"miss: {words}"), (said(status), words)
    frozen = copy.deepcopy(module)
    frozen.first.requires_grad_(False)
    _, status = run(frozen, tmp_path, x, labels)
    assert said(status).startswith("miss: model differs") and "first" in said(status)


def test_a_key_of_the_users_is_part_of_what_must_be_the_same(tmp_path):
    module, x = Gelus(), torch.randn(3, 6)
    words = [said(run(module, tmp_path, x, cache_key=key)[1]) for key in (None, "a", "a", "b", None)]
    assert [text.split(":")[0] for text in words] == ["miss", "miss", "hit", "miss", "hit"]
    assert words[1] == "miss: options differ: cache_key null -> a"


def test_code_that_is_imported_while_the_module_runs_is_not_kept(tmp_path, monkeypatch):
    class Late(Gelus):
        def forward(self, x):
            from late_helper import doubled

            return {"y": doubled(super().forward(x)["y"])}

    (tmp_path / "late_helper.py").write_text("def doubled(x):\n    return x * 2\n")
    os.utime(tmp_path / "late_helper.py", (1, 1))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "late_helper", raising=False)
    torch.manual_seed(0)
    module, x = Late(), torch.randn(3, 6)
    words = [said(run(module, tmp_path / "cache", x)[1]) for _ in range(3)]
    assert words[0].endswith("not kept: late_helper was imported while the module ran")
    assert words[1].startswith("miss") and words[2].startswith("hit"), "it is loaded now, and its file counts"
    del sys.modules["late_helper"]


def test_variables_around_a_decorated_method_have_a_lasting_name(tmp_path, monkeypatch):
    """They are looked at when the graph is loaded, and guarded in the run that has loaded it."""
    torch.manual_seed(0)
    module, x = Decorated(), torch.randn(3, 6)
    first, second = alike(module, tmp_path, x)
    assert said(first).startswith("miss: no training entry") and said(second).startswith("hit")
    free = Decorated.forward.__code__.co_freevars.index
    for name, value in (("factor", 3.0), ("sizes", (2, 3, 4))):
        monkeypatch.setattr(Decorated.forward.__closure__[free(name)], "cell_contents", value)
        (results, *_), status = run(module, tmp_path, x)
        assert "hit" not in said(status), said(status)
        torch.testing.assert_close(results[0], module(x).detach())


def test_a_model_of_transformers_is_kept(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    words = []
    for _ in range(2):
        runtime, wrapped = wrap_model(copy.deepcopy(model), config.OrtModuleConfig(cache_dir=str(tmp_path)), stage=0)
        ids = torch.arange(8)[None]
        wrapped(input_ids=ids, labels=ids).loss.backward()
        words.append(said(runtime.status()))
    assert words[0] == "miss: no training entry for GPT2LMHeadModel yet" and words[1].startswith("hit"), words


def test_what_has_no_lasting_name_is_not_kept_and_says_so(tmp_path):
    torch.manual_seed(0)
    first, second = alike(Branching(), tmp_path, torch.randn(4, 6))
    for status in (first, second):
        assert "not kept: inner stays in PyTorch" in said(status)
    assert not list(tmp_path.glob("*.graph"))


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign", "empty"])
def test_a_damaged_entry_is_told_ignored_and_written_anew(tmp_path, damage):
    torch.manual_seed(0)
    module, x = Gelus(), torch.randn(3, 6)
    expected, _ = run(module, tmp_path, x)
    for path in [*tmp_path.glob("*.graph"), *tmp_path.glob("*.session")]:
        data = bytearray(path.read_bytes())
        if damage == "flip":
            data[len(data) // 2] ^= 1
        path.write_bytes({"truncate": data[:-100], "flip": data, "foreign": b"something else", "empty": b""}[damage])
    got, status = run(module, tmp_path, x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert said(status).startswith("miss: ") and "ignored" in said(status), said(status)
    assert said(run(module, tmp_path, x)[1]).startswith("hit")


def test_an_optimized_model_that_ort_refuses_is_made_anew(tmp_path):
    torch.manual_seed(0)
    module, x = Gelus(), torch.randn(3, 6)
    expected, _ = run(module, tmp_path, x)
    (path,) = tmp_path.glob("*.session")
    digest = path.name.split(".")[1]
    path.unlink()
    ExportCache(tmp_path).store_blob(digest, b"no model at all")
    got, status = run(module, tmp_path, x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert said(status).startswith("hit")


SCRIPT = """
import json, sys
import torch
sys.path.insert(0, sys.argv[2])
from model import Model
from ort_zero import config
from ort_zero.ortmodule.wrap import wrap_model
torch.manual_seed(0)
runtime, wrapped = wrap_model(Model(), config.OrtModuleConfig(cache_dir=sys.argv[1]), stage=0)
loss = wrapped(torch.ones(2, 4))
loss.backward()
print(json.dumps([loss.item(), runtime.status()["transitions"][0]["cache"]]))
"""
MODEL = """
import torch
from helper import scaled
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        return scaled(self.linear(x)).pow(2).mean()
"""


def test_edited_code_is_noticed_in_another_process(tmp_path):
    code, cache = tmp_path / "code", tmp_path / "cache"
    code.mkdir()
    (code / "model.py").write_text(MODEL)

    def process(factor: int) -> list:
        (code / "helper.py").write_text(f"def scaled(x):\n    return x * {factor}\n")
        os.utime(code / "helper.py", (1e9 + factor, 1e9 + factor))
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(cache), str(code)], capture_output=True, text=True, timeout=800,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    (first, miss), (again, hit), (other, edited) = process(2), process(2), process(3)
    assert miss.startswith("miss: no training entry") and hit.startswith("hit") and again == first
    assert edited.startswith("miss: model code changed") and "helper.py" in edited
    assert other == pytest.approx(first * 9 / 4)


def test_a_folder_that_cannot_be_used_is_refused_before_training_starts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r'"ort_zero.ortmodule.cache_dir" is .*file.*name a folder'):
        wrap_model(Gelus(), config.OrtModuleConfig(cache_dir=str(tmp_path / "file")), stage=0)

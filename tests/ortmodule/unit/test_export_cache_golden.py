"""An entry of the export cache that an earlier version of ort_zero wrote is found again, or refused by its version."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import onnx
import pytest

from ort_zero.ortmodule.runtime.export import structures
from ort_zero.ortmodule.runtime.export_cache import store
from ort_zero.ortmodule.runtime.export_cache.criteria import Criterion
from ort_zero.ortmodule.runtime.export_cache.serialization import decode
from ort_zero.ortmodule.runtime.export_cache.store import ExportCache, Found, Missed

GOLDEN = Path(__file__).parents[1] / "golden" / f"export_cache_v{store.VERSION}"


@pytest.fixture
def entry(tmp_path) -> Path:
    """A copy of the stored entry."""
    (path,) = GOLDEN.glob("*.graph")
    assert path.stat().st_size < 100_000
    return Path(shutil.copy(path, tmp_path))


def header_of(path: Path) -> dict:
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("entry.json"))


def criteria_of(path: Path) -> dict[str, Criterion]:
    stored = header_of(path)["criteria"]
    return {name: Criterion(written["parts"], written["about"]) for name, written in stored.items()}


def test_a_stored_entry_is_found_by_its_criteria_and_has_all_that_a_graph_needs(entry):
    criteria = criteria_of(entry)
    assert list(criteria) == ["model", "packages", "options", "inputs", "model code"]
    assert criteria["model"].parts["parameter first.weight"] == "float32 [4, 3]"
    assert {"torch", "onnx", "ort_zero's code"} <= set(criteria["packages"].parts)
    assert criteria["options"].parts["cache_key"] == "null" and "make.py" in criteria["model code"].parts
    found = ExportCache(entry.parent).find(criteria, "training")
    assert isinstance(found, Found) and found.path == entry
    assert found.compared == "the same model, packages, options, inputs, model code"
    slots = tuple((name, structures.TensorLeaf(i)) for i, name in enumerate(("y", "loss")))
    assert decode(found.meta["result"]) == structures.MappingNode(dict, slots)
    weights = [f"_original_module.{layer}.{kind}" for layer in ("first", "last") for kind in ("weight", "bias")]
    assert found.meta["names"] == ["x", *weights] and found.meta["arguments"] == found.meta["differentiable"] == ["x"]
    assert found.meta["axes"] == {"x": [[0, "x_dim0"], [1, "x_dim1"]]} and found.meta["results"] == 2
    assert found.meta["guards"] == found.meta["changed"] == found.meta["counting"] == [] == [*found.meta["operators"]]
    exported, built = (onnx.load_model_from_string(found.blobs[name]) for name in ("exported", "built"))
    assert [given.name for given in exported.graph.input] == found.meta["names"]
    assert {"Relu", "Gemm"} <= {node.op_type for node in exported.graph.node}
    gradients = {f"{name}_grad" for name in weights}
    assert gradients <= {name for node in built.graph.node for name in node.output}


def test_an_entry_of_another_version_is_a_miss_that_says_so(entry):
    criteria = criteria_of(entry)
    with zipfile.ZipFile(entry) as archive:
        blobs = {name: archive.read(f"blob/{i}") for i, name in enumerate(header_of(entry)["blobs"])}
    header = {**header_of(entry), "version": store.VERSION - 1}
    entry.write_bytes(b"".join(store._packed(header, blobs)))
    missed = ExportCache(entry.parent).find(criteria, "training")
    words = f"entry {entry.name} has format version {store.VERSION - 1}, not {store.VERSION}, ignored"
    assert isinstance(missed, Missed) and missed.why == words
    other = {**criteria, "inputs": Criterion({"x": "int64"})}
    assert ExportCache(entry.parent).find(other, "training").why == f"no training entry for TwoLayers yet; {words}"

"""setup.cfg and configs/ say what the support table, the contract and the README say."""

from __future__ import annotations

import configparser
import json
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ort_zero import config
from ort_zero.compat import versions

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/versions"))
IMPORT_NAMES = set("argcomplete filelock fsspec isal numpy packaging pydantic rich safetensors wrapt xxhash".split())


@pytest.fixture(scope="module")
def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def requirements(text: str) -> dict[str, Requirement]:
    found = [Requirement(line) for line in text.strip().splitlines()]
    return {r.name: r for r in found}


def extra(setup_cfg, name: str) -> dict[str, Requirement]:
    """Return the requirements of an extra, with the extras that it refers to."""
    found = requirements(setup_cfg["options.extras_require"][name])
    own = found.pop("ort-zero", None)
    for other in own.extras if own else ():
        found = extra(setup_cfg, other) | found
    return found


@pytest.mark.parametrize(("name", "engine", "runtime"), [
    ("ort", "compile", "onnxruntime"),
    ("ort-gpu", "compile", "onnxruntime-gpu"),
    ("ortmodule", "ort", "onnxruntime-training"),
])  # fmt: skip
def test_extras_have_the_bounds_of_the_support_table(setup_cfg, name, engine, runtime):
    wanted = extra(setup_cfg, name)
    assert set(wanted) & set(versions.RUNTIMES) == {runtime}
    for row in versions.REQUIREMENTS:
        if not {engine, "zero"} & set(row.needed_for):
            continue
        # what has no wheel cannot be installed by an extra, but is not refused where somebody has built it
        tried = f",{row.tried}" if row.distribution == "onnxruntime-training" else ""
        distribution = runtime if row.distribution == "onnxruntime" else row.distribution
        assert wanted[distribution].specifier == SpecifierSet(row.specifier + tried), row.distribution
    assert SpecifierSet(setup_cfg["options"]["python_requires"]) == versions.PYTHON
    zero = {row.distribution for row in versions.REQUIREMENTS if "zero" in row.needed_for}
    assert zero | {"torch"} == set(extra(setup_cfg, "zero"))


def test_the_upper_bound_of_python_belongs_to_onnxruntime_training_alone(setup_cfg):
    assert not any(requirement.marker for requirement in extra(setup_cfg, "ort").values())
    ort = extra(setup_cfg, "ortmodule")
    bounded = {name for name, requirement in ort.items() if requirement.marker is not None}
    assert bounded == {"onnxruntime-training"}
    for minor in range(10, 15):
        version = f"3.{minor}"
        wanted = ort["onnxruntime-training"].marker.evaluate({"python_version": version})
        assert wanted == (version in versions.ORT_PYTHON) and version in versions.PYTHON


def test_core_requires_what_the_package_imports_and_no_more(setup_cfg):
    core = requirements(setup_cfg["options"]["install_requires"])
    assert set(core) == IMPORT_NAMES and all(r.specifier for r in core.values())
    text = "\n".join(p.read_text() for p in (ROOT / "ort_zero").rglob("*.py"))
    imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, flags=re.M))
    assert IMPORT_NAMES <= imported
    assert not imported & {"yaml"}, "declare it in install_requires"


def test_statistics_requires_what_is_imported_for_them(setup_cfg):
    declared = {name.lower(): r for name, r in extra(setup_cfg, "statistics").items()}
    files = [ROOT / "ort_zero/cli/stats.py", *(ROOT / "ort_zero/statistics").rglob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    imported = set(re.findall(r"^\s*(?:from|import) (jinja2|llvmlite|numba|numpy|pyarrow)\b", text, flags=re.M))
    assert set(declared) == imported and all("<" in str(r.specifier) for r in declared.values())
    assert set(declared) <= {name.lower() for name in extra(setup_cfg, "test")}


def test_files_that_are_no_modules_are_installed(setup_cfg):
    patterns = setup_cfg["options.package_data"]
    for path in (ROOT / "ort_zero").rglob("templates/*"):
        package = ".".join(path.relative_to(ROOT).parts[:-2])
        assert path.match(patterns[package].strip()), path


def test_constraints_pin_versions_that_the_extras_allow(setup_cfg):
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    pins = requirements("\n".join(line for line in lines if line and not line.startswith("#")))
    wanted = requirements(setup_cfg["options"]["install_requires"])
    for name in ("ort", "ortmodule", "examples", "test", "clients", "lint"):
        wanted |= extra(setup_cfg, name)
    pins = {name.lower(): pin for name, pin in pins.items()}
    for name, requirement in wanted.items():
        (pin,) = pins[name.lower()].specifier
        assert pin.operator == "==" and requirement.specifier.contains(pin.version), name


def test_the_conda_recipe_is_that_of_this_version_with_the_same_requirements(setup_cfg):
    import yaml

    import ort_zero

    text = (ROOT / ".ci/conda/meta.yaml").read_text()
    (version,) = re.findall(r'{% set version = "(.+)" %}', text)
    assert version == ort_zero.__version__
    plain = re.sub(r"{%.*?%}", "", text).replace("{{ version }}", version).replace("{{ PYTHON }}", "python")
    recipe = yaml.safe_load(plain)
    names = {"isal": "python-isal", "xxhash": "python-xxhash"}  # as conda-forge has them
    core = requirements(setup_cfg["options"]["install_requires"])
    run = requirements("\n".join(recipe["requirements"]["run"]))
    assert run.pop("python").specifier == versions.PYTHON
    assert {name: r.specifier for name, r in run.items()} == {names.get(n, n): r.specifier for n, r in core.items()}
    constrained = requirements("\n".join(recipe["requirements"]["run_constrained"]))
    zero = extra(setup_cfg, "zero")
    assert constrained["pytorch"].specifier == zero["torch"].specifier
    assert constrained["deepspeed"].specifier == zero["deepspeed"].specifier
    assert recipe["build"]["entry_points"] == [setup_cfg["options.entry_points"]["console_scripts"].strip()]


def test_citation_and_changelog_have_the_version_and_one_date():
    import yaml

    import ort_zero

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = re.search(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert heading and heading.groups() == (ort_zero.__version__, str(citation["date-released"]))
    assert str(citation["version"]) == ort_zero.__version__


def test_the_tests_of_the_matrix_are_there():
    from steps import STEPS

    for step in STEPS.values():
        for test in (*step.tests, *step.without):
            file, _, name = test.partition("::")
            function = name.partition("[")[0]
            path = ROOT / file
            assert path.exists() and (not function or f"\ndef {function}" in path.read_text()), test


# -- configs -----------------------------------------------------------------------------------------------------------


STATISTICS = {"zero3_statistics_ort.json": True, "zero3_statistics_torch.json": False}
STAGES = {"zero1.json": 1, "zero2.json": 2, "zero3.json": 3, "zero3_offload.json": 3, "zero3_trl.json": 3}
YAMLS = {"accelerate_zero1.yaml": "configs/zero1.json", "accelerate_zero3.yaml": "configs/zero3.json"}


def test_every_file_is_listed_here():
    assert {p.name for p in (ROOT / "configs").iterdir()} == {*STAGES, *STATISTICS, *YAMLS}


@pytest.mark.parametrize(("name", "stage"), STAGES.items())
def test_json_asks_for_onnxruntime_at_its_stage(name, stage):
    loaded = json.loads((ROOT / "configs" / name).read_text())
    section = config.section_of(loaded)
    assert section is not None and section.engine() == "compile" and section.fallback == "warn"
    assert loaded["zero_optimization"]["stage"] == stage
    # the other Adam is compiled on first use; a trainer brings an optimizer of its own
    assert ("optimizer" in loaded and loaded["optimizer"]["params"]["torch_adam"]) == (name != "zero3_trl.json")
    assert ("offload_optimizer" in loaded["zero_optimization"]) == ("offload" in name)


@pytest.mark.parametrize(("name", "ort"), STATISTICS.items())
def test_what_is_compared_differs_in_its_backend_alone(name, ort):
    loaded = json.loads((ROOT / "configs" / name).read_text())
    section = config.section_of(loaded)
    assert section.engine() == ("compile" if ort else "torch") and section.statistics.enabled
    assert section.statistics.output_dir == f"out/statistics/{'ort' if ort else 'torch'}"
    plain = json.loads((ROOT / "configs" / "zero3.json").read_text())
    assert {**loaded, "ort_zero": None} == {**plain, "ort_zero": None}


@pytest.mark.parametrize(("name", "json_path"), YAMLS.items())
def test_yaml_starts_two_deepspeed_ranks_on_cpu(name, json_path):
    yaml = pytest.importorskip("yaml")
    loaded = yaml.safe_load((ROOT / "configs" / name).read_text())
    assert loaded["distributed_type"] == "DEEPSPEED" and loaded["use_cpu"] is True and loaded["num_processes"] == 2
    assert loaded["deepspeed_config"]["deepspeed_config_file"] == json_path
    assert (ROOT / json_path).is_file()

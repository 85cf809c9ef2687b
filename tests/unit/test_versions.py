"""The support table: what is accepted, what counts as untested, and what is said of a Python without ONNX Runtime."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

from ort_zero.compat import versions
from ort_zero.errors import BuildError, UnsupportedVersionError
from ort_zero.ortmodule.compat import extensions

ALL = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "onnxruntime-training": "1.19.2", "onnx": "1.23.2"}


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes these the installed versions, and this the version of Python."""

    def use(python=(3, 11, 7), **changed):
        found = {**ALL, **{name.replace("_", "-"): version for name, version in changed.items()}}

        def version(name):
            if found.get(name) is None:
                raise metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(versions.metadata, "version", version)
        monkeypatch.setattr(sys, "version_info", (*python, "final", 0))

    return use


def test_what_was_tried_is_accepted_without_a_word(installed):
    installed()
    assert versions.require("ort") == () and versions.require("zero") == ()


@pytest.mark.parametrize(
    ("package", "version"), [("torch", "2.3.1"), ("deepspeed", "0.14.4"), ("onnxruntime_training", "1.18.0")]
)
def test_a_version_below_is_refused_with_the_command_that_cures(installed, package, version):
    installed(**{package: version})
    name = package.replace("_", "-")
    with pytest.raises(UnsupportedVersionError, match=f"{name} {version}; ort_zero works with .*pip install '{name}=="):
        versions.require("zero" if package == "deepspeed" else "ort")


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("torch", "2.31.0"),
        ("torch", "2.8.0"),
        ("deepspeed", "0.23.0"),
        ("deepspeed", "0.15.4"),
        ("onnxruntime_training", "1.22.0+cpu"),
    ],
)
def test_another_version_is_accepted_and_said_to_be_untested_once(installed, capsys, package, version):
    installed(**{package: version})
    found = versions.require("zero" if package == "deepspeed" else "ort")
    assert found == (f"{package.replace('_', '-')} {version}",)
    versions.say_untested.cache_clear()
    for _ in range(2):
        versions.say_untested(found)
    assert capsys.readouterr().err.count(f"{found[0]}: not among the versions") == 1


@pytest.mark.parametrize("python", [(3, 12, 1), (3, 13, 0), (3, 14, 0)])
def test_a_python_without_a_wheel_lacks_onnxruntime_alone(installed, python):
    installed(python, onnxruntime_training=None)
    assert versions.require("zero") == ()
    with pytest.raises(UnsupportedVersionError) as error:
        versions.require("ort")
    said = str(error.value)
    assert said.startswith(f"models cannot run in ONNX Runtime on Python {python[0]}.{python[1]}")
    assert "checkpoints, statistics and training in PyTorch work here" in said and "\n" not in said
    with pytest.raises(BuildError) as error:  # `ort-zero build` names no wheel that cannot be installed
        extensions.extension_dir()
    assert str(error.value) == said


def test_a_build_of_ones_own_is_accepted_under_either_name_and_on_any_python(installed):
    installed((3, 13, 0), onnxruntime_training=None, onnxruntime_training_cpu="1.20.1+cpu")
    assert versions.installed("onnxruntime-training") == "1.20.1+cpu"
    assert versions.require("ort") == ("python 3.13.0", "onnxruntime-training 1.20.1+cpu")


def test_a_python_below_is_refused_even_so(installed):
    installed((3, 9, 18))
    with pytest.raises(UnsupportedVersionError, match=r"python 3\.9\.18; ort_zero works with python>=3\.10"):
        versions.require("ort")


def test_musl_is_refused_in_words(installed, monkeypatch):
    installed(onnxruntime_training=None)
    monkeypatch.setattr(versions.sysconfig, "get_config_var", {"SOABI": "cpython-311-x86_64-linux-musl"}.get)
    with pytest.raises(UnsupportedVersionError, match=r"musl \(Alpine\).*use a system with glibc, such as Debian"):
        versions.require("ort")
    assert next(row for row in versions.findings() if row.name == "python").found == "3.11.7 on musl"


_WRAP_WITHOUT_ORT = """
import sys
from importlib import metadata
absent = ("onnx", "onnxruntime", "onnxruntime-training", "onnxruntime-training-cpu")
sys.modules |= dict.fromkeys(absent)
found = metadata.version
def version(name):
    if name in absent:
        raise metadata.PackageNotFoundError(name)
    return found(name)
metadata.version = version
import torch, ort_zero
from ort_zero.errors import UnsupportedVersionError
try:
    ort_zero.wrap(torch.nn.Linear(2, 2))
except UnsupportedVersionError as error:
    print(error)
"""


def test_wrapping_a_model_without_onnx_and_onnxruntime_says_what_is_missing():
    done = subprocess.run([sys.executable, "-c", _WRAP_WITHOUT_ORT], capture_output=True, text=True)
    missing = "onnxruntime-training is not installed" if sys.version_info < (3, 12) else "cannot run in ONNX Runtime"
    assert missing in done.stdout, done.stderr

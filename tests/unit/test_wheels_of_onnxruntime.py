"""Wheels that install the same folder: after any order of installing and uninstalling, doctor's cure leaves one."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from importlib import invalidate_caches
from pathlib import Path

import pytest

from ort_zero.cli.examinations import machine as doctor
from ort_zero.compat import torch_extensions, versions
from ort_zero.plugin import loading

WHEELS = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.32.0", "onnxruntime-training": "1.19.2"}
OTHERS = {"torch": "2.13.0", "deepspeed": "0.19.8", "onnx": "1.23.2"}
MODULE = "def get_available_providers():\n    return ['CPUExecutionProvider']\n"


class Site:
    """A folder of packages, into which stub wheels are installed as pip does it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def install(self, name: str, version: str) -> None:
        """Write a wheel's files over those that are there, and the wheel's own metadata."""
        files = (
            {} if name in OTHERS else {"onnxruntime/__init__.py": f"{MODULE}# {name}\n", f"onnxruntime/{name}.so": "x"}
        )
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        record = "".join(f"{path},sha256=x,{len(text)}\n" for path, text in files.items())
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            (self.folder / path).parent.mkdir(exist_ok=True)
            (self.folder / path).write_text(text)
        invalidate_caches()

    def uninstall(self, name: str) -> None:
        """Remove every file that the wheel has noted, whoever has written it since."""
        (info,) = self.folder.glob(f"{name.replace('-', '_')}-*.dist-info")
        for line in (info / "RECORD").read_text().splitlines():
            (self.folder / line.split(",")[0]).unlink(missing_ok=True)
        info.rmdir()
        invalidate_caches()

    def obey(self, cure: str) -> None:
        """Do what doctor's command says."""
        for command in cure.split(" && "):
            words = shlex.split(command)
            names = [word for word in words[2:] if not word.startswith("-")]
            assert words[0] == "pip" and names
            for name, _, version in (re.sub("[<>=]=", "==", each).partition("==") for each in names):
                if words[1] == "uninstall" or "--force-reinstall" in words:
                    self.uninstall(name)
                if words[1] == "install":
                    self.install(name, version or WHEELS[name])


@pytest.fixture
def site(tmp_path, monkeypatch) -> Site:
    """A folder of packages that this process and the ones that it starts look at first, without onnxruntime."""
    monkeypatch.setattr(torch_extensions, "missing_for_operators", lambda: None)
    monkeypatch.setattr(torch_extensions, "unsuitable_compiler", lambda: None)
    monkeypatch.setattr(torch_extensions, "unheld_locks", lambda: [])
    for name in ("ORT_ZERO_DISABLE", "ORT_ZERO_BACKEND", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    loading.load("compile").examine()  # imports what is not in that folder
    without_packages = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *without_packages])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Site(tmp_path)
    for name, version in OTHERS.items():
        made.install(name, version)
    (tmp_path / "torch-2.13.0.dist-info" / "entry_points.txt").write_text("[torch.backends]\nort_zero = ort_zero\n")
    return made


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(WHEELS, 2)))
@pytest.mark.parametrize("gone", [0, 1, None])
def test_the_cure_leads_to_one_whole_wheel_in_all_orders(site, first, second, gone):
    for name in (first, second):
        site.install(name, WHEELS[name])
    if gone is not None:
        site.uninstall((first, second)[gone])
    report = doctor.examine()
    assert report.problems and report.first_fix is not None and report.first_fix.startswith("pip ")
    site.obey(report.first_fix)
    assert doctor.examine().problems == ()
    (left,) = [name for name in versions.RUNTIMES if versions._is_installed(name)]
    if gone is not None:
        assert left == (second, first)[gone]
    assert (site.folder / f"onnxruntime/{left}.so").exists()
    assert (site.folder / "onnxruntime/__init__.py").read_text().endswith(f"# {left}\n")


def test_a_clash_keeps_the_wheel_of_the_engine_that_is_asked_for(site, monkeypatch):
    for name in ("onnxruntime", "onnxruntime-training"):
        site.install(name, WHEELS[name])
    monkeypatch.setenv("ORT_ZERO_BACKEND", "ortmodule")
    clash = versions.clash()
    assert clash is not None
    site.obey(clash.fix)
    assert versions.clash() is None and versions.damage() is None
    assert versions.installed("onnxruntime-training") == "1.19.2"

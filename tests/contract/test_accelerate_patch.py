"""contrib/accelerate: the patch applies to the installed accelerate, and its test passes there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest

ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "contrib/accelerate/ort_zero_backend.patch"


@pytest.mark.seconds
def test_the_patch_applies_and_its_test_passes(tmp_path):
    shutil.copytree(Path(accelerate.__file__).parent, tmp_path / "src/accelerate")
    subprocess.run(["git", "apply", "--verbose", str(PATCH)], cwd=tmp_path, check=True)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "unittest", "-v", "tests/test_ort_zero_backend.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 2 tests" in done.stderr and "skipped" not in done.stderr

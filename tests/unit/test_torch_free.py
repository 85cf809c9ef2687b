"""The tests that need no torch are told apart by what they import, so that ``make test-fast`` needs no list."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_free import needs_torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.seconds
def test_modules_without_torch_do_not_import_it():
    code = (
        "import sys, pytest\n"
        "code = pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', '--without-torch', 'tests/unit'])\n"
        "sys.exit(code or 'torch' in sys.modules and 'torch was imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    collected = set(re.findall(r"^tests/unit/(test_\w+\.py)::", done.stdout, re.M))
    assert {"test_config.py", "test_imports.py", "test_utils.py"} <= collected and len(collected) > 15
    assert collected <= {path.name for path in Path(__file__).parent.glob("test_*.py") if not needs_torch(path)}


def test_imports_are_followed_through_modules_of_the_project(tmp_path):
    (tmp_path / "helper.py").write_text("try:\n    from torch import nn\nexcept ImportError:\n    nn = None\n")
    cases = {
        "import json\n": False,
        "import torch\n": True,
        "from torch import nn\n": True,
        "import helper\n": True,
        "import lm_common\n": True,
        "from ort_zero.config import MemoryConfig\n": False,
        "from ort_zero.units.unit_forward import UnitForward\n": True,
        "def test():\n    import torch\n": False,
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n": False,
    }
    for number, (text, expected) in enumerate(cases.items()):
        path = tmp_path / f"case_{number}.py"
        path.write_text(text)
        assert needs_torch(path) == expected, text

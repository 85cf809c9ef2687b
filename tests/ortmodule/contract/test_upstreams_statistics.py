"""The snippet of ORTModule's convergence guide on a plain PyTorch model, with upstream's import line and with ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SNIPPET = """
import torch
from {hooks} import GlobalSubscriberManager, StatisticsSubscriber
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir="pt_out", override_output_dir=True)])
for _ in range(2):
    model(torch.ones(2, 3)).sum().backward()
"""


def run(code: str, folder: Path) -> str:
    """Run `code` in a new process and return its stderr."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("first", ["", "import ort_zero; ort_zero.enable()\n", "import deepspeed\n"])
def test_upstreams_own_statistics_run_without_cuda_and_name_ours(tmp_path, first):
    said = run(first + SNIPPET.format(hooks="onnxruntime.training.utils.hooks"), tmp_path)
    assert (tmp_path / "pt_out" / "step_0").exists() and (tmp_path / "pt_out" / "step_1").exists()
    assert said.count("ort_zero.hooks has GlobalSubscriberManager and StatisticsSubscriber of its own") == 1


def test_the_schema_functions_run_without_cuda(tmp_path):
    run(
        "import torch\nfrom onnxruntime.training.utils import extract_data_and_schema, unflatten_data_using_schema\n"
        "tensors, schema = extract_data_and_schema({'a': torch.ones(2), 'b': [torch.zeros(1)]})\n"
        "back = unflatten_data_using_schema(tensors, schema)\n"
        "assert torch.equal(back['a'], torch.ones(2)) and torch.equal(back['b'][0], torch.zeros(1))\n",
        tmp_path,
    )


def test_disable_puts_upstreams_functions_back(tmp_path):
    run(
        "import torch, ort_zero\nort_zero.enable()\n"
        "from onnxruntime.training.utils import torch_profile_utils as ranges\n"
        "patched = ranges.torch_nvtx_range_push\npatched('x')\nort_zero.disable()\n"
        "assert ranges.torch_nvtx_range_push is not patched\n",
        tmp_path,
    )


def test_the_same_snippet_runs_with_our_import_line_and_without_onnxruntime(tmp_path):
    absent = "import sys\nsys.modules.update(dict.fromkeys(('onnx', 'onnxruntime', 'ort_zero.ortmodule')))\n"
    run(absent + SNIPPET.format(hooks="ort_zero.hooks"), tmp_path)
    from ort_zero.statistics.reader import open_run

    assert list(open_run(tmp_path / "pt_out").steps_of(0)) == [0, 1]

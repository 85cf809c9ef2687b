"""ORT's CPU arena of the installed version against our model of it, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ort_zero.ortmodule.recompute.arena_model import Arena

MIB = 1 << 20
SCRIPT = """\
import ctypes
import numpy, onnx, onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi import _pybind_state as C
sizes = [60, 40, 16]
nodes = [helper.make_node("Neg", ["x0"], ["y0"]), helper.make_node("ReduceSum", ["y0"], ["s0"], keepdims=0)]
nodes += [helper.make_node("Neg", [f"x{i}"], [f"y{i}"]) for i in (1, 2)]
nodes += [helper.make_node("ReduceSum", [f"y{i}"], [f"s{i}"], keepdims=0) for i in (1, 2)]
given = [helper.make_tensor_value_info(f"x{i}", TensorProto.FLOAT, [n << 18]) for i, n in enumerate(sizes)]
sums = [helper.make_tensor_value_info(f"s{i}", TensorProto.FLOAT, []) for i in range(3)]
model = helper.make_model(helper.make_graph(nodes, "g", given, sums), opset_imports=[helper.make_opsetid("", 15)])
model.ir_version = 8
memory = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
C.create_and_register_allocator(memory, C.OrtArenaCfg(0, -1, -1, 1))  # as compat/ortmodule/sessions.py
options = onnxruntime.SessionOptions()
options.enable_mem_pattern = options.enable_mem_reuse = False
options.intra_op_num_threads, options.log_severity_level = 1, 3
options.add_session_config_entry("session.use_env_allocators", "1")
session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
feeds = {f"x{i}": onnxruntime.OrtValue.ortvalue_from_numpy(numpy.ones(n << 18, numpy.float32))
         for i, n in enumerate(sizes)}
def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
ctypes.CDLL(None).malloc_trim(0)
before = resident()
session.run_with_ort_values([f"s{i}" for i in range(3)], feeds)
print("grown", resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel tells the resident set on Linux alone")
def test_a_free_chunk_goes_whole_to_an_allocation_of_more_than_its_half():
    arena = Arena()
    arena.give(arena.take(60 * MIB))
    arena.take(40 * MIB)
    arena.take(16 * MIB)
    assert arena.resident == 76 * MIB  # a chunk that is split would leave 60
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.split()[-1])
    assert abs(grown - arena.resident) < 6 * MIB, grown / MIB

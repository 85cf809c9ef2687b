"""Parameters that DeepSpeed before 0.19 gathers together are whole when it says so."""

from __future__ import annotations

import importlib.util
import sys

import deepspeed.runtime.zero  # noqa: F401 - the module itself, before another one stands for it
import pytest

from ort_zero.compat import deepspeed_waits
from ort_zero.runtimes import registry

LAST = """
class Init:
    def _allgather_params_coalesced(self, param_list, hierarchy=0, quantize=False):
        launch_handles = [parameter.gather() for parameter in param_list]
        {wait}
"""
OLD = "launch_handles[-1].wait()"
NEW = """for handle in launch_handles:
            handle.wait()"""


class Parameter:
    """A parameter whose gather ends when it is waited for."""

    whole = False

    def gather(self) -> Parameter:
        return self

    def wait(self) -> None:
        self.whole = True


@pytest.fixture
def gather(monkeypatch, tmp_path):
    """Let another source stand for DeepSpeed's module of partitions; return what gathers there."""
    name = deepspeed_waits.TARGET.partition(":")[0]

    def install(wait: str):
        path = tmp_path / "partition_parameters.py"
        path.write_text(LAST.format(wait=wait))
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setitem(sys.modules, name, module)
        return module.Init()

    yield install
    registry.restore("gathers")


def test_each_gather_is_waited_for_where_deepspeed_waits_for_the_last(gather):
    init, parameters = gather(OLD), [Parameter() for _ in range(3)]
    init._allgather_params_coalesced(parameters)
    assert [parameter.whole for parameter in parameters] == [False, False, True]
    registry.apply("gathers", deepspeed_waits.patches)
    init._allgather_params_coalesced(parameters, 0, quantize=False)
    assert all(parameter.whole for parameter in parameters)
    assert registry.patch_sets["gathers"].targets() == (deepspeed_waits.TARGET,)
    registry.restore("gathers")
    again = [Parameter() for _ in range(3)]
    init._allgather_params_coalesced(again)
    assert not again[0].whole


def test_a_deepspeed_that_waits_for_each_is_left_alone(gather):
    gather(NEW)
    registry.apply("gathers", deepspeed_waits.patches)
    assert registry.patch_sets["gathers"].targets() == ()


def test_one_that_gathers_in_another_way_is_left_alone(gather):
    del type(gather(NEW))._allgather_params_coalesced
    registry.apply("gathers", deepspeed_waits.patches)
    assert registry.patch_sets["gathers"].targets() == ()

"""Each level of ort_zero has its level of ORTModule's."""

from __future__ import annotations

from ort_zero import log
from ort_zero.ortmodule.compat import ortmodule


def test_levels_of_ortmodule_are_its_own():
    package = ortmodule.import_ortmodule()
    assert [package.LogLevel[level.ortmodule] for level in log.LEVELS] == sorted(
        package.LogLevel[level.ortmodule] for level in log.LEVELS
    )

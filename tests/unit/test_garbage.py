"""Python's garbage collector is paused in a block, and only there."""

from __future__ import annotations

import gc

import pytest

from ort_zero.utils.garbage import collection_paused


def test_the_collector_rests_in_the_block_and_goes_on_after_an_error_too():
    assert gc.isenabled()
    with pytest.raises(KeyError), collection_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with collection_paused(), collection_paused():
            pass
        assert not gc.isenabled()  # one that is off stays off
    finally:
        gc.enable()

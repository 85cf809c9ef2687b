"""Run on all, raise on all: what each rank raises when others fail, are gone, or are interrupted. No processes."""

from __future__ import annotations

import signal

import pytest

from ort_zero.distributed.raise_on_all_ranks import RankGroup
from ort_zero.distributed.sigint import interrupts_deferred
from ort_zero.errors import CheckpointError, ConfigError, RankError


class Scripted(RankGroup):
    """Rank 1 of three; the others report what the script says."""

    rank, size = 1, 3

    def __init__(self, *others: tuple[str | None, str | None]):
        self.others = list(others)
        self.sent: list = []

    def _exchange(self, value):
        self.sent.append(value)
        if not self.others:
            raise RuntimeError("Connection closed by peer\nwith details")
        first, third = self.others.pop(0)
        return [first, value, third]


def test_a_rank_that_succeeded_names_every_rank_that_failed():
    with pytest.raises(RankError) as caught, Scripted(("disk full", "no permission")).raise_on_all("saving"):
        pass
    assert str(caught.value) == "saving failed on another rank: rank 0: disk full; rank 2: no permission"
    assert caught.value.failures == {0: "disk full", 2: "no permission"}


def test_a_rank_that_failed_raises_its_own_error_and_tells_its_first_line():
    ranks = Scripted(("disk full", None))
    with pytest.raises(ValueError, match="mine"), ranks.raise_on_all("saving"):
        raise ValueError("mine\nand more")
    assert ranks.sent == ["ValueError: mine"]


def test_an_oserror_says_what_failed():
    with pytest.raises(CheckpointError, match="saving failed: .*gone") as caught:
        with Scripted((None, None)).raise_on_all("saving"):
            raise OSError("gone")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize(("mine", "others", "said"), [
    (None, (None, "no file"), "rank 2: no file"),
    ("bad plan", (None, "no file"), "rank 1: bad plan; rank 2: no file"),
    ("bad plan", ("bad plan", "bad plan"), "bad plan"),
])  # fmt: skip
def test_one_error_everywhere_names_every_rank_that_failed(mine, others, said):
    with pytest.raises(ConfigError) as caught:
        with Scripted(others).raise_on_all("reading", everywhere=ConfigError):
            if mine is not None:
                raise ConfigError(mine)
    assert str(caught.value) == said


def test_a_rank_that_is_gone_breaks_the_group():
    ranks = Scripted()
    with pytest.raises(CheckpointError, match="another rank is gone.*Connection closed by peer$"):
        with ranks.raise_on_all("saving"):
            pass
    assert ranks.broken
    with pytest.raises(ValueError, match="mine"), ranks.raise_on_all("saving"):  # says more than that others are gone
        raise ValueError("mine")


def test_an_interrupt_waits_for_the_exchange_and_reaches_a_block_at_once():
    ranks = Scripted((None, None), (None, None))
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            done.append("held")
            with ranks.raise_on_all("saving"):
                done.append("not reached")
    assert done == ["held"] and ranks.sent == ["KeyboardInterrupt: KeyboardInterrupt"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

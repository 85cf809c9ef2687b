"""One table of levels; whose logger is touched; the summary's form."""

from __future__ import annotations

import gc
import io
import logging
import sys
import warnings
from pathlib import Path

import pytest

from ort_zero import config, log
from ort_zero.compat.torch_distributed import silence_deprecated_collectives
from ort_zero.errors import ConfigError
from ort_zero.ortmodule.upstream.loading import root_logger_kept
from ort_zero.plugin import summary

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def plain_logger(monkeypatch):
    """An ``ort_zero`` logger that nobody has configured, as in a new process."""
    monkeypatch.delenv(log.VARIABLE, raising=False)
    logger = logging.getLogger("ort_zero")
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:] = []
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    gc.collect()  # engines of other tests have levels as long as they live
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


class Engine:
    pass


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_variable_wins_over_the_section(monkeypatch, plain_logger):
    monkeypatch.setenv(log.VARIABLE, " devinfo ")
    log.set_level("ERROR")
    assert plain_logger.level == 15
    monkeypatch.setenv(log.VARIABLE, "")
    log.set_level("ERROR")
    assert plain_logger.level == logging.ERROR


@pytest.mark.parametrize("wrong", ["LOUD", "10", "INFO,DEBUG"])
def test_an_unknown_level_is_refused_with_the_names(monkeypatch, wrong):
    with pytest.raises(ConfigError) as caught:
        config.parse({"log_level": wrong})
    names = "DEBUG, DEVINFO, INFO, WARNING, ERROR"
    assert str(caught.value) == f"ort_zero.log_level: must be one of {names}, got {wrong!r}"
    monkeypatch.setenv(log.VARIABLE, wrong)
    with pytest.raises(ConfigError) as caught:
        log.chosen("INFO")
    assert str(caught.value) == f"ORT_ZERO_LOG_LEVEL: must be one of {names}, got {wrong!r}"
    assert log.get_logger().level == logging.INFO  # whoever only logs is never refused


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("level", ["DEBUG", "DEVINFO", "INFO", "WARNING", "ERROR"])
def test_who_speaks(monkeypatch, capsys, rank, level):
    monkeypatch.setenv("RANK", rank)
    logger = log.get_logger()
    log.set_level(level)
    numbers = {"DEBUG": 10, "DEVINFO": 15, "INFO": 20, "WARNING": 30, "ERROR": 40}
    for name, number in numbers.items():
        logger.log(number, "said at %s", name)
    speaks = [name for name, number in numbers.items() if number >= numbers[level]]
    if rank == "1" and level in ("INFO", "WARNING", "ERROR"):
        speaks = ["ERROR"]
    expected = [f"[ort_zero rank {rank}] {name} said at {name}" for name in speaks]
    assert capsys.readouterr().err.splitlines() == expected


def test_of_two_engines_the_most_talkative_one_that_lives_decides(plain_logger):
    first, second = Engine(), Engine()
    log.set_level("DEVINFO", first)
    log.set_level("WARNING", second)
    assert plain_logger.level == 15
    del first
    log.set_level("WARNING", second)
    assert plain_logger.level == logging.WARNING


# -- whose loggers -----------------------------------------------------------------------------------------------------


def test_other_loggers_are_untouched():
    names = ["", "DeepSpeed", "torch", "transformers", "py.warnings"]
    loggers = [logging.getLogger(name) for name in names]
    before = [(x.level, x.handlers[:], x.filters[:], x.propagate, x.disabled) for x in loggers]
    log.set_level("DEBUG")
    log.get_logger().debug("x")
    assert [(x.level, x.handlers[:], x.filters[:], x.propagate, x.disabled) for x in loggers] == before


def test_a_logger_that_the_user_configured_stays_theirs(plain_logger, capsys):
    theirs = io.StringIO()
    handler = logging.StreamHandler(theirs)
    plain_logger.addHandler(handler)
    plain_logger.setLevel(logging.WARNING)
    log.set_level("DEBUG")
    log.get_logger().warning("seen")
    log.get_logger().info("not seen")
    assert plain_logger.handlers == [handler] and plain_logger.propagate and plain_logger.level == logging.WARNING
    assert theirs.getvalue() == "seen\n" and capsys.readouterr().err == ""


def test_what_an_import_puts_on_the_root_logger_is_taken_away():
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    with root_logger_kept():
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.DEBUG)
    assert root.handlers == before and root.level == level


def test_only_known_warnings_of_known_modules_are_silenced():
    def warned(module: str, category: type[Warning], text: str) -> bool:
        with warnings.catch_warnings(record=True) as seen:
            warnings.filterwarnings("always", module="never")
            silence_deprecated_collectives()
            warnings.warn_explicit(text, category, "file.py", 1, module)
        return bool(seen)

    text = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
    assert not warned("torch.distributed.c10d_logger", FutureWarning, text)
    assert warned("my.training", FutureWarning, text)
    assert warned("torch.distributed.c10d_logger", FutureWarning, "something else is deprecated")
    assert warned("torch.distributed.c10d_logger", UserWarning, text)


# -- the summary -------------------------------------------------------------------------------------------------------

VERSIONS = {"ort_zero": "0.1.0", "torch": "2.13.0+cpu", "deepspeed": "0.19.8", "Python": "3.11.7"}
PLANS = (("FastGelu+ 8 of 8", "-64 MiB"), ("Dropout+ 2 of 8", "-3 MiB"))


def status(settled=True, **changes):
    compiled = {
        "settled": settled, "units_in_torch": {} if settled else {"Block": "it is slower"},
        "graphs": 6, "dynamo_graphs": 3, "segments": 40, "segments_in_torch": 4, "flop_share": 0.914,
        "recompilations": ["size 0 of x is 3, was 4"], "failed": {"segment_1f": "result 0 is wrong by 3e-01"},
    }  # fmt: skip
    return {"module": "GPT2LMHeadModel", "engine": "compile", "backend": "onnxruntime", "zero_stage": 3, "sessions": 12,
            "fallback_reason": None, "in_torch": {}, "units": ["h.0", "h.1", "head"], "failures": {},
            "runners": {},
            "compiled": compiled, **changes}  # fmt: skip


def test_the_table_is_the_golden_one():
    text = summary.table(status(), config.Config(), VERSIONS, PLANS)
    assert text.isascii() and text + "\n" == (GOLDEN / "summary.txt").read_text()
    narrow = summary.table(status(), config.Config(), VERSIONS, PLANS, width=100)
    assert max(map(len, narrow.splitlines())) <= 100 and narrow.split() == text.split()


def test_units_that_stay_in_pytorch_are_shown_with_the_reason():
    failures = {"h.1": "ExportError: a size in a sort"}
    text = summary.table(status(failures=failures), config.Config(), VERSIONS)
    assert "  ExportError: a size in a sort" in [line for line in text.splitlines() if line.startswith("  h.1")][0]
    assert "  segment segment_1f" in text


class Terminal(io.StringIO):
    encoding = "utf-8"

    def __init__(self, terminal: bool, encoding: str = "utf-8"):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Runtime:
    """Runs a model, and is the engine that does so."""

    def __init__(self):
        self.engine = self

    def status(self):
        return status()

    def memory_summary(self):
        return PLANS


def told(monkeypatch, stream, level="INFO", columns="80") -> str:
    engine = Engine()
    engine.module, engine.ort_zero_section = Engine(), config.Config()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", columns)
    log.set_level(level)
    monkeypatch.setattr(summary, "_printed", [])
    summary.announce(config.Config(), engine.module, Runtime())
    return stream.getvalue()


def test_later_models_of_a_process_have_one_line(monkeypatch):
    first = told(monkeypatch, Terminal(False))
    again = Terminal(False)
    monkeypatch.setattr(sys, "stderr", again)
    summary.announce(config.Config(), None, Runtime())
    (line,) = again.getvalue().splitlines()
    assert len(first.splitlines()) > 10 and "GPT2LMHeadModel runs in ONNX Runtime: " in line and " units" in line


def test_a_share_is_shown_once_it_is_settled(monkeypatch):
    runtime, stream = Runtime(), Terminal(False)
    monkeypatch.setattr(runtime, "status", lambda: status(settled=False), raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(summary, "_printed", [])
    log.set_level("INFO")
    for settled, words in ((False, "not settled yet"), (True, "settled what runs where, of GPT2LMHeadModel: ONNX")):
        stream.truncate(0)
        settled_status = {**status()["compiled"], "units_in_torch": {"Block": "it is slower"}}
        if settled:
            runners = {"GPT2Block": {"units": {"inductor": 2}, "ms": {}}}
            monkeypatch.setattr(runtime, "status", lambda: status(compiled=settled_status, runners=runners))
        summary.announce(config.Config(), None, runtime)
        text = stream.getvalue()
        assert words in text and ("91 %" in text) is settled and ("; PyTorch runs Block whole" in text) is settled
        assert ("; Inductor runs GPT2Block" in text) is settled
    assert len(text.splitlines()) == 1


def test_it_is_for_rank_0_from_info_on(monkeypatch):
    assert told(monkeypatch, Terminal(False), "WARNING") == ""
    assert told(monkeypatch, Terminal(False), "DEBUG").startswith("[ort_zero rank 0] INFO GPT2LMHeadModel runs in ONNX")
    monkeypatch.setenv("RANK", "1")
    assert told(monkeypatch, Terminal(False), "DEBUG") == ""

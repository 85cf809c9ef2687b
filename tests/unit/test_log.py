"""One table of levels; whose logger is touched; the summary's form."""

from __future__ import annotations

import gc
import io
import logging
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
    def state() -> list:
        loggers = [logging.getLogger(name) for name in ("", "DeepSpeed", "torch", "transformers", "py.warnings")]
        return [(x.level, x.handlers[:], x.filters[:], x.propagate, x.disabled) for x in loggers]

    before = state()
    log.set_level("DEBUG")
    log.get_logger().debug("x")
    with root_logger_kept():  # as around the import of a package that configures it
        logging.getLogger().addHandler(logging.NullHandler())
        logging.getLogger().setLevel(logging.DEBUG)
    assert state() == before


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


def test_only_known_warnings_of_known_modules_are_silenced():
    text = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
    shown = []
    for module, category, said in (
        ("torch.distributed.c10d_logger", FutureWarning, text),
        ("my.training", FutureWarning, text),
        ("torch.distributed.c10d_logger", FutureWarning, "something else is deprecated"),
        ("torch.distributed.c10d_logger", UserWarning, text),
    ):
        with warnings.catch_warnings(record=True) as seen:
            warnings.filterwarnings("always", module="never")
            silence_deprecated_collectives()
            warnings.warn_explicit(said, category, "file.py", 1, module)
        shown.append(bool(seen))
    assert shown == [False, True, True, True]


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
    failed = summary.table(status(failures={"h.1": "ExportError: a size in a sort"}), config.Config(), VERSIONS)
    assert "  ExportError: a size in a sort" in next(line for line in failed.splitlines() if line.startswith("  h.1"))
    assert "  segment segment_1f" in failed


class Runtime:
    """Runs a model, and is the engine that does so."""

    def __init__(self, **changes):
        self.engine, self.changes = self, changes

    def status(self):
        return status(**self.changes)

    def memory_summary(self):
        return PLANS


@pytest.fixture
def announced(monkeypatch, capsys):
    """Return a function that announces a model at a level, and returns what is said."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(summary, "_printed", [])

    def announce(level: str = "INFO", runtime: Runtime | None = None) -> str:
        log.set_level(level)
        summary.announce(config.Config(), None, runtime or Runtime())
        return capsys.readouterr().err

    return announce


def test_later_models_of_a_process_have_one_line(announced):
    first, (line,) = announced(), announced().splitlines()
    assert len(first.splitlines()) > 10 and "GPT2LMHeadModel runs in ONNX Runtime: " in line and " units" in line


def test_a_share_is_shown_once_it_is_settled(announced):
    runtime = Runtime(settled=False)
    text = announced(runtime=runtime)
    assert "not settled yet" in text and "91 %" not in text and "; PyTorch runs" not in text
    compiled = {**status()["compiled"], "units_in_torch": {"Block": "it is slower"}}
    runtime.changes = {"compiled": compiled, "runners": {"GPT2Block": {"units": {"inductor": 2}, "ms": {}}}}
    (line,) = announced(runtime=runtime).splitlines()
    for words in (
        "settled what runs where, of GPT2LMHeadModel: ONNX", "91 %", "; PyTorch runs Block whole",
        "; Inductor runs GPT2Block",
    ):  # fmt: skip
        assert words in line


def test_it_is_for_rank_0_from_info_on(announced, monkeypatch):
    assert announced("WARNING") == ""
    assert announced("DEBUG").startswith("[ort_zero rank 0] INFO GPT2LMHeadModel runs in ONNX")
    monkeypatch.setenv("RANK", "1")
    assert announced("DEBUG") == ""

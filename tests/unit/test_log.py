"""One table of levels; whose logger is touched; what an export writes; the summary's form."""

from __future__ import annotations

import gc
import io
import logging
import os
import sys
import threading
import warnings
from pathlib import Path

import pytest

from ort_zero import config, log
from ort_zero.compat import third_party
from ort_zero.errors import ConfigError
from ort_zero.ortmodule.runtime.export.captured_output import CapturedOutput
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


@pytest.mark.parametrize(
    ("name", "number", "all_ranks", "backend", "exporter"),
    [
        ("DEBUG", 10, True, 0, "verbose"),
        ("VERBOSE", 10, True, 0, "verbose"),
        ("DEVINFO", 15, True, 1, "untouched"),
        ("INFO", 20, False, 2, "held"),
        ("WARNING", 30, False, 2, "held"),
        ("ERROR", 40, False, 3, "held"),
    ],
)
def test_a_level_sets_all_four_sinks(name, number, all_ranks, backend, exporter):
    level = log.chosen(name)
    assert (level.number, level.all_ranks, level.backend, level.exporter) == (number, all_ranks, backend, exporter)
    assert log.chosen(name.lower()) is level


def test_devinfo_lies_between_debug_and_info():
    assert logging.getLevelName(15) == "DEVINFO" and logging.DEBUG < 15 < logging.INFO


def test_the_variable_wins_over_the_section(monkeypatch, plain_logger):
    monkeypatch.setenv(log.VARIABLE, " devinfo ")
    assert log.set_level("ERROR").name == "DEVINFO" and plain_logger.level == 15
    monkeypatch.setenv(log.VARIABLE, "")
    assert log.set_level("ERROR").name == "ERROR" and plain_logger.level == logging.ERROR


@pytest.mark.parametrize("wrong", ["LOUD", "10", "INFO,DEBUG"])
def test_an_unknown_level_is_refused_with_the_names(monkeypatch, wrong):
    with pytest.raises(ConfigError) as caught:
        config.parse({"ortmodule": {"log_level": wrong}})
    names = "DEBUG, VERBOSE, DEVINFO, INFO, WARNING, ERROR"
    assert str(caught.value) == f"ort_zero.ortmodule.log_level: must be one of {names}, got {wrong!r}"
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
    assert log.set_level("WARNING", second).name == "WARNING"
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
    with third_party.root_logger_kept():
        root.addHandler(logging.NullHandler())
        root.setLevel(logging.DEBUG)
    assert root.handlers == before and root.level == level


def test_only_known_warnings_of_known_modules_are_silenced():
    def warned(module: str, category: type[Warning], text: str) -> bool:
        with warnings.catch_warnings(record=True) as seen:
            warnings.filterwarnings("always", module="never")
            third_party.silence()
            warnings.warn_explicit(text, category, "file.py", 1, module)
        return bool(seen)

    text = "`torch.distributed.all_gather_into_tensor` is deprecated. Please use another."
    try:
        assert not warned("torch.distributed.c10d_logger", FutureWarning, text)
        assert warned("my.training", FutureWarning, text)
        assert warned("torch.distributed.c10d_logger", FutureWarning, "something else is deprecated")
        assert warned("torch.distributed.c10d_logger", UserWarning, text)
    finally:
        third_party.unsilence()


def test_silencing_ends_and_gives_way_to_the_user():
    text = "`torch.distributed.reduce_scatter_tensor` is deprecated."
    with warnings.catch_warnings(record=True) as seen:
        warnings.resetwarnings()
        before = warnings.filters[:]
        third_party.silence()
        third_party.silence()
        assert len(warnings.filters) == len(before) + 1
        warnings.filterwarnings("always", category=FutureWarning)
        warnings.warn_explicit(text, FutureWarning, "f.py", 1, "torch.distributed.c10d_logger")
        assert len(seen) == 1
        third_party.unsilence()
        assert len(warnings.filters) == len(before) + 1


# -- what the exporter writes ------------------------------------------------------------------------------------------


def _say() -> None:
    print("to stdout")
    print("to stderr", file=sys.stderr)


def test_an_export_that_succeeds_shows_nothing(capsys):
    output = CapturedOutput(hold=True)
    before = sys.stdin, sys.stdout, sys.stderr
    with output.captured():
        _say()
    output.drop()
    assert (sys.stdin, sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("", "")
    output.replay()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_export_that_fails_shows_all_where_it_belongs(capsys, error):
    output = CapturedOutput(hold=True)
    with pytest.raises(error), output.captured():
        _say()
        raise error
    output.replay()
    assert capsys.readouterr() == ("to stdout\n", "to stderr\n")


def test_the_streams_are_the_very_objects_where_nothing_is_held():
    before = sys.stdin, sys.stdout, sys.stderr
    with CapturedOutput(hold=False).captured():
        assert (sys.stdin, sys.stdout, sys.stderr) == before


def test_the_users_own_run_of_the_module_is_not_held(capsys):
    output = CapturedOutput(hold=True)
    before = sys.stdout
    with output.captured():
        print("held")
        with output.passed_through():
            assert sys.stdout is before
            print("shown")
        print("held again")
    output.drop()
    assert capsys.readouterr().out == "shown\n"


def test_other_threads_and_our_own_logger_are_not_held(capsys):
    output = CapturedOutput(hold=True)
    log.set_level("INFO")
    with output.captured():
        thread = threading.Thread(target=print, args=("from another thread",))
        thread.start()
        thread.join()
        log.get_logger().info("ours")
    assert capsys.readouterr() == ("from another thread\n", "[ort_zero rank 0] INFO ours\n")


def test_descriptors_are_not_redirected(capfd):
    with CapturedOutput(hold=True).captured():
        os.write(1, b"native\n")
        os.write(sys.stderr.fileno(), b"native too\n")
    assert capfd.readouterr() == ("native\n", "native too\n")


def test_who_asks_for_input_gets_the_terminal_back(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("c\n"))
    output = CapturedOutput(hold=True)
    with output.captured():
        print("before the question")
        assert sys.stdin.readline() == "c\n"
        print("after it")
        assert capsys.readouterr().out == "before the question\nafter it\n"


def test_what_is_held_lies_in_a_file_until_the_export_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output = CapturedOutput(hold=True)
    with output.captured():
        assert not list(tmp_path.iterdir())
        print("the last words")
        (file,) = tmp_path.iterdir()
        assert file.name.startswith(f"ort_zero-export-rank0-{os.getpid()}-")
        assert file.read_text() == "the last words\n"
    output.drop()
    assert not list(tmp_path.iterdir())


# -- the summary -------------------------------------------------------------------------------------------------------

VERSIONS = {"ort_zero": "0.1.0", "torch": "2.13.0+cpu", "deepspeed": "0.19.8", "Python": "3.11.7"}
PLANS = (("FastGelu+ 8 of 8", "-64 MiB"), ("Dropout+ 2 of 8", "-3 MiB"))


def status(**changes):
    step = {"mode": "training", "steps": {"export": 0.614, "shapes": 0.21, "collectives": 0.04}, "seconds": 1.104}
    graph = {"nodes": 710, "python_ops": 89, "inputs": 3, "collectives": "52 weights, 28 gathers forward, 26 backward"}
    return {"module": "GPT2LMHeadModel", "zero_stage": 3, "fallback_reason": None, "in_torch": {},
            "graphs": {"training": graph}, "transitions": [step], **changes}  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_is_the_golden_one(width):
    text = summary.table(status(), config.Config(), VERSIONS, PLANS, width=width)
    assert text.isascii() and max(map(len, text.splitlines())) <= width
    assert text + "\n" == (GOLDEN / f"summary_{width}.txt").read_text()


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_columns_are_aligned(width):
    lines = summary.table(status(), config.Config(), VERSIONS, width=width, boxes=True).splitlines()
    first = lines[0].index("│")
    assert all(line[first] == "│" for line in lines if not line.startswith("─") and len(line) > first)
    assert all(len(line) <= width for line in lines)
    (rule,) = [line for line in lines if line.startswith("─")]
    assert rule[first] == "┼" and set(rule) == {"─", "┼"}


def test_each_feature_says_on_or_off():
    section = config.parse({
        "ortmodule": {"cache_dir": "/c", "exclude": ["*.router"], "fallback": "warn"},
        "checkpoint": {"async_save": True},
        "memory_efficient_gradients": True,
    })  # fmt: skip
    kept = {"a.router": "asked", "b.router": "asked"}
    text = summary.table(status(zero_stage=2, in_torch=kept), section, VERSIONS, width=100)
    states = {line.split("|")[0].strip(): line.split("|")[1].strip() for line in text.splitlines() if "|" in line}
    assert states["ONNX Runtime"] == "on" and states["ZeRO-3 in the graph"] == "off"
    assert states["memory-efficient gradients"] == states["export cache"] == states["asynchronous saving"] == "on"
    assert states["recomputation"] == states["statistics"] == "off"
    assert states["kept in PyTorch"] == "a.router and 1 more"
    assert "memory_efficient_gradients: false" in text and 'ortmodule.fallback: "raise"' in text


def test_lines_that_keep_a_submodule_in_pytorch_are_shown():
    kept = {
        "aten::lstm": "no gradient in ORT",
        **{f"layers.{i}": f"draws random numbers from numpy.random (/a/model.py:{i} in forward)" for i in range(5)},
    }
    text = summary.table(status(in_torch=kept), config.Config(), VERSIONS, width=100)
    shown = [line for line in text.splitlines() if "numpy.random (/a/model.py:" in line]
    assert [line.split("|")[0].strip() for line in shown] == ["layers.0", "layers.1", "layers.2"]
    assert "no gradient in ORT" not in text and "aten::lstm and 5 more" in text


def test_recomputation_is_on_where_it_is_asked_for_even_if_nothing_was_found():
    section = config.parse({"memory": {"recompute": "all"}})
    text = summary.table(status(), section, VERSIONS)
    assert 'recomputation              | on      | memory.recompute: "off"' in text


def test_a_model_that_fell_back_names_the_reason():
    text = summary.table(status(fallback_reason="a sparse tensor", graphs={}), config.Config(), VERSIONS)
    assert "reason" in text and "a sparse tensor" in text and "ONNX Runtime               | off" in text


def test_without_onnx_runtime_there_is_a_table_as_well():
    text = summary.table(None, config.parse({"ortmodule": {"enabled": False}}), VERSIONS)
    assert "ortmodule.enabled: true" in text and "training graph" not in text


class Terminal(io.StringIO):
    encoding = "utf-8"

    def __init__(self, terminal: bool, encoding: str = "utf-8"):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


class Runtime:
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
    summary.announce(config.Config(), engine.module, Runtime())
    return stream.getvalue()


def test_box_characters_are_for_terminals_only(monkeypatch):
    assert "│" in told(monkeypatch, Terminal(True)) and told(monkeypatch, Terminal(False)).isascii()
    latin = Terminal(True)
    latin.encoding = "iso-8859-1"
    assert told(monkeypatch, latin).isascii()


def test_it_is_as_wide_as_the_terminal(monkeypatch):
    for columns in (60, 80, 100):
        lines = told(monkeypatch, Terminal(True), columns=str(columns)).splitlines()
        assert columns - 25 < max(map(len, lines)) <= columns
    assert "FastGelu+ 8 of 8" in "\n".join(lines)


def test_it_is_for_rank_0_from_info_on(monkeypatch):
    assert told(monkeypatch, Terminal(False), "WARNING") == ""
    assert told(monkeypatch, Terminal(False), "DEBUG").startswith("[ort_zero rank 0] INFO GPT2LMHeadModel runs in ONNX")
    monkeypatch.setenv("RANK", "1")
    assert told(monkeypatch, Terminal(False), "DEBUG") == ""

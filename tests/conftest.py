"""What the tests share: paths, the tools beside the interpreter, a process that imports what all ranks import."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import sys
from pathlib import Path

import pytest
from group_of_one import group_of_one, one_rank  # noqa: F401

CLIENTS = Path(__file__).resolve().parent / "clients"

for folder in ("unit", "dist", "ortmodule/dist", "ortmodule/contract"):  # helpers that several folders use
    sys.path.insert(0, str(Path(__file__).parent / folder))
os.environ.setdefault("ORT_ZERO_WARM_RANKS", "1")
# what torch and DeepSpeed import in functions, one or two seconds for each rank: the compiler, and the optimizer Muon
# for the check of any optimizer; onnxruntime must not be loaded before a fork
os.environ["ORT_ZERO_WARM_IMPORTS"] = (
    "torch._inductor.pattern_matcher torch._inductor.debug deepspeed.runtime.zero.muon.muon_optimizer "
    "deepspeed.module_inject.auto_ep_layer"
)
os.environ["ORT_ZERO_EXPORT_CACHE"] = "0"  # what one test exports must not be what another one runs
os.environ.pop("ORT_ZERO_LOG_LEVEL", None)  # it wins over those that tests set
# a shell starts its background jobs with SIGINT ignored, and so would be every process that a test interrupts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# DeepSpeed builds its operators with the ninja on the path, and builds them again when that is another one
os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
# ... and those of an environment at another path, half a minute each time that two clones take turns
_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
_environment = hashlib.sha256(f"{sys.prefix} {sys.version}".encode()).hexdigest()[:12]
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(_cache, "torch_extensions", f"tests_{_environment}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of ``make test-fast``."""
    parser.addoption(
        "--without-torch", action="store_true", help="leave out test modules that import torch or what needs it"
    )


def _clients_wanted(config: pytest.Config) -> bool:
    """Return whether the marker is named, or the folder or something in it."""
    named = (Path(argument.split("::")[0]).resolve() for argument in config.args)
    return "clients" in config.option.markexpr or any(CLIENTS in (path, *path.parents) for path in named)


class NeedsTorch:
    """A finder for which a test module that imports torch, or a package that does, is skipped at once."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Skip the module that is collected."""
        if name in ("torch", "deepspeed", "onnxruntime", "transformers"):
            raise pytest.skip.Exception(f"imports {name}", allow_module_level=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out programs of others unless they were asked for: they need packages that `make test` does without."""
    return True if collection_path == CLIENTS and not _clients_wanted(config) else None


def pytest_collection(session: pytest.Session) -> None:
    """Leave out the test modules that need torch, if that was asked for."""
    if session.config.getoption("--without-torch"):
        sys.meta_path.insert(0, NeedsTorch)


def pytest_collection_finish() -> None:
    """Leave what test modules have imported out of garbage collections: most of a second for each that a test runs."""
    if NeedsTorch in sys.meta_path:
        sys.meta_path.remove(NeedsTorch)
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which tests were collected and none passed: a gate that ran nothing proves nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.option.collectonly or hasattr(session.config, "workerinput"):
        return
    if session.exitstatus == pytest.ExitCode.OK and not reporter.stats.get("passed"):
        reporter.write_line("error: no test passed, so this run proves nothing", red=True)
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

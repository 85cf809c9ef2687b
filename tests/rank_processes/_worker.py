"""Run one rank of :func:`rank_processes.ranks.run_on_ranks`: ``python -m rank_processes._worker FOLDER``."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ort_zero.distributed import gloo_exit
from ort_zero.utils import atomic_write


def load(module_name: str | None, path: str | None, qualname: str) -> Callable[..., Any]:
    """Return the function `qualname` of the module `module_name`, or of the file `path`."""
    if path is None:
        if module_name is None:
            raise ValueError(f"{qualname}: neither a module nor a file is named")
        target: Any = importlib.import_module(module_name)
    else:
        name = module_name or Path(path).stem
        if name == "__main__":  # its ``if __name__ == "__main__"`` block must not run again
            name = "__mp_main__"
        sys.path.insert(0, str(Path(path).resolve().parent))
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python source file")
        target = importlib.util.module_from_spec(spec)
        sys.modules[name] = target  # pickle looks a result's class up here
        spec.loader.exec_module(target)
    for part in qualname.split("."):
        target = getattr(target, part)
    return target


def write(path: Path, payload: Any) -> None:
    """Write `payload` as a pickle that appears complete or not at all."""
    atomic_write.write_bytes(path, pickle.dumps(payload))


def main(folder: Path) -> int:
    """Run this rank's function, write its result or its traceback into `folder`, and return the exit code.

    For a script of :func:`rank_processes.ranks.run_script_on_ranks` nothing is written, and its errors are raised.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    gloo_exit.settle_at_exit()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    spec = pickle.loads((folder / "spec.pkl").read_bytes())
    sys.path.extend(entry for entry in spec["sys_path"] if entry not in sys.path)
    if "command" in spec:  # the script's errors and exit status are those of this process
        sys.argv = spec["command"]
        sys.path.insert(0, os.path.dirname(spec["command"][0]))
        runpy.run_path(spec["command"][0], run_name="__main__")
        return 0
    try:
        args = pickle.loads(spec["args"])
        result = load(spec["module"], spec["path"], spec["qualname"])(*args)
        write(folder / f"rank_{rank}.result", result)
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            write(folder / f"rank_{rank}.result", None)
        else:
            write(folder / f"rank_{rank}.error", (time.monotonic(), traceback.format_exc()))
            sys.stdout.flush()
            sys.stderr.flush()
            # No orderly exit: it may wait for peers, in a collective that this rank will never join.
            os._exit(1)
    # Rank 0 serves the store of the process group: no rank leaves before all are done. If a rank fails, the parent
    # process kills the waiting ranks.
    while not all((folder / f"rank_{r}.result").exists() for r in range(world_size)):
        time.sleep(0.02)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

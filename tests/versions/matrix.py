"""Tries ort_zero with other versions of what it depends on, one environment at a time; ``make matrix`` runs it.

Each pair of :mod:`pairs` gets an environment of its own. Plain DeepSpeed and the doctor come first, then the tests of
:mod:`steps`, in one pytest, whose worker is started again when a test ends the process. What came of them is stored in
``results/``, and the section about versions of ``docs/compatibility.md`` is written from what is stored.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from environments import ROOT, environment
from page import RESULTS, SHOWN, counts, write_page
from pairs import PAIRS, Pair
from steps import STEPS

HERE = Path(__file__).parent
SECONDS = 3 * 3600
"""Limit of time for the tests of a pair."""
_REFERENCE = re.compile(r"\w+ in torch:\s+(E\s+)?Traceback|DeepSpeed itself does not write")
"""How the scenarios of tests/compile/dist report an error of the training that they compare with, and how the tests
that read DeepSpeed's checkpoints say that it has written none."""
_FACTS = f"""
import json, sys
from ort_zero.compat.versions import installed
print(json.dumps({{"python": sys.version.split()[0], "versions": {{name: installed(name) for name in {SHOWN!r}}}}}))
"""


class Environment:
    """Runs programs with the interpreter of a pair."""

    def __init__(self, python: Path) -> None:
        self._python = python
        # other versions of DeepSpeed and torch would compile its operators anew, each time that they take turns
        cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions")
        own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONPATH": str(ROOT)}
        # as tests/conftest.py does: with another ninja DeepSpeed compiles its operators anew, for minutes
        own["PATH"] = os.pathsep.join((str(python.parent), os.environ["PATH"]))
        self._variables = {**os.environ, **own}
        self.facts = json.loads(self.run("-c", _FACTS).stdout)
        made_for = hashlib.sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()[:12]
        self._variables["TORCH_EXTENSIONS_DIR"] = str(cache / f"matrix_{made_for}")

    def run(self, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program of Python; what it has started ends with it when time runs out."""
        arguments, env = [str(self._python), *map(str, command)], {**self._variables, **variables}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen(arguments, cwd=ROOT, env=env, stdout=out, stderr=err, start_new_session=True)
            try:
                code = process.wait(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def try_pair(pair: Pair, python: Path, names: list[str]) -> bool:
    """Run steps of a pair and store what came of them; return whether what plain DeepSpeed can do works."""
    where = Environment(python)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "stages.json")
        ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
        plain = where.run(*ranks, HERE / "plain_deepspeed.py", file, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        stages = json.loads(file.read_text()) if not plain.returncode else {}
    record: dict[str, Any] = {"name": pair.name, **where.facts, "stages": stages}
    record |= {"passed": 0, "failed": 0, "plain": 0, "skipped": 0, "failures": []}
    if plain.returncode:
        record["failures"].append(f"plain DeepSpeed: {last_line(plain.stderr)}")
    doctor = where.run("-m", "ort_zero", "doctor")
    if doctor.returncode:
        record["failures"].append(f"ort-zero doctor: {last_line(doctor.stderr) or last_line(doctor.stdout)}")
    chosen = [test for name in names for test in STEPS[name].tests]
    left_out = [f"--deselect={test}" for name in names for test in STEPS[name].without]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1", f"--junitxml={report}", "-m", "not slow")
        done = where.run(*command, *left_out, *chosen)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if not cases:
        record["failures"].append(f"pytest ended with {done.returncode}: {last_line(done.stdout or done.stderr)}")
    for case in cases:
        problem = next((each for each in case if each.tag in ("failure", "error")), None)
        if problem is not None:
            is_plain = fails_plainly(problem.text or "", stages)
            record["plain" if is_plain else "failed"] += 1
            if not is_plain:
                record["failures"].append(failure(case, problem.text or ""))
        else:
            record["skipped" if case.find("skipped") is not None else "passed"] += 1
    record["failed"] = max(record["failed"], len(record["failures"]))
    record["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    print(f"{pair.name}: {counts(record)}", *record["failures"], sep="\n  ", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{pair.name}.json").write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return not record["failures"]


def fails_plainly(text: str, stages: dict[str, dict[str, str] | None]) -> bool:
    """Return whether pytest's text of a failure shows that plain DeepSpeed fails there.

    Either with an error that ``plain_deepspeed.py`` has met too, in the same function, or in the training of the test
    itself that is without ort_zero.
    """
    return bool(_REFERENCE.search(text)) or any(
        error["error"] in text and (f"in {error['function']}" in text or f"def {error['function']}(" in text)
        for error in stages.values()
        if error
    )


def last_line(text: str) -> str:
    """Return the last line of an output."""
    return (text.strip().splitlines() or [""])[-1][:300]


def failure(case: ElementTree.Element, text: str) -> str:
    """Return the name of a failed test with the last line of its error, in one line without a path of this machine."""
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b|assert", line)]
    cause = (errors or lines or [last_line(text)])[-1].partition("\\n")[0].replace(f"{ROOT}/", "")
    return f"{case.get('classname')}.{case.get('name')}: {cause}".replace("`", "'").replace("|", "/")[:300]


def main() -> int:
    """Run the steps of the pairs that were asked for; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[pair.name for pair in PAIRS], help="these pairs (default: all)")
    parser.add_argument("--steps", nargs="+", choices=STEPS, help="these steps (default: those of the pair)")
    parser.add_argument("--envs", type=Path, default=ROOT / ".venv" / "matrix", help="folder of the environments")
    parser.add_argument("--keep", action="store_true", help="keep each environment after its pair")
    parser.add_argument("--page", action="store_true", help="only write the page from the results that are there")
    args = parser.parse_args()
    good = True
    for pair in [] if args.page else [p for p in PAIRS if args.only is None or p.name in args.only]:
        python = environment(pair, args.envs / pair.name)
        if python is None:
            print(f"{pair.name}: no Python {pair.python} here, left out")
            continue
        good &= try_pair(pair, python, args.steps or list(pair.steps))
        write_page()
        if not args.keep and pair.packages:
            shutil.rmtree(args.envs / pair.name)
    write_page()
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

"""Runs the steps of one pair in its environment and stores what came of each."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from page import RESULTS, ROOT, SHOWN, cell
from pairs import Pair
from steps import STEPS

HERE = Path(__file__).parent
STEP_SECONDS = 3600
_ALONE = ("hooks", "compiled", "OpInfo")
"""The steps with tests in the process of pytest itself, which a crash may end; the others have ranks of their own."""

_REFERENCE = re.compile(r"\w+ in torch:\s+(E\s+)?Traceback|DeepSpeed itself does not write")
"""How the scenarios of tests/compile/dist report an error of the training that they compare with, and how the tests
that read DeepSpeed's checkpoints say that it has written none."""


class Row:
    """The result of one pair, and the processes that lead to it.

    Args:
        pair: the versions.
        python: interpreter of its environment.
    """

    def __init__(self, pair: Pair, python: Path) -> None:
        self._pair, self._python = pair, python
        # other versions of DeepSpeed and torch would compile its operators anew, each time that they take turns
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._operators = Path(cache, "torch_extensions")
        made_for = self._output(
            "-c",
            "import sys; from importlib.metadata import version as v; print(sys.version, v('torch'), v('deepspeed'))",
        )
        self._operators /= f"matrix_{hashlib.sha256(made_for.encode()).hexdigest()[:12]}"
        self._path = RESULTS / f"{pair.name}.json"
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        versions = self._versions()
        steps = known.get("steps", {}) if known.get("versions") == versions else {}
        self._record: dict[str, Any] = {"name": pair.name, "versions": versions, "steps": steps}
        self._record["python"] = self._output("--version").split()[1]

    def run(self, names: list[str] | None) -> bool:
        """Run steps, by default those of the pair; return whether nothing failed that works without ort_zero."""
        if self._pair.refused:
            self._keep("refusal", self._refusal())
            return self._good()
        self._keep("plain", self._plain())
        self._keep("doctor", self._doctor())
        wanted = names or self._pair.steps
        for group in ([name for name in wanted if name in _ALONE], [name for name in wanted if name not in _ALONE]):
            if group:
                for name, result in self._tests(group).items():
                    self._keep(name, result)
        return self._good()

    def _good(self) -> bool:
        return not any(step["failed"] for step in self._record["steps"].values())

    def _keep(self, name: str, result: dict[str, Any]) -> None:
        self._record["steps"][name] = {
            **result,
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        }
        print(f"{self._pair.name}: {name}: {cell(result)}, {result['seconds']} s", flush=True)
        RESULTS.mkdir(exist_ok=True)
        self._path.write_text(json.dumps(self._record, indent=1, sort_keys=True) + "\n")

    # -- what comes before the tests -----------------------------------------------------------------------------------

    def _refusal(self) -> dict[str, Any]:
        start = time.monotonic()
        done = self._run(HERE / "refusal.py")
        said = (done.stdout.strip().splitlines() or [""])[-1]
        seen = done.returncode == 0 and re.search(str(self._pair.refused), said) is not None
        return {**_counts(failed=not seen), "seconds": _since(start), "said": said or _last_line(done.stderr)}

    def _plain(self) -> dict[str, Any]:
        start = time.monotonic()
        done = self._run(HERE / "plain_deepspeed.py")
        if done.returncode != 0 or not done.stdout.strip():
            failed = {"words": "**failed**", "first": _last_line(done.stderr), "stages": {}}
            return {**_counts(failed=True), "seconds": _since(start), **failed}
        stages = json.loads(done.stdout.strip().splitlines()[-1])
        fails = [stage for stage, error in stages.items() if error and stage.isdigit()]
        works = [stage for stage in stages if stage not in fails and stage.isdigit()]
        words = f"ZeRO-{', '.join(works)}" if works else "none"
        words += f"; ZeRO-{', '.join(fails)} **fails**" if fails else ""
        words += "".join(f"; {name} **fails**" for name, error in stages.items() if error and not name.isdigit())
        first = next((f"{e['error']} in {e['function']}" for e in stages.values() if e), None)
        return {**_counts(), "seconds": _since(start), "words": words, "first_plain": first, "stages": stages}

    def _doctor(self) -> dict[str, Any]:
        """Return how the command went."""
        start = time.monotonic()
        done = self._run("-m", "ort_zero", "doctor")
        failed = done.returncode != 0
        found = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
        first = (found or [_last_line(done.stderr) or _last_line(done.stdout)])[0] if failed else None
        words = "**failed**" if failed else "good"
        return {**_counts(failed=failed), "seconds": _since(start), "words": words, "first": first}

    # -- tests ---------------------------------------------------------------------------------------------------------

    def _tests(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """Run the tests of some steps in one process of pytest, and return the result of each."""
        chosen = [test for name in names for test in STEPS[name].tests]
        left_out = [f"--deselect={test}" for name in names for test in STEPS[name].without]
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder, "lines")
            command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "report_lines", "-m", "not slow")
            done = self._run(*command, *left_out, *chosen, lines=lines)
            results = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        if not any(result["outcome"] != "begun" for result in results):
            text = f"pytest ended with {done.returncode}: {_last_line(done.stdout) or _last_line(done.stderr)}"
            results.append({"test": chosen[0], "outcome": "failed", "seconds": _since(start), "text": text})
        results += _cut_short(results, done.returncode)
        return {name: self._summary(name, results) for name in names}

    def _summary(self, name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
        stages = self._record["steps"].get("plain", {}).get("stages", {})
        found: dict[str, list[dict[str, Any]]] = {"passed": [], "failed": [], "plain": [], "skipped": [], "xfailed": []}
        for result in results:
            if result["test"].startswith(STEPS[name].tests) and result["outcome"] != "begun":
                fails = result["outcome"] == "failed"
                found["plain" if fails and fails_plainly(result["text"], stages) else result["outcome"]].append(result)
        if not found["passed"] and not found["failed"] and not found["plain"] and not found["skipped"]:
            found["failed"].append({"test": name, "text": "no test ran", "seconds": 0})
        counts = {key: len({result["test"] for result in some}) for key, some in found.items()}
        for result in found["failed"]:
            print(f"{self._pair.name}: {name}: failed: {_first([result])}", flush=True)
        seconds = sum(result["seconds"] for some in found.values() for result in some)
        first = {"first": _first(found["failed"]), "first_plain": _first(found["plain"])}
        return {**counts, **first, "seconds": round(seconds)}

    # -- processes -----------------------------------------------------------------------------------------------------

    def _run(self, *command: object, lines: Path | None = None) -> subprocess.CompletedProcess[str]:
        own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
        own["TORCH_EXTENSIONS_DIR"] = str(self._operators)
        # as tests/conftest.py does: with another ninja DeepSpeed compiles its operators anew, for minutes
        own["PATH"] = os.pathsep.join((str(self._python.parent), os.environ["PATH"]))
        own |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}" if lines else str(ROOT), "RESULT_LINES": str(lines)}
        arguments = [str(self._python), *map(str, command)]
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            # a session of its own: what the tests have started goes with it when time runs out
            process = subprocess.Popen(
                arguments, cwd=ROOT, env={**os.environ, **own}, stdout=out, stderr=err, start_new_session=True
            )
            try:
                code = process.wait(timeout=STEP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(arguments, code, out.read(), err.read())

    def _output(self, *command: object) -> str:
        done = self._run(*command)
        if done.returncode:
            raise RuntimeError(f"{self._pair.name}: {done.stderr}")
        return done.stdout

    def _versions(self) -> dict[str, str | None]:
        code = (
            "import json; from ort_zero.compat.versions import installed; "
            f"print(json.dumps({{name: installed(name) for name in {SHOWN!r}}}))"
        )
        return json.loads(self._output("-c", code))


def fails_plainly(text: str, stages: dict[str, dict[str, str] | None]) -> bool:
    """Return whether a failed test shows that plain DeepSpeed fails there.

    Either with an error that ``plain_deepspeed.py`` has met too, in the same function, or in the training of the test
    itself that is without ort_zero.

    Args:
        text: what pytest says of the failure.
        stages: the result of ``plain_deepspeed.py``.
    """
    if _REFERENCE.search(text):
        return True
    found = (error for error in stages.values() if error)
    return any(
        error["error"] in text and (f"in {error['function']}" in text or f"def {error['function']}(" in text)
        for error in found
    )


def _counts(failed: bool = False) -> dict[str, int]:
    return {"passed": int(not failed), "failed": int(failed), "skipped": 0}


def _since(start: float) -> int:
    return round(time.monotonic() - start)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]


def _cut_short(results: list[dict[str, Any]], code: int) -> list[dict[str, Any]]:
    """Return a failure for each test that began and has no end: the process ended in it."""
    ended = {result["test"] for result in results if result["outcome"] != "begun"}
    begun = [result["test"] for result in results if result["outcome"] == "begun"]
    text = f"the process ended with {code} in this test"
    return [{"test": test, "outcome": "failed", "seconds": 0, "text": text} for test in begun if test not in ended]


def _first(failed: Iterable[dict[str, Any]]) -> str | None:
    """Return the name of the first of some failed tests, with the last line of its error."""
    for result in failed:
        lines = [line[1:].strip() for line in result["text"].splitlines() if line.startswith("E ")]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b|assert", line)]
        text = (errors or lines or [_last_line(result["text"])])[-1]
        text = text.partition("\\n")[0].replace(f"{ROOT}/", "")  # one line, without a path of this machine
        return f"{result['test']}: {text}".replace("`", "'").replace("|", "/")[:300]
    return None

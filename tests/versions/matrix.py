"""Tries ort_zero with other versions of what it depends on, one environment at a time; ``make matrix`` runs it.

Each pair of :mod:`pairs` gets an environment of its own with the packages of this one below it, so that only what
differs is installed; wheels come from pip's cache the second time. The tests of each step run in it, and what came of
them goes into ``results/`` and into the section about versions of ``docs/compatibility.md``. A step that was not run is
shown as such.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import stub_libraries
from pairs import PAIRS, Pair

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results"
DOCUMENT = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- versions: written by make matrix -->", "<!-- end of versions -->"
SHOWN = ("torch", "deepspeed", "transformers", "accelerate", "onnxruntime-training")
STEPS = {
    "unit": ("tests/unit", "tests/contract"),
    "parity": ("tests/dist/test_parity.py",),
    "zero3": ("tests/dist/test_zero3_features.py",),
    "reader": ("tests/dist/test_deepspeed_reader.py",),
    "checkpoints": ("tests/dist/test_sharded_checkpoints.py", "tests/dist/test_aggregate_ranks.py"),
    "statistics": ("tests/dist/test_statistics_ranks.py", "tests/contract/test_statistics.py"),
}
"""The tests of each step; ``doctor`` and ``build`` come before them."""
STEP_SECONDS = 3600


def main() -> int:
    """Run the steps of the pairs that were asked for; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[pair.name for pair in PAIRS], help="these pairs (default: all)")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="these steps (default: all)")
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
        good &= try_pair(pair, python, args.steps)
        write_page()
        if not args.keep and pair.packages:
            shutil.rmtree(args.envs / pair.name)
    write_page()
    return 0 if good else 1


def environment(pair: Pair, folder: Path) -> Path | None:
    """Make the environment of `pair`, unless it is there; return its interpreter, None without that Python."""
    if not pair.packages:
        return Path(sys.executable)
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return python
    base = interpreter(pair.python)
    if base is None:
        return None
    subprocess.run([base, "-m", "venv", "--clear", folder], check=True)
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    install = [python, "-m", "pip", "install", "-qq"]
    if pair.python == _this_python():
        (site / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    else:
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        wanted = [pin for pin in pins if re.match(r"(deepspeed|onnx)==", pin)]
        helpers = ("sympy", "networkx", "mpmath", "setuptools", "typing_extensions", "hjson", "psutil", "py-cpuinfo")
        subprocess.run(
            [*install, "--no-deps", *wanted, *helpers, "msgpack", "einops", "ninja", "ml_dtypes"], check=True
        )
        # torch is there already for whatever needs it, so that nothing brings gigabytes of CUDA
        subprocess.run([*install, "--no-deps", *pair.packages], check=True)
        subprocess.run([*install, f"{ROOT}[statistics,plot]", "protobuf", "pytest", "pytest-timeout"], check=True)
        subprocess.run([*install, "pytest-xdist", "PyYAML", "flask", "flask-cors", "moto[s3]", "s3fs"], check=True)
        subprocess.run([*install, "transformers>=5,<6", "selenium", "mypy"], check=True)
        subprocess.run([*install, "--no-deps", "accelerate>=1.15,<2", "-e", str(ROOT)], check=True)
    for package in pair.packages if pair.python == _this_python() else ():
        subprocess.run([*install, "--no-deps", package], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    if any(package.startswith("torch==") for package in pair.packages):
        print(f"{pair.name}: stubs for", *stub_libraries.make(site))
    (folder / ".ready").touch()
    return python


def interpreter(version: str) -> str | None:
    """Return the path of a Python of `version`: this one, one on the path, or one of pyenv's."""
    if version == _this_python():
        return sys.executable
    found = shutil.which(f"python{version}")
    pyenv = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    return found or (str(pyenv[-1]) if pyenv else None)


def try_pair(pair: Pair, python: Path, steps: list[str]) -> bool:
    """Run the steps in the environment of `python` and keep what came of them."""
    path = RESULTS / f"{pair.name}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    record: dict[str, Any] = {"name": pair.name, "why": pair.why, "steps": known.get("steps", {})}
    record |= {"python": _version_of_python(python), "versions": _versions(python)}
    if known.get("versions") != record["versions"]:
        record["steps"] = {}
    if pair.runs_ort:
        record["steps"]["build"] = _build(python)
    for step in steps:
        print(f"{pair.name}: {step}", flush=True)
        record["steps"][step] = _run_tests(python, STEPS[step])
        print(f"  {_cell(record['steps'][step])}", flush=True)
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return not any(result["failed"] for result in record["steps"].values())


def _this_python() -> str:
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def _environment() -> dict[str, str]:
    own = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, "COLUMNS": "300"}  # pytest cuts the reasons of failures to the width


def _today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def _build(python: Path) -> dict[str, Any]:
    start = time.monotonic()
    done = subprocess.run(
        [python, "-m", "ort_zero", "build", "--json"], cwd=ROOT, env=_environment(), capture_output=True, text=True
    )
    failed = int(done.returncode != 0)
    first = done.stderr.strip().splitlines()[-1] if failed and done.stderr.strip() else None
    return {"passed": 1 - failed, "failed": failed, "skipped": 0, "seconds": round(time.monotonic() - start),
            "date": _today(), "first": first}  # fmt: skip


def _run_tests(python: Path, tests: tuple[str, ...]) -> dict[str, Any]:
    start = time.monotonic()
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-W", "ignore", *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=STEP_SECONDS
        )
        output = done.stdout
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode() + f"\nFAILED none: more than {STEP_SECONDS} s\n"
    counts = {key: 0 for key in ("passed", "failed", "skipped")}
    for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", (output.splitlines() or [""])[-1]):
        counts["failed" if word.startswith("error") else word] += int(number)
    first = re.search(r"^(?:FAILED|ERROR) (.*)$", output, flags=re.M)
    if not counts["passed"] and not counts["failed"]:
        counts["failed"] = 1  # nothing ran
    return {**counts, "seconds": round(time.monotonic() - start), "date": _today(), "first": first and first[1][:300]}


def _version_of_python(python: Path) -> str:
    return subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]


def _versions(python: Path) -> dict[str, str | None]:
    code = (
        "import json\nfrom ort_zero.compat.versions import installed\n"
        f"print(json.dumps({{name: installed(name) for name in {SHOWN!r}}}))"
    )
    done = subprocess.run(
        [python, "-c", code], cwd=ROOT, env=_environment(), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    text = f"{result['passed']} passed"
    text += f", {result['failed']} **failed**" if result["failed"] else ""
    text += f", {result['skipped']} skipped" if result["skipped"] else ""
    return f"{text}, {result['seconds']} s"


def section(records: list[dict[str, Any]]) -> str:
    """Return the section about versions, of the results `records`."""
    lines = [
        "## Versions",
        "",
        "Each row is an environment of its own, on CPUs. A number is a count of tests of this repository that passed;",
        "the differences from PyTorch that they allow are those of the tests. `not run` is what it says.",
        "",
        "| Python | " + " | ".join(SHOWN) + " | build | " + " | ".join(STEPS) + " | date |",
        "| --- " * (len(SHOWN) + len(STEPS) + 3) + "|",
    ]
    failures = []
    for record in records:
        steps = record["steps"]
        versions = [record["versions"].get(name) or "none" for name in SHOWN]
        build = steps.get("build")
        built = "no" if build is None else f"{build['seconds']} s" if not build["failed"] else "**failed**"
        cells = [record["python"], *versions, built, *(_cell(steps.get(step)) for step in STEPS)]
        lines.append(f"| {' | '.join(cells)} | {max((step['date'] for step in steps.values()), default='')} |")
        failures += [f"- {record['name']}, {name}: `{step['first']}`" for name, step in steps.items() if step["first"]]
    lines += ["", "What each row is for:", "", *(f"- {record['name']}: {record['why']}" for record in records)]
    if failures:
        lines += ["", "The first failure of each step that has one:", "", *failures]
    return "\n".join(lines)


def write_page() -> None:
    """Put the results into the page, in place of the section that is there, else behind its first paragraphs."""
    paths = [RESULTS / f"{pair.name}.json" for pair in PAIRS]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    text = DOCUMENT.read_text()
    made = f"{BEGIN}\n{section(records)}\n{END}"
    if BEGIN in text:
        text = text[: text.index(BEGIN)] + made + text[text.index(END) + len(END) :]
    else:
        text = f"{text.rstrip()}\n\n{made}\n"
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    sys.exit(main())

"""Measures what comparing two runs takes: 2 ranks x 100 steps x 1,000 records, time and memory.

The runs are made up in the structure of a real one: calls in a tree, references, gradients, parameters; the second run
differs by rounding, so that the result is "same", and with ``--fault`` by more from step 50 on. The comparison runs
in a process of its own; memory is its largest resident set.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ort_zero.statistics.collect.writer import StatisticsWriter
from ort_zero.statistics.file_format import DESCRIPTION
from ort_zero.statistics.records import FIRST, SKETCH, Phase
from ort_zero.statistics.rows import COLUMNS, WIDTH

TIME_GOAL = 5.0
"""Seconds."""
MEMORY_GOAL = 300.0
"""MB."""
ELEMENTS = 65536
_CODE = """
import json, resource, sys, time
begin = time.perf_counter()
from ort_zero.statistics.compare.compare_runs import compare
imported = time.perf_counter()
result = compare(sys.argv[1], sys.argv[2])
print(json.dumps(dict(
    seconds=time.perf_counter() - imported, imports=imported - begin, records=result.records,
    megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, verdict=result.verdict.text,
)))
"""


@dataclass
class Structure:
    """Rows of a step, and which of them have statistics."""

    rows: dict[str, list] = field(default_factory=lambda: {name: [] for name in DESCRIPTION})
    orders: int = 0
    calls: int = 0

    def add(self, phase: Phase, order: int, call: int, caller: int, module: str, kind: str, slot: str, source: int):
        """Add a row."""
        values = dict(
            phase=int(phase),
            order=order,
            call=call,
            caller=caller,
            occurrence=1,
            source=source,
            module=module,
            kind=kind,
            slot=slot,
            dtype="float32",
            shape=(64, 1024),
            partitioned=False,
        )
        for name, value in values.items():
            self.rows[name].append(value)

    def value(self, call: int, caller: int, module: str, kind: str, source: int = -1) -> int:
        """Add a row of the forward phase; return the order of the row with its statistics."""
        self.add(Phase.FORWARD, self.orders, call, caller, module, kind, "", source)
        self.orders += 1
        return self.orders - 1 if source < 0 else source

    def module(self, caller: int, name: str, given: int, children: int) -> int:
        """Add a call with some children, each of which takes what the one before returned."""
        call, self.calls = self.calls, self.calls + 1
        value = self.value(call, caller, name, "input", given)
        for child in range(children):
            value = self.module(call, f"{name}.{child}" if name else str(child), value, 0)
        return self.value(call, caller, name, "output", value if children else -1)


def structure(records: int) -> dict[str, list]:
    """Return the rows of a step, about `records` of them."""
    made = Structure()
    blocks, leaves = max(1, round(records / 26)), 5
    names = [f"h.{block}.{leaf}" for block in range(blocks) for leaf in range(leaves)]
    for order, name in enumerate(names):
        made.add(Phase.PARAMETER, order, -1, -1, name, "parameter", "weight", -1)
    root, made.calls = 0, 1
    value = made.value(root, -1, "", "input")
    for block in range(blocks):
        value = made.module(root, f"h.{block}", value, leaves)
    made.value(root, -1, "", "output", value)
    rows = made.rows
    own = [i for i, phase in enumerate(rows["phase"]) if phase == Phase.FORWARD and rows["source"][i] < 0]
    for i in reversed(own):
        made.add(
            Phase.BACKWARD,
            rows["order"][i],
            rows["call"][i],
            rows["caller"][i],
            rows["module"][i],
            rows["kind"][i],
            "",
            -1,
        )
    for order, name in enumerate(names):
        made.add(Phase.PARAMETER_GRADIENT, order, -1, -1, name, "parameter", "weight", -1)
    return rows


def write(folder: Path, rows: dict[str, list], ranks: int, steps: int, seed: int, wrong_from: int) -> None:
    """Write a run whose numbers are random, the same in all runs but for rounding."""
    for rank in range(ranks):
        manifest = dict(run_id=folder.name, backend="torch", zero_stage=0, dtype="float32", model="M",
                        model_digest="d", parameters={})  # fmt: skip
        with StatisticsWriter(folder, rank, ranks, manifest=manifest) as writer:
            for step in range(steps):
                raw = numbers(len(rows["module"]), np.random.default_rng((rank, step)))
                noise = np.random.default_rng((seed, rank, step)).normal(size=(len(raw), SKETCH))
                size = np.where(step >= wrong_from, 1e-2, 1e-7)
                raw[:, -SKETCH:] += size * noise * np.abs(raw[:, -SKETCH:])
                writer.append(step, rows, raw)


def numbers(count: int, rng: np.random.Generator) -> np.ndarray:
    """Return raw statistics of tensors of normal numbers."""
    raw = np.zeros((count, WIDTH))
    deviation = 1.0
    values = dict(elements=ELEMENTS, min=-4 * deviation, max=4 * deviation, mean=0.0, std=deviation, abs_mean=0.8,
                  l2=np.sqrt(ELEMENTS), negative=ELEMENTS // 2, positive=ELEMENTS // 2, zero=0, nan=0,
                  inf=0)  # fmt: skip
    raw[:, : len(COLUMNS)] = [values[name] for name in COLUMNS]
    raw[:, len(COLUMNS) : len(COLUMNS) + FIRST] = rng.normal(size=(count, FIRST))
    raw[:, -SKETCH:] = rng.normal(size=(count, SKETCH)) * np.sqrt(ELEMENTS / SKETCH)
    return raw


def main() -> int:
    """Measure and print; exit 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--fault", action="store_true", help="let the runs diverge half way")
    parser.add_argument("--json", type=Path, help="write the result there")
    args = parser.parse_args()
    rows = structure(args.records)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary, name) for name in ("a", "b")]
        for seed, folder in enumerate(folders):
            wrong_from = args.steps // 2 if args.fault and seed else args.steps
            write(folder, rows, args.ranks, args.steps, seed, wrong_from)
        done = subprocess.run([sys.executable, "-c", _CODE, *map(str, folders)], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 2
    result = {**json.loads(done.stdout), "rows": len(rows["module"]), "ranks": args.ranks, "steps": args.steps}
    print(f"{args.ranks} ranks x {args.steps} steps x {len(rows['module'])} records: {result['verdict']}")
    print(f"  {result['seconds']:.2f} s after {result['imports']:.2f} s of imports (goal {TIME_GOAL} s)")
    print(f"  {result['megabytes']:.0f} MB (goal {MEMORY_GOAL:.0f} MB)")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return int(result["seconds"] + result["imports"] > TIME_GOAL or result["megabytes"] > MEMORY_GOAL)


if __name__ == "__main__":
    sys.exit(main())

"""Tries ort_zero with other versions of what it depends on, one environment at a time; ``make matrix`` runs it.

Each pair of :mod:`pairs` gets an environment of its own. Plain DeepSpeed and the doctor come first, then the tests of
:mod:`steps`. What came of them is stored in ``results/`` after each part, and the
section about versions of ``docs/compatibility.md`` is written from what is stored. A step that was not run is shown as
such.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from environments import ROOT, environment
from page import write_page
from pairs import PAIRS
from row import Row
from steps import STEPS


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
        good &= Row(pair, python).run(args.steps)
        write_page()
        if not args.keep and pair.packages:
            shutil.rmtree(args.envs / pair.name)
    write_page()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

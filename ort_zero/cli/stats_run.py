"""Run ``ort-zero stats run``: start a script twice, as it is and with a change, and compare the two runs."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ort_zero import env
from ort_zero.cli import print_result
from ort_zero.cli.script_options import add_script, positive, script_progress
from ort_zero.cli.stats_texts import as_json, plain, text_of
from ort_zero.errors import ConfigError
from ort_zero.utils import script_process
from ort_zero.utils.atomic_write import write_json

_EPILOG = """Both runs begin with the same seeds, unless the script sets others, and end after the steps. The folder of
--output gets statistics and log of each. Exit status: 0 = the same; 1 = they differ; 2 = a run failed, or cannot be
compared."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What the second run has otherwise than the first."""

    config: dict[str, Any] = field(default_factory=dict)
    """Values in the DeepSpeed config by dotted path."""
    environment: dict[str, str] = field(default_factory=dict)
    autocast: bool = True
    """False: ``torch.autocast`` does nothing."""
    python: str | None = None
    """Interpreter in place of this one."""
    ranks: int | None = None
    """Number of ranks, with the same global batch."""

    def __str__(self) -> str:
        parts = [f"{path}={json.dumps(value)}" for path, value in self.config.items()]
        parts += [f"{name}={value}" for name, value in self.environment.items()]
        parts += ["no autocast"] if not self.autocast else []
        parts += [f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"] if self.ranks else []
        return ", ".join([*parts, *([self.python] if self.python else [])])


_RANKS = re.compile(r"(--(?:nproc[_-]per[_-]node|num_gpus|num_accelerators|num_processes)[= ]+)(\d+)")
"""The option of a launcher with the number of ranks."""
_WITHOUT_SECTION = {"ort_zero.enabled": False}
AGAINST = {
    "torch": Change(config=_WITHOUT_SECTION),
    "zero0": Change(config={"zero_optimization.stage": 0}),
    "fp32": Change(config={"bf16.enabled": False, "fp16.enabled": False}, autocast=False),
    "eager": Change(config=_WITHOUT_SECTION, environment={"TORCHDYNAMO_DISABLE": "1"}),
    "one-rank": Change(ranks=1),
}
"""The changes that ``--against`` offers, by the option's value."""


def add_run(commands: argparse._SubParsersAction) -> argparse.ArgumentParser:
    """Add the command and return its parser."""
    text = "start an unchanged script twice, as it is and with a change, and name where the two runs begin to differ"
    parser = commands.add_parser("run", help=text, description=text, epilog=_EPILOG)
    add_script(parser)
    parser.add_argument(
        "--against", choices=tuple(AGAINST),
        help="torch: without the section; zero0: ZeRO-0; fp32: no half precision of DeepSpeed or autocast; eager: "
        "without the section and torch.compile; one-rank: one rank, with the batch of all ranks",
    )  # fmt: skip
    parser.add_argument(
        "--change", action="append", default=[], type=_assignment, metavar="KEY=VALUE",
        help="another value in the DeepSpeed config, such as zero_optimization.stage=0 (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--env", action="append", default=[], type=_assignment, metavar="NAME=VALUE",
        help="another environment variable (repeatable)",
    )  # fmt: skip
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="another number of ranks, with the same global batch"
    )
    parser.add_argument("--python", metavar="FILE", help="another interpreter, of an environment that has ort_zero")
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="collected steps (default: 5)")
    parser.add_argument(
        "--operators", metavar="MODULE",
        help="start both runs again, up to the step where they begin to differ, and name the first operator of this "
        "module whose results differ; auto: of the module in the verdict",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=positive, default=600, metavar="SECONDS",
        help="end a run whose ranks begin no step for so long, and name where each rank waits (default: 600)",
    )  # fmt: skip
    parser.add_argument("--output", default="stats_run", metavar="DIR", help="new or empty folder (default: stats_run)")
    parser.add_argument("--html", metavar="FILE", help="also write a report to look at, one file that opens offline")
    parser.set_defaults(command="stats run", work=_run)
    return parser


def _assignment(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


def change_of(args: argparse.Namespace) -> Change:
    """Return the change that the options describe.

    Raises:
        ConfigError: there is none.
    """
    base = AGAINST[args.against] if args.against else Change()
    change = Change(
        config={**base.config, **{key: _value(text) for key, text in args.change}},
        environment={**base.environment, **dict(args.env)},
        autocast=base.autocast,
        python=args.python,
        ranks=args.ranks or base.ranks,
    )
    if change == Change():
        raise ConfigError("what should the second run change? give --against, --change, --env, --python or --ranks")
    return change


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _run(args: argparse.Namespace) -> int:
    from ort_zero.statistics.compare.compare_runs import compare
    from ort_zero.statistics.compare.operators import compare_operators, with_operators
    from ort_zero.statistics.compare.report import check_target, write_report

    output, change = Path(args.output), change_of(args)
    runs = {"a": ("as it is", Change()), "b": (f"with {change}", change)}
    launchers = {"a": args.launcher, "b": args.launcher}
    ranks = None
    if change.ranks:
        launchers["b"], before = _with_ranks(args.launcher or "", change.ranks)
        ranks = before, change.ranks
        if args.operators is not None and before != change.ranks:
            raise ConfigError("--operators compares one rank of each run: not with another number of ranks")
    commands = {
        name: script_process.command_line(
            args.script, args.arguments, launchers[name], variant.python or sys.executable
        )
        for name, (_, variant) in runs.items()
    }
    if output.exists() and (not output.is_dir() or os.listdir(output)):
        raise ConfigError(
            f"--output {output} is not empty: delete it if its runs, perhaps of a start that failed, are of no use, or "
            "choose another folder"
        )
    if args.html:
        check_target(args.html)
    output.mkdir(parents=True, exist_ok=True)
    module = None if args.operators == "auto" else args.operators
    operators = None
    with script_progress("running", "run", args) as bar:

        def start(name: str, folder: str, **request: Any) -> None:
            words, variant = runs[name]
            asked = {"steps": args.steps, "timeout": args.timeout, "module": module, "operators": False, **request}
            asked["ranks"] = ranks if variant.ranks else None
            _start(commands[name], args, output / folder, words, variant, asked)
            bar.update()

        for name in runs:
            start(name, name)
        comparison = compare(str(output / "a"), str(output / "b"), progress=not args.json)
        for info in (comparison.a, comparison.b):
            if len(info.steps) < args.steps:
                comparison.notes.append(f"{info.path} has {len(info.steps)} of --steps {args.steps}: the script ended")
        if args.operators is not None and not (comparison.verdict.same and module is None):
            first = comparison.verdict.difference
            module = comparison.verdict.module if module is None else module
            for name in runs:
                steps = first.step + 1 if first is not None else 1
                start(name, f"operators_{name}", steps=steps, module=module, operators=True)
            operators = compare_operators(f"{output}/operators_a", f"{output}/operators_b", first.rank if first else 0)
            comparison = with_operators(comparison, operators)
            write_json(output / "operators.json", plain(operators))
    if args.html:
        write_report(comparison, args.html)
    logs = {name: str(output / f"{name}.log") for name in runs}
    lines = [f"{name} ran {words}: {logs[name]}" for name, (words, _) in runs.items()]
    fields = {"change": str(change), "logs": logs, **as_json(comparison, args.html)}
    fields["operators"] = plain(operators)
    lines = [*(operators.lines() if operators is not None else ()), *lines]
    print_result(args, fields, "\n".join([text_of(comparison, args.html), *lines]))
    return 0 if comparison.verdict.same else 1


def _with_ranks(launcher: str, ranks: int) -> tuple[str, int]:
    """Return a launcher's words with another number of ranks, and the number in the words.

    Raises:
        ConfigError: the words do not say how many ranks there are.
    """
    found = _RANKS.findall(launcher)
    if len(found) != 1 or "--nnodes" in launcher:
        raise ConfigError(
            f"--launcher {launcher!r} does not say how many ranks of one machine there are: give --nproc_per_node, "
            "--num_gpus or --num_processes"
        )
    return _RANKS.sub(rf"\g<1>{ranks}", launcher), int(found[0][1])


def _start(
    command: list[str], args: argparse.Namespace, folder: Path, words: str, change: Change, asked: dict[str, Any]
) -> None:
    """Run the script once, and keep its log, and its statistics or what else is asked for.

    Raises:
        ScriptError: it failed, made no progress, or called no model that trains.
        ConfigError: it cannot do what is asked for.
    """
    from ort_zero.statistics.files import open_run

    log = folder.with_suffix(".log")
    done = script_process.run_with_request(
        command,
        env.STATISTICS,
        {
            "output_dir": str(folder.absolute()), "changes": change.config, "autocast": change.autocast, **asked
        },
        _unless_stuck(f"{args.script}, run {words}", folder.with_suffix(".stacks"), args.timeout),
        environment={"PYTHONHASHSEED": "0", **change.environment},
        log=log,
    )  # fmt: skip
    refused = [report["refused"] for report in done.reports if "refused" in report]
    if refused:
        raise ConfigError(f"{args.script}, run {words}: {refused[0]}")
    if done.status or not folder.is_dir():
        why = f"ended with status {done.status}" if done.status else "called no model whose parameters train"
        raise script_process.ScriptError(f"{args.script}, run {words}, {why}; its output is in {log}", done.tail)
    only_config = change.config.keys() - _WITHOUT_SECTION and change == Change(config=change.config)
    if only_config and not open_run(folder).manifest.get("ds_config"):
        raise ConfigError(f"{args.script} gives no config to DeepSpeed, so {change} changes nothing: use --env")


def _unless_stuck(run: str, stacks: Path, seconds: int) -> Callable[[list[Any]], bool]:
    """Return a function that tells from the ranks' reports whether a run is done, and raises once it is stuck.

    A run is stuck when no rank of this machine has begun a step for so many seconds. A rank that reports nothing, since
    it never called the model, has as much time again.
    """
    stuck_since: list[float] = []

    def is_done(reports: list[Any]) -> bool:
        stuck = [report["stuck"] for report in reports if "stuck" in report]
        if not stuck:
            stuck_since.clear()
            return any(reports)
        stuck_since.append(time.monotonic())
        others = stuck[0]["ranks"] - len(stuck)
        if others > 0 and stuck_since[-1] - stuck_since[0] < seconds:
            return False
        stacks.write_text("\n".join(f"rank {each['rank']}\n{each['stack']}" for each in stuck), encoding="utf-8")
        rest = [f"{others} of {stuck[0]['ranks']} ranks: in a later step, or without a call of the model"]
        raise script_process.ScriptError(
            f"{run}, began no step for {seconds} s and was ended; the stacks of its ranks are in {stacks}",
            [*map(_where, stuck), *(rest if others > 0 else [])],
        )

    return is_done


def _where(position: dict[str, Any]) -> str:
    """Return where a rank that begins no step is, in one line."""
    module = f", in {position['module'] or 'the model'}" if position["module"] is not None else ""
    wait = f"waits in {position['collective']}" if position["collective"] else "takes part in no collective"
    return f"rank {position['rank']}: step {position['step']}{module}: {wait}: {position['line']}"

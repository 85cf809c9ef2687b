"""Trains many small architectures in PyTorch and in ONNX Runtime, and tells which of them agree.

Each architecture has its own process: a crash or an endless export costs only its own line. There the model takes a
few steps in PyTorch, a second copy takes the same steps in ORT, and the losses of every step and the gradients of the
last one are compared. Without ``--only`` and ``--kind`` the result of the compile backend is written to
``docs/compatibility.md``. ``--zero3`` writes the document's second table, from real DeepSpeed engines on two ranks.

    python benchmarks/model_zoo.py                        # all of them, one process after another
    python benchmarks/model_zoo.py --only bert,llama      # these
    python benchmarks/model_zoo.py --zero3                # the sample under ZeRO-3
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import zoo_models
from torch.utils import _pytree

DOCUMENT = Path(__file__).resolve().parent.parent / "docs/compatibility.md"
STEPS = 4
LEARNING_RATE = 1e-2
MOMENTUM = 0.9
TOLERANCE = 2e-4
"""Largest difference of two losses."""
GRADIENT_TOLERANCE = 1e-2
"""Largest difference of a parameter's gradients of the last step over their size; losses alone hide small ones."""
GRADIENT_FLOOR = 1e-5
"""Added to that size, as a part of the size of all gradients: that of a key's bias is zero but for rounding errors."""
EVALUATION_TOLERANCE = 1e-3
"""Largest difference of a result of an evaluation after these steps, in the mean of squares, over its size."""
CAUSE_LENGTH = 160
ZERO3_HEADING = "## ZeRO-3"

Row = dict[str, Any]


# -- one architecture, in its own process -----------------------------------------------------------------------------


def loss_of(output: Any) -> torch.Tensor:
    """Return the model's loss, or the mean of squares of its first tensor of floating-point numbers."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    # a ModelOutput is a dict, but pytree does not know every class of them
    leaves = _pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
    return next(x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()).square().mean()


def train(
    call: Callable[..., Any], model: torch.nn.Module, batches: list[zoo_models.Batch]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train `model` through `call`; return the losses and the gradients of the last step."""
    torch.manual_seed(0)
    # Adam would divide the noise of a gradient that is zero by its own size
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses = []
    for step in range(STEPS):
        loss = loss_of(call(**batches[step % len(batches)]))
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients


def evaluate(call: Callable[..., Any], model: torch.nn.Module, batch: zoo_models.Batch) -> list[torch.Tensor]:
    """Return the tensors of what the model returns in evaluation, its caches of keys and values among them."""
    torch.manual_seed(0)
    model.eval()
    with torch.no_grad():
        return list(tensors_in(call(**batch)))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in containers, and in the attributes of objects such as caches of keys and values."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__"):
        yield from tensors_in({name: item for name, item in vars(value).items() if not name.endswith("config")})


def shorten(message: str) -> str:
    """Return what matters of `message` as one line of limited length, the same on every machine."""
    line = " ".join(message.split())
    line = re.sub(r"^(.*: )?[\w.]*ExportError: \w+ cannot run in ONNX Runtime: ", "", line)
    line = re.sub(r"\.* Run the model in PyTorch with .*$", "", line)
    line = re.sub(r"\S*/onnxruntime_src/\S+ onnxruntime::.*?\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)
    line = re.sub(r"This is an invalid model\. In Node, .* , Error ", "", line)
    line = re.sub(r"Non-zero status code returned while running (\w+) node\..*? Status Message: ", r"\1: ", line)
    line = re.sub(r"\S*/onnxruntime_src/\S+ .*? was false\. ", "", line)
    line = re.sub(r"\S*/([\w.+-]+\.(?:py|cc|h):\d+)", r"\1", line)
    line = re.sub(r"\b0x[0-9a-f]+", "0x...", line)
    return line if len(line) <= CAUSE_LENGTH else line[: CAUSE_LENGTH - 3] + "..."


def failure(where: str, error: BaseException) -> Row:
    """Return the part of a row that tells of an exception."""
    text = f"{type(error).__name__}: {error}"
    stack = "".join(traceback.format_exception(error))
    return {"works": False, "result": shorten(where + text), "detail": text[:4000], "stack": stack[-6000:]}


def differing_losses(reference: list[float], losses: list[float]) -> str | None:
    """Return what is wrong with `losses`, None if nothing is."""
    for step, (expected, loss) in enumerate(zip(reference, losses, strict=True), 1):
        if not math.isfinite(loss):
            return f"loss is {loss} at step {step}"
        if abs(expected - loss) > TOLERANCE:
            return f"losses differ by {abs(expected - loss):.0e} at step {step}"
    return None


def differing_gradients(
    reference: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> list[tuple[str, float]]:
    """Return each parameter's difference of gradients over their size, the largest first; NaN counts as infinite."""
    floor = GRADIENT_FLOOR * math.sqrt(sum(x.square().sum().item() for x in reference.values()))
    differences = {
        name: ((expected - gradients[name]).norm() / (expected.norm() + floor).clamp(min=1e-12)).item()
        for name, expected in reference.items()
        if name in gradients
    }
    known = ((name, math.inf if math.isnan(value) else value) for name, value in differences.items())
    return sorted(known, key=lambda item: -item[1])


def wrong_runs(status: Row, steps: int) -> str | None:
    """Return what in the status of ort_zero shows that ORT did not run all steps, None if it did."""
    if status["fallbacks"]:
        return shorten(f"not compiled: {status['failures']}")
    if not ran_in_ort(status):
        return None  # nothing for ONNX Runtime; the row says so
    runs = status["graph_runs"]
    return None if min(runs.get("forward", 0), runs.get("backward", 0)) >= steps else f"graphs ran {runs}"


def ran_in_ort(status: Row) -> bool:
    """Return True if ONNX Runtime ran a part of the model."""
    return bool(status["compiled"]["flop_share"]) if status["engine"] == "compile" else bool(status["units"])


def wrong_evaluation(reference: list[torch.Tensor], results: list[torch.Tensor]) -> str | None:
    """Return which results of an evaluation differ too much, None if none does."""
    if [tensor.shape for tensor in reference] != [tensor.shape for tensor in results]:
        return f"evaluation returns {len(results)} tensors, or other shapes, instead of {len(reference)}"
    for i, (expected, tensor) in enumerate(zip(reference, results, strict=True)):
        # the weights differ by what training has left them apart
        bound = EVALUATION_TOLERANCE * (expected.double().square().mean().sqrt().item() + 1e-3)
        difference = (expected.double() - tensor.double()).square().mean().sqrt().item()
        if expected.numel() and not difference <= bound:
            return f"result {i} of an evaluation differs by {difference:.0e} in the mean"
    return None


def missing_gradients(reference: Iterable[str], gradients: Iterable[str]) -> str | None:
    """Return which parameters have a gradient on one side only."""
    only = {"in PyTorch": sorted(set(reference) - set(gradients)), "in ORT": sorted(set(gradients) - set(reference))}
    parts = [f"{len(names)} gradients only {side} ({', '.join(names[:2])})" for side, names in only.items() if names]
    return shorten("; ".join(parts)) or None


def wrong_gradients(differences: list[tuple[str, float]]) -> str | None:
    """Return which gradients differ too much, None if none does."""
    wrong = [name for name, value in differences if value > GRADIENT_TOLERANCE]
    if not wrong:
        return None
    return shorten(f"gradients of {len(wrong)} parameters differ, most that of {wrong[0]}: {differences[0][1]:.0e}")


def run(name: str, side: str, engine: str) -> Row:
    """Train the architecture `name` in PyTorch and, if `side` is ``"both"``, in ORT; return its row."""
    spec = zoo_models.by_name(name)
    row: Row = {"name": name, "kind": spec.kind}
    try:
        model, batches = spec.build()
        losses, gradients = train(model, model, batches)
        expected = evaluate(model, model, batches[0])
        row["parameters"] = sum(p.numel() for p in model.parameters())
        row["losses"] = {"torch": losses}
        if not all(map(math.isfinite, losses)):
            raise ArithmeticError(f"the losses are {losses}")
    except Exception as error:
        return {**row, **failure("PyTorch: ", error)}
    if side == "torch":
        return {**row, "works": True, "result": "works"}
    try:
        row.update(compare(spec, engine, losses, gradients, expected))
    except Exception as error:
        row.update(failure("", error))
    return row


def compare(
    spec: zoo_models.Spec,
    engine: str,
    losses: list[float],
    gradients: dict[str, torch.Tensor],
    expected: list[torch.Tensor],
) -> Row:
    """Train a new copy of the model in ORT, evaluate it, and compare with what PyTorch gave."""
    import ort_zero

    model, batches = spec.build()
    options = {"compile": {"place": "ort"}} if engine == "compile" else {}
    wrapped = ort_zero.wrap(model, backend=engine, log_level="ERROR", **options)
    ours, our_gradients = train(wrapped, model, batches)
    status = ort_zero.status()["models"][-1]
    evaluated = evaluate(wrapped, model, batches[0])
    apart = differing_gradients(gradients, our_gradients)
    cause = (
        wrong_runs(status, STEPS)
        or differing_losses(losses, ours)
        # a weight that data left out has no gradient in PyTorch and one of zeros here, as under ZeRO
        or missing_gradients(gradients, [name for name, g in our_gradients.items() if name in gradients or g.any()])
        or wrong_gradients(apart)
        or wrong_evaluation(expected, evaluated)
    )
    row: Row = {
        "works": cause is None,
        "result": cause or worked(status),
        "losses": {"torch": losses, "onnxruntime": ours},
        "gradient_differences": apart[:5],
        "in_torch": status.get("in_torch") or {},
    }
    return row | (compiled_figures(status) if engine == "compile" else {})


def worked(status: Row) -> str:
    """Return the result of a model that is as in PyTorch."""
    return "works" if ran_in_ort(status) else "works, all in PyTorch"


def compiled_figures(status: Row) -> Row:
    """Return the part of a row with the figures of a compiled model."""
    from ort_zero.compat.torch_compile import graph_breaks

    compiled = status["compiled"]
    return {
        "units": len(status["unit_classes"]),
        "graphs": compiled["dynamo_graphs"],
        "breaks": [f"{reason} ({where})" for reason, where in graph_breaks()],
        "share": compiled["flop_share"],
        "in_torch": {name: f"{count} times" for name, count in compiled["in_torch"].items()},
    }


def be_quiet() -> None:
    """Silence what the libraries say while they trace and export."""
    os.environ.setdefault("ORT_ZERO_LOG_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()


def child(name: str, side: str, engine: str) -> int:
    """Print the row of `name` as one line of JSON, and nothing else, on stdout."""
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints, in Python or not
    be_quiet()
    print(json.dumps(run(name, side, engine)), file=result, flush=True)
    return 0


def spawn(spec: zoo_models.Spec, side: str, engine: str, timeout: float) -> Row:
    """Return the row of `spec` from a process of its own."""
    command = [sys.executable, os.path.abspath(__file__), "--one", spec.name, "--side", side, "--engine", engine]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    row: Row = {"name": spec.name, "kind": spec.kind, "works": False}
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return {**row, "result": "timeout"}
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    try:
        return json.loads(output)
    except ValueError:
        code = process.returncode
        result = f"crashed with signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with {code}"
        return {**row, "result": result, "detail": errors[-2000:]}


# -- ZeRO-3 on two ranks ----------------------------------------------------------------------------------------------


def zero3_side(name: str, section: Row | None, **zero: Any) -> tuple[list[float], Row | None]:
    """Train on each rank under ZeRO-3; return the losses, and the status of ort_zero if `section` is given.

    Args:
        name: name of the architecture.
        section: the section "ort_zero" of the configuration.
        zero: more keys of "zero_optimization".
    """
    import deepspeed

    import ort_zero

    model, batches = zoo_models.by_name(name).build()
    ds_config: Row = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE, "momentum": MOMENTUM}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    if section is not None:
        ds_config["ort_zero"] = section
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine(**batches[(step + torch.distributed.get_rank()) % len(batches)]))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    status = None if section is None else ort_zero.status()["models"][-1]
    engine.destroy()
    return losses, status


def zero3(name: str, engine: str) -> Row:
    """Run on each rank: return the row of `name` under ZeRO-3."""
    import ort_zero

    be_quiet()
    ort_zero.enable()
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    row: Row = {"name": name, "kind": zoo_models.by_name(name).kind}
    try:
        losses, _ = zero3_side(name, None)
    except Exception as error:
        raise RuntimeError(f"without the section: {type(error).__name__}: {error}") from error
    section: Row = {"backend": engine, "log_level": "ERROR"}
    if engine == "compile":
        section["compile"] = {"place": "ort"}
    ours, status = zero3_side(name, section)
    cause = wrong_runs(status, STEPS) or differing_losses(losses, ours)
    again, other = zero3_side(name, section, stage3_max_reuse_distance=0)
    other_cause = wrong_runs(other, STEPS) or differing_losses(losses, again)
    cause = cause or (other_cause and f"with stage3_max_reuse_distance 0: {other_cause}")
    return {
        **row,
        "works": cause is None,
        "result": cause or worked(status),
        "losses": {"torch": losses, "onnxruntime": ours},
        "in_torch": status.get("in_torch") or {},
        **(compiled_figures(status) if engine == "compile" else {}),
    }


def spawn_zero3(spec: zoo_models.Spec, engine: str, timeout: float) -> Row:
    """Return the row of `spec` under ZeRO-3, that of a rank where it does not work if there is one."""
    from rank_launcher import run_on_ranks

    try:
        rows = run_on_ranks(zero3, 2, spec.name, engine, timeout=timeout)
    except RuntimeError as error:
        return {"name": spec.name, "kind": spec.kind, "works": False, **rank_failure(str(error))}
    return min(rows, key=lambda row: row["works"])


def rank_failure(report: str) -> Row:
    """Return the part of a row that tells of a failed rank: the last line of its traceback."""
    head, _, output = report.partition("--- output of rank")
    lines = head.strip().splitlines()
    # a message of several lines ends the traceback: it starts where the indented frames end
    start = max((n for n, line in enumerate(lines) if line.startswith("  ")), default=len(lines) - 2) + 1
    cause = "timeout" if "did not finish within" in lines[0] else " ".join(lines[start:])
    return {"result": shorten(cause), "detail": f"{head[-3000:]}\n{output[-1000:]}"}


# -- the document -----------------------------------------------------------------------------------------------------


def kept_in_torch(row: Row) -> str:
    """Return what of the graph runs in PyTorch."""
    kept = row.get("in_torch") or {}
    return "; ".join(f"{place}: {shorten(reason)}" for place, reason in sorted(kept.items()))


def cell(text: Any) -> str:
    """Return `text` for a cell of a table."""
    return " ".join(str("" if text is None else text).split()).replace("|", "\\|").replace("<", "&lt;")


def table(head: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """Return the lines of a table."""
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell(value) for value in line) + " |" for line in lines]


def versions() -> str:
    """Return the versions that the results hold for."""
    packages = ("torch", "transformers", "onnxruntime", "deepspeed")
    found = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    return ", ".join([f"Python {'.'.join(platform.python_version_tuple()[:2])}", *found])


def zoo_section(rows: list[Row]) -> str:
    """Return the document up to the part about ZeRO-3."""
    lines = [
        "# Compatibility",
        "",
        "Search this page for your model, your program, or your versions. Generated parts say by which command.",
        "",
        "## Architectures",
        "",
        f"Written by `python benchmarks/model_zoo.py`. {versions()}; CPU.",
        "",
        f"Each small model with random weights takes {STEPS} training steps in PyTorch and in ONNX Runtime. A model",
        f"works if every unit was compiled and ran, the losses of all steps differ by {TOLERANCE:g} at most, the same",
        f"parameters have gradients within {GRADIENT_TOLERANCE:.0%} of their size, and an evaluation differs by"
        f" {EVALUATION_TOLERANCE:.1%} at most.",
        'The figure is the share of the floating-point operations in ONNX Runtime with `"place": "ort"`; PyTorch runs',
        "torch's RNNs. `--only NAME` checks one again.",
        "",
        *works_table(rows),
    ]
    return "\n".join(lines) + "\n"


def works_table(rows: list[Row]) -> list[str]:
    """Return the lines of a table with one row for each kind of models, and one for each model that does not work."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        names = [f"{row['name']} {100 * row['share']:.0f} %" if row.get("share") else row["name"] for row in of_kind]
        lines.append((kind, f"{sum(row['works'] for row in of_kind)} of {len(of_kind)}", ", ".join(names)))
    lines.append(("all", f"{sum(row['works'] for row in rows)} of {len(rows)}", ""))
    lines += [(row["name"], "fails", row["result"]) for row in rows if not row["works"]]
    return table(("kind", "work", "architectures, operations in ONNX Runtime"), lines)


def zero3_section(rows: list[Row]) -> str:
    """Return the part of the document about ZeRO-3."""
    works, failed = [row["name"] for row in rows if row["works"]], [row for row in rows if not row["works"]]
    lines = [
        ZERO3_HEADING,
        "",
        f"Written by `python benchmarks/model_zoo.py --zero3`. {versions()}; CPU.",
        "",
        "A sample on two ranks with and without the section, each with DeepSpeed's defaults and with",
        "`stage3_max_reuse_distance` 0. A model works if ONNX Runtime ran every forward and backward, and the losses",
        f"of all {STEPS} steps differ by {TOLERANCE:g} at most. {len(works)} of {len(rows)} work: {', '.join(works)}.",
        *(f"- {row['name']}: {row['result']}" for row in failed),
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, rows: list[Row], *, is_zero3: bool) -> None:
    """Write one part of the document and keep the other one."""
    old = path.read_text() if path.exists() else ""
    old, mark, versions = old.partition("<!-- versions")  # written by tests/versions/matrix.py
    zoo, heading, rest = old.partition(ZERO3_HEADING)
    if is_zero3:
        rest = zero3_section(rows)
    else:
        zoo, rest = zoo_section(rows), heading + rest
    path.write_text("\n".join(part.rstrip() + "\n" for part in (zoo, rest, mark + versions) if part.strip()))


# -- command line -----------------------------------------------------------------------------------------------------


def chosen(args: argparse.Namespace) -> list[zoo_models.Spec]:
    """Return the specs that the command line asks for."""
    specs = [zoo_models.by_name(name) for name in zoo_models.ZERO3_SAMPLE] if args.zero3 else list(zoo_models.SPECS)
    if args.only:
        names = args.only.split(",")
        unknown = set(names) - {spec.name for spec in zoo_models.SPECS}
        if unknown:
            raise SystemExit(f"no such architecture: {', '.join(sorted(unknown))}")
        specs = [spec for spec in zoo_models.SPECS if spec.name in names]
    if args.kind:
        kinds = dict.fromkeys(spec.kind for spec in zoo_models.SPECS)
        if args.kind not in kinds:
            raise SystemExit(f"no such kind: {args.kind}; there are {', '.join(kinds)}")
        specs = [spec for spec in specs if spec.kind == args.kind]
    return specs


def results(specs: list[zoo_models.Spec], args: argparse.Namespace) -> Iterator[Row]:
    """Yield the row of each spec as it comes."""
    from tqdm import tqdm

    with tqdm(specs, file=sys.stderr, disable=None, unit="model", dynamic_ncols=True) as bar:
        for spec in bar:
            bar.set_postfix_str(spec.name)
            row = spawn_one(spec, args)
            bar.write(json.dumps(row) if args.json else describe(row), file=sys.stdout)
            sys.stdout.flush()
            yield row


def spawn_one(spec: zoo_models.Spec, args: argparse.Namespace) -> Row:
    """Return the row of `spec`, alone or under ZeRO-3 as the command line asks."""
    if args.zero3:
        return spawn_zero3(spec, args.engine, args.timeout)
    return spawn(spec, args.side, args.engine, args.timeout)


def describe(row: Row) -> str:
    """Return the row as a line for a terminal."""
    extra = [f"{100 * row['share']:.0f} % in ONNX Runtime"] if row.get("share") else []
    extra += [f"{len(row['breaks'])} breaks"] if row.get("breaks") else []
    if kept_in_torch(row):
        extra.append(f"in PyTorch: {kept_in_torch(row)}")
    return f"{row['name']:<36} {row['result']}" + (f"  ({', '.join(extra)})" if extra else "")


def main() -> int:
    """Run what the command line asks for; return 1 if something does not work that should."""
    parser = argparse.ArgumentParser(description="Trains many small architectures in PyTorch and in ONNX Runtime.")
    parser.add_argument("--only", metavar="NAME[,NAME...]", help="these architectures")
    parser.add_argument("--kind", help="the architectures of this kind")
    parser.add_argument("--side", choices=("torch", "both"), default="both", help="torch: only the reference")
    parser.add_argument("--engine", choices=("compile", "ortmodule"), default="compile")
    parser.add_argument("--zero3", action="store_true", help="run the sample under ZeRO-3 on two ranks instead")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one architecture (default: 240)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON for each architecture")
    parser.add_argument(
        "--output", type=Path, help="document to write (default: docs/compatibility.md, after a run of all only)"
    )
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return child(args.one, args.side, args.engine)
    rows = list(results(chosen(args), args))
    all_ran = not args.only and not args.kind and args.side == "both"
    output = args.output or (DOCUMENT if all_ran and args.engine == "compile" else None)
    if output is not None:
        write(output, rows, is_zero3=args.zero3)
    if not args.json:
        print(f"{sum(row['works'] for row in rows)} of {len(rows)} work")
    return int(not all(row["works"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

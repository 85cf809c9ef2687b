"""Runs other people's programs twice on 2 ranks, in PyTorch and in ONNX Runtime, and compares what they return.

A program is a function at the top level of a test's file. It gets a :class:`Run` and returns a :class:`Result`; its
packages are imported inside of it, so that the file can be collected where they are not installed::

    PACKAGES = ("accelerate",)
    pytestmark = pytest.mark.clients

    def nlp_example(run: Run) -> Result:
        "Sentence pairs, as in accelerate's nlp_example."
        ...
        return Result(losses, alive=model, values={"accuracy": accuracy})

    test_programs = programs(nlp_example, launcher="accelerate")

The first line of a program's documentation names it in docs/compatibility.md.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_processes.ranks import run_on_ranks

TOLERANCE = 2e-4
"""How far a loss, or another value that a program returns, may be from PyTorch's."""
LAUNCHERS = ("torchrun", "accelerate")
SECTION: dict[str, Any] = {"enabled": True, "backend": "compile", "compile": {"place": "ort"}, "log_level": "WARNING"}
"""All segments run in ONNX Runtime: what is compared here is not the time."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a program is given; the same on all ranks."""

    folder: Path
    """Empty at the start, this run's own; the ranks share it."""
    config: dict[str, Any]
    """A DeepSpeed config with ``"auto"`` where Accelerate and the Trainer fill in, without an optimizer."""
    config_path: str
    """The file that holds `config`."""
    stage: int
    """ZeRO stage; 0 for programs without DeepSpeed."""
    backend: str
    """``"torch"`` or ``"ort"``; programs do not look at it, except where they do without DeepSpeed."""

    def deepspeed_config(self, batch: int, *, accumulation: int = 1, **more: Any) -> dict[str, Any]:
        """Return `config` for a program that calls ``deepspeed.initialize`` itself, with `batch` rows for each rank."""
        plain = {name: value for name, value in self.config.items() if value != "auto"}
        sizes = {"train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": accumulation}
        return {**plain, **sizes, **more}


@dataclasses.dataclass
class Result:
    """What a program returns."""

    losses: Sequence[float]
    """The loss of each training step on this rank."""
    alive: Any
    """Whatever holds the engines: they are looked at when the program has returned."""
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """More that must be as in PyTorch: numbers and nests of them within the tolerance, all else equal."""


class Client:
    """What the fixture ``client`` is: runs programs, and holds the row of the test for docs/compatibility.md."""

    def __init__(self, packages: Sequence[str], folder: Path):
        self.row: dict[str, Any] = {}
        """The row of the test in docs/compatibility.md."""
        self._packages = packages
        self._folder = folder

    def compare(
        self,
        program: Callable[[Run], Result],
        stage: int,
        *,
        launcher: str = "torchrun",
        arguments: Sequence[Any] = (),
        ranks: int = 2,
        differ: Callable[[dict[str, Any], dict[str, Any]], list[str]] | None = None,
        may_stay_in_torch: bool = False,
        timeout: float = 500,
    ) -> list[dict[str, dict[str, Any]]]:
        """Run `program` in PyTorch, then in ONNX Runtime, both on the same ranks.

        Args:
            program: see above.
            stage: ZeRO stage.
            launcher: whose environment variables are set.
            arguments: what the program is given behind the :class:`Run`.
            ranks: number of ranks.
            differ: returns what is wrong with the second of two programs' values; :func:`different` if left out.
            may_stay_in_torch: whether PyTorch may run all of the model.
            timeout: seconds for both runs.

        Returns ``"losses"``, ``"values"`` and ``"status"`` under ``"torch"`` and ``"ort"`` for each rank.
        """
        assert launcher in LAUNCHERS, launcher
        source = sys.modules[program.__module__].__file__
        reports = run_on_ranks(
            compare_on_rank, ranks, source, program.__name__, stage, launcher, tuple(arguments), str(self._folder),
            timeout=timeout, imports=modules_of(self._packages),
        )  # fmt: skip
        self._check(reports, differ or different, may_stay_in_torch)
        return reports

    def _check(self, ranks: list[dict[str, Any]], differ: Callable[..., list[str]], may_stay_in_torch: bool) -> None:
        graphs, share, in_torch, apart = 0, 0.0, [], 0.0
        for rank in ranks:
            theirs, ours = rank["torch"], rank["ort"]
            assert len(theirs["losses"]) >= 4 and all(map(math.isfinite, theirs["losses"])), theirs["losses"]
            assert len(set(theirs["losses"])) > 1, "the program does not train"
            assert theirs["status"]["models"] == []
            models = ours["status"]["models"]
            assert models, "no model was given to ONNX Runtime"
            backends = {model["backend"] for model in models}
            assert backends == {"onnxruntime"} or may_stay_in_torch and backends == {"not called yet"}, models
            assert not any(model["fallbacks"] for model in models), [model["failures"] for model in models]
            graphs = sum(model["compiled"]["dynamo_graphs"] for model in models)
            share = min(model["compiled"]["flop_share"] or 0.0 for model in models)
            for direction in ("forward", "backward"):
                assert may_stay_in_torch or sum(model["graph_runs"].get(direction, 0) for model in models) > 0
            in_torch = sorted({name for model in models for name in model["in_torch"]})
            apart = max([apart, *map(distance, theirs["losses"], ours["losses"])])
            assert len(theirs["losses"]) == len(ours["losses"])
        self.row |= {"graphs": graphs, "share": round(100 * share), "in_torch": in_torch, "difference": apart}
        losses = [(rank["torch"]["losses"], rank["ort"]["losses"]) for rank in ranks]
        assert apart <= TOLERANCE, f"losses are {apart:.2g} apart: {losses}"
        for rank in ranks:
            differences = differ(rank["torch"]["values"], rank["ort"]["values"])
            assert not differences, differences


def programs(
    *chosen: Callable[[Run], Result], stages: Sequence[int] = (2, 3), launcher: str = "torchrun", ranks: int = 2
) -> Any:
    """Return a test of each program at each ZeRO stage; 0 is without DeepSpeed."""
    cases = [
        pytest.param(program, stage, id=f"{program.__name__}-{f'zero{stage}' if stage else 'no zero'}")
        for program in chosen
        for stage in stages
    ]

    @pytest.mark.parametrize("program, stage", cases)
    def test(client: Client, program: Callable[[Run], Result], stage: int) -> None:
        client.row["program"] = (program.__doc__ or program.__name__).strip().split("\n")[0]
        client.compare(program, stage, launcher=launcher, ranks=ranks)

    return test


def wrapped(run: Run, model: Any) -> Any:
    """Return the model as the users of ``ort_zero.wrap`` have it; unchanged in PyTorch."""
    if run.backend == "torch":
        return model
    import ort_zero

    return ort_zero.wrap(model, **{key: value for key, value in SECTION.items() if key != "enabled"})


def modules_of(packages: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that the distributions `packages` are imported as, and first what some of them need."""
    return "torchvision_operators", *(
        {"scikit-learn": "sklearn"}.get(name, name.replace("-", "_")) for name in packages
    )


def distance(one: float, other: float) -> float:
    """Return the distance of two numbers, relative to the larger one above 1; infinite where one is not finite."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if one == other else math.inf
    return abs(one - other) / max(1.0, abs(one), abs(other))


def different(one: Any, other: Any, path: str = "values") -> list[str]:
    """Return where two nests of dicts, sequences, tensors and plain values are not the same within the tolerance."""
    if hasattr(one, "tolist") and hasattr(other, "tolist"):
        one, other = one.tolist(), other.tolist()
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{path}: keys {sorted(one)} and {sorted(other)}"]
        return [line for key in one for line in different(one[key], other[key], f"{path}[{key!r}]")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        return [line for i, pair in enumerate(zip(one, other)) for line in different(*pair, f"{path}[{i}]")]
    if isinstance(one, float) and isinstance(other, float):
        return [] if distance(one, other) <= TOLERANCE else [f"{path}: {one} and {other}"]
    return [] if one == other else [f"{path}: {one!r} and {other!r}"]


# -- what each rank runs -----------------------------------------------------------------------------------------------


def compare_on_rank(
    source: str, name: str, stage: int, launcher: str, arguments: tuple[Any, ...], folder: str
) -> dict[str, dict[str, Any]]:
    """Run the function `name` of the file `source` without and with the section; all ranks call it."""
    importlib.import_module("torchvision_operators")
    from rank_processes._worker import load

    program = load(None, source, name)
    report = {}
    for backend in ("torch", "ort"):
        run = prepare(Path(folder) / backend, backend, stage, launcher)
        report[backend] = run_once(program, run, arguments)
        gc.collect()
        forget()
    return report


def run_once(program: Callable[..., Result], run: Run, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Run a program with equal seeds; return its losses and values and the status of ort_zero as plain values."""
    import numpy
    import torch

    import ort_zero

    # torch announces in each collective of DeepSpeed that it will get another name
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    result = program(run, *arguments)
    status = ort_zero.status()
    return {"losses": [float(loss) for loss in result.losses], "values": dict(result.values), "status": status}


def prepare(folder: Path, backend: str, stage: int, launcher: str) -> Run:
    """Write the config of a run and set the environment as the launcher does."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    if stage == 3:
        config["zero_optimization"] |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if backend == "ort":
        config["ort_zero"] = SECTION
    path = folder / f"ds_{os.environ['RANK']}.json"
    path.write_text(json.dumps(config))
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    if launcher == "accelerate":
        os.environ |= {
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
        }
    return Run(folder, config, str(path), stage, backend)


def begin_trainer() -> None:
    """Reset Accelerate's state to that of a new process, which knows of all ranks; a Trainer's arguments then take it.

    Without an accelerator it would take itself for the only rank, unless it is given the backend's name.
    """
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    del os.environ["ACCELERATE_USE_DEEPSPEED"]


def forget() -> None:
    """Reset what Accelerate and transformers keep for a whole process, as a new process would."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    if "transformers.integrations.deepspeed" in sys.modules:
        sys.modules["transformers.integrations.deepspeed"].unset_hf_deepspeed_config()

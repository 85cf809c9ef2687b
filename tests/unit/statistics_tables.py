"""Runs of real modules, collected as in a training and kept in memory, and tables of made-up rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

from ort_zero.hooks import GlobalSubscriberManager, StatisticsSubscriber
from ort_zero.statistics.collect import subscriber as subscriber_module
from ort_zero.statistics.collect.tensor_statistics import measure_into, sampled
from ort_zero.statistics.collect.writer import StatisticsWriter
from ort_zero.statistics.files import DESCRIPTION, open_run
from ort_zero.statistics.records import RunInfo, Table
from ort_zero.statistics.rows import COLUMNS, COUNTS, FIRST_COLUMNS, SKETCH_COLUMNS, WIDTH


def measure(values: np.ndarray, offset: int = 0) -> dict:
    """Return the columns that one tensor's values become, or a part's that begins at `offset`."""
    row = np.empty(WIDTH)
    measure_into(row, torch.from_numpy(np.ascontiguousarray(values, np.float64)), offset=offset)
    return {**dict(zip(COLUMNS, row)), "first": row[FIRST_COLUMNS], "sketch": row[SKETCH_COLUMNS]}


def table_of(step: int, rows: list[dict]) -> Table:
    """Return the table of rows that are dicts."""
    columns: dict = {name: [row[name] for row in rows] for name in rows[0]}
    for name in ("order", "call", "caller", "occurrence", "source"):
        columns[name] = np.array(columns[name], dtype=np.int32)
    for name in COLUMNS:
        columns[name] = np.array(columns[name], dtype=np.int64 if name in COUNTS else np.float64)
    columns["phase"] = np.array(columns["phase"], dtype=np.uint8)
    columns["partitioned"] = np.array(columns["partitioned"], dtype=bool)
    columns["first"], columns["sketch"] = np.array(columns["first"]), np.array(columns["sketch"])
    return Table(step=step, **columns)


@dataclass
class Run:
    """What ``open_run`` returns."""

    name: str
    steps: dict[int, dict[int, Table]]
    """By rank, then step."""
    model_digest: str = "digest"
    notes: list[str] = field(default_factory=list)
    dtype: str = "float32"
    backend: str = "torch"
    world_size: int = 0
    parameters: dict = field(default_factory=dict)
    manifest: dict = field(default_factory=dict)

    @property
    def info(self) -> RunInfo:
        return RunInfo(
            path=self.name, run_id=self.name, backend=self.backend, world_size=self.world_size or len(self.steps),
            zero_stage=0, dtype=self.dtype, model="Model", steps=self.steps_of(min(self.steps)),
        )  # fmt: skip

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self.steps))

    def steps_of(self, rank: int) -> tuple[int, ...]:
        return tuple(sorted(self.steps[rank]))

    def tables(self, rank: int) -> Iterator[Table]:
        return (self.steps[rank][step] for step in self.steps_of(rank))


class Collected:
    """Statistics of one process that stands for several ranks, each with a replica of the model."""

    def __init__(self, replicas: list[nn.Module], parameters: str = "full"):
        self.folder, self.ranks = tempfile.mkdtemp(), len(replicas)
        self.sessions = []
        for rank, model in enumerate(replicas):
            with self.as_rank(rank):
                subscriber = StatisticsSubscriber(self.folder, parameters=parameters)
                self.sessions.append(GlobalSubscriberManager.subscribe(model, [subscriber]))

    def as_rank(self, rank: int):
        """Return a context in which this process is one of the ranks."""
        return mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(self.ranks))

    def run(self, name: str) -> Run:
        """End the collection, and return what was written."""
        for session in self.sessions:
            session.remove()
        written = open_run(self.folder)
        steps = {rank: {table.step: table for table in written.tables(rank)} for rank in written.ranks}
        shutil.rmtree(self.folder)
        return Run(name, steps)


class Precise(torch.overrides.TorchFunctionMode):
    """Computes most operators in float64 and rounds once: what another backend's roundings look like."""

    OPERATORS = {
        "linear", "matmul", "__matmul__", "addmm", "bmm", "softmax", "layer_norm", "gelu", "relu", "tanh", "conv2d",
        "batch_norm", "cross_entropy", "scaled_dot_product_attention", "adaptive_avg_pool2d", "pow", "mean",
    }  # fmt: skip

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        low = [value.dtype for value in [*args, *kwargs.values()] if is_low(value)]
        if getattr(func, "__name__", "") not in self.OPERATORS or not low:
            return func(*args, **kwargs)
        raised = func(*map(raise_one, args), **{name: raise_one(value) for name, value in kwargs.items()})
        return raised.to(low[0])


def is_low(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16)


def raise_one(value):
    return value.double() if is_low(value) else value


def train(
    make, batch, *, steps: int = 1, ranks: int = 1, precise: bool = False, fault=None, optimizer=None, before=None,
    name: str = "run", parameters: bool = True, sample: int = 0,
) -> Run:  # fmt: skip
    """Return what `ranks` data-parallel ranks collect; `precise` is what tells two clean runs apart.

    Args:
        make: returns the model.
        batch: returns the arguments of a step and a rank.
        steps: how many.
        ranks: gradients are averaged over them.
        precise: run as another backend would.
        fault: takes the model and changes it.
        optimizer: takes the parameters.
        before: takes the model and the step that begins.
        name: of the run.
        parameters: collect them and their gradients.
        sample: at most so many elements of each; 0: all.
    """
    models = [make() for _ in range(ranks)]
    for model in models:
        if fault:
            fault(model)
    steppers = [(optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-3)))(model.parameters()) for model in models]
    how = "off" if not parameters else "sample" if sample else "full"
    of_sample = mock.patch.object(subscriber_module, "sampled", functools.partial(sampled, limit=sample or 4096))
    with of_sample:
        collected = Collected(models, how)
        for step in range(steps):
            for rank, (model, stepper) in enumerate(zip(models, steppers)):
                stepper.zero_grad()
                if before:
                    before(model, step)
                with collected.as_rank(rank), Precise() if precise else contextlib.nullcontext():
                    result = model(**batch(step, rank))
                    (result if isinstance(result, torch.Tensor) else result["loss"]).backward()
            for replicas in zip(*(model.parameters() for model in models)):
                if replicas[0].grad is not None:
                    mean = torch.stack([each.grad for each in replicas]).mean(0)
                    for each in replicas:
                        each.grad = mean.clone()
            for stepper in steppers:
                stepper.step()
        return collected.run(name)


def take(table: Table, rows: list[int]) -> Table:
    """Return a table with some rows, in the order given."""
    columns = {}
    for name in (one.name for one in dataclasses.fields(Table) if one.name not in ("step", "facts")):
        column = getattr(table, name)
        columns[name] = [column[row] for row in rows] if isinstance(column, list) else column[rows]
    return Table(step=table.step, **columns)


def write(run: Run, folder: Path) -> str:
    """Write the files of a run, and return the folder."""
    for rank in run.ranks:
        manifest = dict(run_id=folder.name, rank=rank, world_size=len(run.ranks), start_step=0, backend="torch",
                        zero_stage=0, dtype="float32", model="Model", model_digest="d", parameters={})  # fmt: skip
        writer = StatisticsWriter(folder, manifest=manifest)
        for step in run.steps_of(rank):
            table = run.steps[rank][step]
            described = {name: getattr(table, name) for name in DESCRIPTION}
            writer.append(step, described, table.raw(np.arange(len(table))))
        writer.close()
    return str(folder)

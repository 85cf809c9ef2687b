"""Tables of real modules and made-up ones, in memory: what ``storage.open_run`` gives, without files."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from ort_zero.statistics.records import Phase, RunInfo, Table
from ort_zero.statistics.rows import FIRST, SKETCH

NUMBERS = ("elements", "min", "max", "mean", "std", "abs_mean", "l2", "negative", "positive", "zero", "nan", "inf")
INTEGERS = ("elements", "negative", "positive", "zero", "nan", "inf")
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], size=1 << 20)


def measure(values: np.ndarray, offset: int = 0) -> dict:
    """Return the columns that one tensor's values become, or a part's that begins at `offset`."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    finite = np.where(np.isfinite(flat), flat, 0.0)
    good = flat[np.isfinite(flat)]
    begin = offset % SKETCH
    signed = np.zeros(-(-(begin + len(flat)) // SKETCH) * SKETCH)
    signed[begin : begin + len(flat)] = finite * _SIGNS[offset : offset + len(flat)]
    first = np.full(FIRST, np.nan)
    first[: len(flat)] = flat[:FIRST]
    return dict(
        elements=len(flat), min=good.min(initial=np.inf), max=good.max(initial=-np.inf),
        mean=good.mean() if len(good) else np.nan, std=good.std() if len(good) else np.nan,
        abs_mean=np.abs(good).mean() if len(good) else 0.0, l2=float(np.sqrt((good**2).sum())),
        negative=int((good < 0).sum()), positive=int((good > 0).sum()), zero=int((good == 0).sum()),
        nan=int(np.isnan(flat).sum()), inf=int(np.isinf(flat).sum()),
        first=first, sketch=signed.reshape(-1, SKETCH).sum(0),
    )  # fmt: skip


NOTHING = dict(measure(np.zeros(0)), sketch=np.full(SKETCH, np.nan))


def table_of(step: int, rows: list[dict]) -> Table:
    """Return the table of rows that are dicts."""
    columns: dict = {name: [row[name] for row in rows] for name in rows[0]}
    for name in ("order", "call", "caller", "occurrence", "source"):
        columns[name] = np.array(columns[name], dtype=np.int32)
    for name in NUMBERS:
        columns[name] = np.array(columns[name], dtype=np.int64 if name in INTEGERS else np.float64)
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


def tensors_in(value, slot: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested containers with its slot."""
    if isinstance(value, torch.Tensor):
        yield slot, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{slot}.{key}")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{slot}[{number}]")


class Collector:
    """Records what modules take and return, and the gradients there, of one rank."""

    def __init__(self, model: nn.Module, sample: int = 0):
        self.model, self.sample = model, sample
        self.tables: dict[int, Table] = {}
        self._hooks = []
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after(name), with_kwargs=True))

    def begin(self, step: int) -> None:
        """Start a step: parameters are recorded now."""
        self.step, self.rows, self.gradients = step, [], {}
        self.stack: list[int] = []
        self.calls, self.times, self.seen, self.alive = 0, {}, {}, []
        for order, (name, value) in enumerate(self.model.named_parameters()):
            self._parameter(Phase.PARAMETER, order, name, value)

    def end(self) -> None:
        """Finish the step: gradients are there."""
        forward = {row["order"]: row for row in self.rows if row["phase"] == Phase.FORWARD}
        for order in sorted(self.gradients, reverse=True):
            value = self.gradients[order]
            self.rows.append({**forward[order], "phase": Phase.BACKWARD, **self._about(value), "source": -1})
        for order, (name, value) in enumerate(self.model.named_parameters()):
            if value.grad is not None:
                self._parameter(Phase.PARAMETER_GRADIENT, order, name, value.grad)
        self.tables[self.step] = table_of(self.step, self.rows)
        self.alive = []

    def _about(self, value: torch.Tensor) -> dict:
        value = value.detach()
        numbers = measure(value.to(torch.float64).numpy())
        return {"shape": tuple(value.shape), "dtype": str(value.dtype).removeprefix("torch."), **numbers}

    def _parameter(self, phase: Phase, order: int, name: str, value: torch.Tensor) -> None:
        module, _, slot = name.rpartition(".")
        about = self._about(value)
        if self.sample and value.numel() > self.sample:
            about.update(measure(value.detach().double().numpy().ravel()[:: value.numel() // self.sample]))
        self.rows.append(
            dict(phase=phase, order=order, call=-1, caller=-1, module=module, occurrence=1, kind="parameter",
                 slot=slot, source=-1, partitioned=False, **about)
        )  # fmt: skip

    def _record(self, kind: str, name: str, call: int, caller: int, slot: str, value: torch.Tensor) -> None:
        order = sum(row["phase"] == Phase.FORWARD for row in self.rows)
        source = self.seen.get(id(value), -1)
        about = self._about(value)
        if source < 0:
            self.seen[id(value)] = order
            self.alive.append(value)
            if value.requires_grad:
                value.register_hook(lambda gradient: self.gradients.__setitem__(order, gradient.clone()))
        else:
            about.update(NOTHING)
        self.rows.append(
            dict(phase=Phase.FORWARD, order=order, call=call, caller=caller, module=name,
                 occurrence=self.times[name], kind=kind, slot=slot, source=source, partitioned=False, **about)
        )  # fmt: skip

    def _before(self, name: str):
        def hook(module, args, kwargs):
            call, caller = self.calls, self.stack[-1] if self.stack else -1
            self.calls += 1
            self.stack.append(call)
            self.times[name] = self.times.get(name, 0) + 1
            given = list(args)
            positional = tensors_in(given[0] if len(given) == 1 else given)
            for slot, value in [*positional, *tensors_in(kwargs)]:
                self._record("input", name, call, caller, slot, value)

        return hook

    def _after(self, name: str):
        def hook(module, args, kwargs, output):
            call = self.stack.pop()
            caller = self.stack[-1] if self.stack else -1
            for slot, value in tensors_in(output):
                self._record("output", name, call, caller, slot, value)

        return hook


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
        sample: so many elements of each; 0: all.
    """
    model = make()
    if fault:
        fault(model)
    stepper = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-3)))(model.parameters())
    collector = Collector(model, sample)
    tables: dict[int, dict[int, Table]] = {rank: {} for rank in range(ranks)}
    for step in range(steps):
        if before:
            before(model, step)
        total: dict[str, torch.Tensor] = {}
        for rank in range(ranks):
            stepper.zero_grad()
            collector.begin(step)
            with Precise() if precise else contextlib.nullcontext():
                result = model(**batch(step, rank))
                (result if isinstance(result, torch.Tensor) else result["loss"]).backward()
            collector.end()
            table = collector.tables[step]
            tables[rank][step] = table if parameters else without_parameters(table)
            for key, value in model.named_parameters():
                if value.grad is not None:
                    total[key] = total.get(key, 0) + value.grad / ranks
        for key, value in model.named_parameters():
            value.grad = total.get(key)
        stepper.step()
    return Run(name, tables)


def without_parameters(table: Table) -> Table:
    """Return a table without parameters and their gradients."""
    return take(table, [row for row, kind in enumerate(table.kind) if kind != "parameter"])


def take(table: Table, rows: list[int]) -> Table:
    """Return a table with some rows, in the order given."""
    columns = {}
    for name in (one.name for one in dataclasses.fields(Table) if one.name != "step"):
        column = getattr(table, name)
        columns[name] = [column[row] for row in rows] if isinstance(column, list) else column[rows]
    return Table(step=table.step, **columns)

"""Collect what the tensors of a step do not show: see :class:`~ort_zero.statistics.records.Facts`."""

from __future__ import annotations

import random
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ort_zero.compat.data_loading import count_batches, workers_of_one_batch
from ort_zero.compat.deepspeed import local_part
from ort_zero.statistics.collect.module_calls import clean_path
from ort_zero.statistics.collect.subscribed_model import remembered, subscribed_model_of
from ort_zero.statistics.collect.tensor_statistics import sampled
from ort_zero.statistics.records import Facts, OptimizerStep

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FITTED_COSINE = 0.9
"""Smallest cosine between the left vector of a spectral norm and what one power iteration makes of the right one."""
_SMALL_RATE = 1e-6
"""Learning rate below which an update of Adam may not change a weight near 1 in float32."""
_optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Number of each optimizer, in the order of first steps."""


class FactsCollector:
    """The facts of a module's steps; of its parameters and optimizers only if asked for.

    Optimizer steps belong to the model's newest step.
    """

    def __init__(self, model: nn.Module, with_parameters: bool):
        self._model = weakref.ref(model)
        self._with_parameters = with_parameters
        self._updates: list[OptimizerStep] = []
        self._awaited: set[str] = set()
        """Parameters that an optimizer has updated, and whose next gradient has not arrived."""
        self._stale: set[str] = set()
        """Parameters whose stored gradient contains that of an earlier update."""
        self._handles: list[RemovableHandle] = []
        self._facts = Facts()
        self._evaluations_draw = False
        """Whether the last evaluation has drawn random numbers."""
        self._draws: _Draws | None = None
        count_batches()
        if with_parameters:
            before, after = (_observer(weakref.ref(self), with_closure) for with_closure in (False, True))
            self._handles += [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def close(self) -> None:
        """Stop observing the optimizers. May be called twice."""
        for handle in self._handles:
            handle.remove()

    def begin(self, model: nn.Module) -> Facts:
        """Return the facts of a step that begins; its optimizer steps are added when they happen."""
        self._updates = []
        modules = [(clean_path(path), module) for path, module in model.named_modules()]
        moded = [(path, module) for path, module in modules if _depends_on_mode(module)]
        facts: dict[str, Any] = {}
        if self._with_parameters:
            every = list(model.named_parameters(remove_duplicate=False))
            parameters = dict(_cleaned(model.named_parameters()))
            facts["frozen"] = [name for name, parameter in parameters.items() if not parameter.requires_grad]
            facts["parameters"] = _digests(parameters)
            if len(every) > len(parameters):
                names: dict[int, list[str]] = {}
                for name, parameter in _cleaned(every):
                    names.setdefault(id(parameter), []).append(name)
                facts["tied"] = [group for group in names.values() if len(group) > 1]
            facts["untied"] = _untied(model, parameters)
        self._facts = Facts(
            training=model.training,
            gradients=torch.is_grad_enabled(),
            moded=bool(moded),
            other_mode=[path for path, module in moded if module.training != model.training],
            unfitted=[path for path, module in modules if not module.training and _unfitted(module)],
            random=_random_states(),
            workers=workers_of_one_batch(),
            updates=self._updates,
            **facts,
        )
        if self._evaluations_draw and self._draws is None and not (model.training or self._facts.gradients):
            self._draws = _Draws(subscribed_model_of(model), self._facts.drawn)
            self._draws.__enter__()
        return self._facts

    def end(self) -> None:
        """End a step's forward. After an evaluation that draws random numbers, later ones find out in which function.

        Only then does a mode see each function: it takes time, and has a compiled part compiled again.
        """
        if self._draws is not None:
            self._draws.__exit__(None, None, None)
            self._draws = None
        elif not (self._facts.training or self._facts.gradients):
            states = _generator_states()
            self._evaluations_draw = any(self._facts.random.get(name) != state for name, state in states.items())

    def gradient_arrives(self, name: str, parameter: nn.Parameter) -> None:
        """Look at the stored gradient of a parameter, to which autograd is about to add a new one."""
        stored = parameter.grad
        first = name in self._awaited
        self._awaited.discard(name)
        if stored is None or not (first or name in self._stale) or not bool(stored.any()):
            self._stale.discard(name)
        else:
            self._stale.add(name)

    def note_update(self, optimizer: Optimizer) -> None:
        """Keep what an optimizer does with its gradients, if it concerns the model."""
        model = self._model()
        skipped = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step itself
        if model is None or (skipped is not None and bool(skipped)):
            return
        names = {id(parameter): name for name, parameter in _cleaned(model.named_parameters())}
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        held = {names[id(parameter)]: parameter for parameter in every if id(parameter) in names}
        foreign = [parameter for parameter in every if id(parameter) not in names]
        idle = [list(parameter.shape) for parameter in foreign if parameter.grad is None]
        is_zero = bool(remembered(model).get("zero_stage"))
        if not held and not is_zero:
            shapes = [list(parameter.shape) for parameter in model.parameters()]
            if not any(shape in shapes for shape in idle):
                return  # the optimizer of another model
        measured = {name: parameter.grad for name, parameter in held.items() if parameter.grad is not None}
        others = [parameter.grad for parameter in foreign if parameter.grad is not None]
        norms = _norms([*measured.values(), *others])
        mine = dict(zip(measured, norms))
        self._updates.append(
            OptimizerStep(
                optimizer=_optimizers.setdefault(optimizer, len(_optimizers)),
                rates=[float(group.get("lr", 0.0)) for group in optimizer.param_groups],
                gradients={name: mine.get(name) for name in held},
                resting=[names[at] for at in map(id, _resting(optimizer)) if at in names],
                stale=sorted(self._stale & set(held)),
                foreign_norm=float(np.linalg.norm(norms[len(measured) :])) if others else None,
                foreign_idle=idle,
            )
        )
        self._stale -= set(held)
        self._awaited |= set(held)


class _Draws(TorchFunctionMode):
    """Notes the functions that draw random numbers, by the path of the running module, unless that one trains."""

    def __init__(self, model: Any, drawn: dict[str, str]):
        super().__init__()
        self._model, self._drawn = model, drawn

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = _generator_states()
        result = func(*args, **(kwargs or {}))
        call = self._model.calls.running
        if call is not None and not call.module.training and _generator_states() != before:
            self._drawn.setdefault(call.path, getattr(func, "__name__", str(func)))
        return result


def _observer(reference: weakref.ref[FactsCollector], with_closure: bool) -> Any:
    """Return a hook for steps of optimizers; one with a closure computes gradients itself, and is seen at its end."""

    def observe(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        collector = reference()
        has_closure = any(map(callable, (*args[1:], kwargs.get("closure"))))
        if collector is not None and has_closure == with_closure and not torch.compiler.is_compiling():
            collector.note_update(optimizer)

    return observe


def _resting(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer that a step may leave as they are.

    LBFGS may end before its last update. Small rates, of a warm-up or a schedule's end, are lost in float32.
    """
    wanted = isinstance(optimizer, torch.optim.LBFGS)
    held = [(p, float(group.get("lr", 1.0))) for group in optimizer.param_groups for p in group["params"]]
    return [p for p, rate in held if wanted or not rate or (rate < _SMALL_RATE and p.element_size() >= 4)]


def _cleaned(named: Any) -> Any:
    return ((clean_path(name), parameter) for name, parameter in named)


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _BATCH_NORM):
        return module.track_running_stats
    return isinstance(module, _DROPOUT) and module.p > 0


def _unfitted(module: nn.Module) -> bool:
    """Return True for a module whose evaluation uses statistics that are still as the constructor made them."""
    if isinstance(module, _BATCH_NORM) and module.running_mean is not None and module.running_var is not None:
        return not bool(module.running_mean.any()) and bool((module.running_var == 1).all())
    weight, left, right = (getattr(module, name, None) for name in ("weight_orig", "weight_u", "weight_v"))
    if not (isinstance(weight, torch.Tensor) and isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return False  # no torch.nn.utils.spectral_norm
    if left.shape[0] != weight.shape[0]:
        return False
    with torch.no_grad():
        computed = weight.flatten(1) @ right
        return bool(torch.cosine_similarity(computed, left, dim=0) < _FITTED_COSINE)


def _untied(model: Any, parameters: dict[str, nn.Parameter]) -> list[str]:
    """Return the names of the input and the output embedding, if they are two tensors where the config ties them."""
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) is not True:
        return []
    with suppress(AttributeError, NotImplementedError):
        ends = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        names = {id(parameter): name for name, parameter in parameters.items()}
        if ends[0] is not ends[1] and ends[0].shape == ends[1].shape and all(id(end) in names for end in ends):
            return [names[id(end)] for end in ends]
    return []


def _digests(parameters: dict[str, nn.Parameter]) -> dict[str, str]:
    """Return a digest of this rank's part of each parameter, of a frozen one of a sample.

    A digest is of bytes; on other devices than the CPU, the exact sum of words. A tensor without readable bytes (meta,
    quantized, of a class of its own) has none.
    """
    found: dict[str, Any] = {}
    on_device: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        with suppress(RuntimeError, TypeError, NotImplementedError):
            part, offset, total, _ = local_part(parameter)
            if not parameter.requires_grad:
                part = sampled(part, offset=offset, total=total)[0]
            plain = part.detach().contiguous().view(-1)
            if plain.is_cpu:
                found[name] = xxhash.xxh3_64_hexdigest(plain.view(torch.uint8).numpy().data)
            else:
                words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[plain.element_size()]
                on_device[name] = plain.view(words).sum(dtype=torch.int64)
    if on_device:
        sums = torch.stack(list(on_device.values())).tolist()
        found.update((name, format(value, "x")) for name, value in zip(on_device, sums))
    return found


def _norms(tensors: list[torch.Tensor]) -> list[float]:
    if not tensors:
        return []
    norms = []
    for tensor in tensors:
        dense = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        low = tensor.dtype in (torch.float16, torch.bfloat16)
        norms.append(torch.linalg.vector_norm(dense, dtype=torch.float32 if low else None).float().cpu())
    return torch.stack(norms).tolist()


def _random_states() -> dict[str, str]:
    numpy_state: Any = np.random.get_state()
    return {
        **_generator_states(),
        "python": format(hash(random.getstate()[1]) & (1 << 64) - 1, "x"),
        "numpy": xxhash.xxh3_64_hexdigest(numpy_state[1].tobytes() + bytes(str(numpy_state[2:]), "ascii")),
    }


def _generator_states() -> dict[str, str]:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: xxhash.xxh3_64_hexdigest(state.numpy().data) for name, state in states.items()}

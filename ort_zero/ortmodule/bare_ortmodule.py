"""ORTModule without DeepSpeed: what ``ORTModule(model)`` in a user's program does."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from ort_zero import config, log
from ort_zero.backends import registry
from ort_zero.backends.interface import OnModelWrapped
from ort_zero.compat import versions
from ort_zero.errors import ExportError
from ort_zero.ortmodule import patching
from ort_zero.ortmodule.compat import torch_ddp
from ort_zero.ortmodule.compat.ortmodule import bare
from ort_zero.ortmodule.compat.ortmodule.fallback import Fallback


def patch_constructor(on_wrapped: OnModelWrapped) -> None:
    """Let the constructor of ORTModule, which has been imported, make ORTModules that run on this torch.

    Args:
        on_wrapped: called with the runtime of each ORTModule, and with its configuration.

    Raises:
        UnsupportedVersionError: a version is out of range.
    """
    versions.require("ort")
    make = functools.partial(_make, on_wrapped)
    registry.apply("ORTModule", lambda: (bare.constructor_patch(make), bare.extensions_patch()))


def _make(on_wrapped: OnModelWrapped, wrapper: Any, module: Any, debug_options: Any) -> None:
    """Initialize an ORTModule of a user, and give it its runtime."""
    patching.patch_ortmodule()
    if torch_ddp.is_ddp(module):
        _wrap_inside(wrapper, module, debug_options)
        return
    options = bare.construct(wrapper, module, debug_options)
    if options is None:
        return  # PyTorch runs it, as the user's policy says
    log.set_level(options.level, wrapper)
    section = config.Config(
        # upstream's policy decides what becomes of a model that cannot be exported
        ortmodule=config.OrtModuleConfig(log_level=options.level, cache_dir=options.cache_dir, split="off"),
        memory=_memory_of(options),
    )
    on_wrapped(attach_to(wrapper, module, section, keeps_checkpointing=options.keeps_checkpointing), section)


def _wrap_inside(wrapper: Any, ddp: Any, debug_options: Any) -> None:
    """Wrap the module inside a DistributedDataParallel, whose own forward tells its reducer about each call."""
    inner = type(wrapper)(ddp.module, debug_options)
    bare.construct(wrapper, ddp, debug_options)
    bare.run_in_torch_from_now_on(wrapper, ddp)
    ddp.module = inner


def _memory_of(options: bare.UserOptions) -> config.MemoryConfig:
    if options.recompute_level in (1, 2):
        return config.MemoryConfig(recompute="all", level=1 if options.recompute_level == 1 else 2)
    if options.recompute_plan:
        return config.MemoryConfig(recompute=options.recompute_plan)
    return config.MemoryConfig()


def attach_to(wrapper: Any, module: Any, section: config.Config, *, keeps_checkpointing: bool) -> Any:
    """Give a new ORTModule of a user its runtime, and return that.

    Args:
        wrapper: from the constructor that the user called.
        module: the user's.
        section: how it runs.
        keeps_checkpointing: PyTorch runs a module that uses torch's activation checkpointing.
    """
    from ort_zero.ortmodule.recompute import trial
    from ort_zero.ortmodule.wrap import attach_runtime

    memory, part, more = trial.override_section(section.memory, section.ortmodule)
    runtime = attach_runtime(
        wrapper,
        part,
        _request(memory or config.MemoryConfig(), keeps_checkpointing),
        functools.partial(_wrap_again, debug_options=bare.debug_options_of(wrapper)),
        pickles_itself=True,
        runner_of=functools.partial(_PolicyRunner, Fallback(wrapper, module.forward)),
        memory_efficient_gradients=section.memory_efficient_gradients,
        **more,
    )
    return runtime


def _request(memory: config.MemoryConfig, keeps_checkpointing: bool) -> Any:
    """Return what is computed again: what the user asks for, or else what the model checkpoints."""
    from ort_zero.ortmodule.recompute import options
    from ort_zero.ortmodule.wrap import memory_request

    if memory == config.MemoryConfig() and not keeps_checkpointing:
        return options.RecomputeRequest(options.BLOCKS, by_default=True)  # the ranks need not talk about that
    in_place = memory.recompute == options.ALL and memory.level == 1 and not keeps_checkpointing
    return dataclasses.replace(memory_request(memory), replaces_checkpointing=in_place)


def _wrap_again(module: Any, debug_options: Any) -> Any:
    from ort_zero.ortmodule.compat.ortmodule import import_ortmodule

    return import_ortmodule().ORTModule(module, debug_options)


class _PolicyRunner:
    """Runs the calls of an ORTModule by the fallback policy that its user chose.

    Args:
        fallback: the policy.
        runtime: runs the module.
    """

    def __init__(self, fallback: Fallback, runtime: Any):
        self._fallback = fallback
        self.runtime = runtime
        self._ran: dict[bool, tuple[bool, int]] = {}
        """Of the last call of each of upstream's managers: whether it wanted gradients, and the number of its graph."""
        if fallback.is_users:
            runtime.check_graph = functools.partial(_check, fallback)

    def call(self, managers: Any, args: tuple, kwargs: dict, run_in_torch: Callable[[], Any]) -> Any:
        """Run a call in ONNX Runtime, or in PyTorch where an error and the policy say so."""
        from ort_zero.ortmodule.compat import ortmodule as ort_compat

        if not self._fallback.pending:
            try:
                self._fallback.check_arguments(args, kwargs)
                with ort_compat.running(self.runtime):
                    result = self.runtime.call(managers, args, kwargs, run_in_torch)
                self._note_graph(ort_compat.manager_by_mode(self.runtime.module))
                return result
            except ExportError as error:
                self._fallback.handle(error)
                self.runtime.fallback_reason = str(error)
        result = self._fallback.run(args, kwargs)
        if not self._fallback.pending:
            self.runtime.fallback_reason = None  # the policy asks for another try
        return result

    def run_module(self, module: Any, tensors: tuple) -> Any:
        """Run the module for the exporter."""
        return self.runtime.run_module(module, tensors)

    def current(self, training: bool) -> Any:
        """Return the graph of the last call that upstream's manager for training, or the other one, would have done.

        Upstream chooses by the mode of the module alone.
        """
        wanted_gradients, number = self._ran.get(training, (training, 0))
        mode = self.runtime.modes.get(wanted_gradients)
        return next((graph for graph in mode.graphs if graph.known.number == number), None) if mode else None

    def _note_graph(self, training: bool) -> None:
        wanted_gradients = self.runtime.last_wanted_gradients
        graph = self.runtime.current(wanted_gradients)
        if graph is not None:
            self._ran[training] = wanted_gradients, graph.known.number


def _check(fallback: Fallback, runtime: Any, graph: Any) -> None:
    """Raise for a graph of a module that upstream would not run, if the policy does not let it pass.

    Raises:
        ExportError: the result has another type than upstream takes, or an operator runs in PyTorch.
    """
    fallback.check_results(graph.result_types())
    fallback.check_operators(runtime.operators_without_symbolic())

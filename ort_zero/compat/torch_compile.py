"""Reach the parts of torch.compile that a backend needs and that have no public name, alike in torch 2.7 to 2.15."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch.fx._symbolic_trace as fx_tracing
import torch.nn.modules.module as modules
from packaging.version import Version
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.weak import WeakIdKeyDictionary

from ort_zero.utils.patching import around, replaced

__all__ = (
    "HigherOrderOperator", "OpOverload", "aot_autograd", "core_aten_decompositions",
    "min_cut_rematerialization_partition", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
)  # fmt: skip

_MODULE_GLOBALS = vars(modules)
_KNAPSACK = "_optimize_runtime_with_given_memory"
RECOMPILE_LIMIT = 64
"""Graphs of one function that Dynamo keeps; layers whose attributes differ need one each, and the default is 8."""
_DYNAMO_OPTIONS = {"skip_nnmodule_hook_guards": False, "use_numpy_random_stream": True}
"""Dynamo's settings while it traces a unit: guards on hooks that are added later, and NumPy's own random numbers."""
while_converting: list[Callable[[Any], AbstractContextManager[None]]] = [nullcontext]
"""The last one makes the block around a conversion, of the module whose call is converted."""
_conversions = 0
_converted = threading.local()
"""The module whose call this thread converts now."""
_tracing = threading.RLock()
"""Held while :data:`_DYNAMO_OPTIONS` are set, so that no other thread restores them too early, or keeps them."""
_sizes_seen: MutableMapping[Any, Any] = WeakIdKeyDictionary()
"""For each module what Dynamo has noted of the sizes in its conversions, by code."""


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers, in the order of their leaves."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def compile_function(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    note_guard_failure: Callable[[str, Callable[[str], str | None]], None],
    note_guards: Callable[[list[str]], None],
) -> Callable[..., Any]:
    """Compile a function as ``torch.compile`` does, for up to :data:`RECOMPILE_LIMIT` graphs; return the compiled one.

    Where torch can (from 2.13 on), the graphs of other models of the same class do not count.

    Args:
        note_guard_failure: called when no graph fits a call, for each graph: with Dynamo's reason, and with a function
            that returns the value of an expression in the call, as text.
        note_guards: called with the conditions under which a new graph is used again, as Dynamo writes them.
    """

    def guard_failed(failure: Any) -> None:
        # Dynamo's function that calls this one has the locals of the call
        frame = inspect.currentframe()
        names = frame.f_back.f_locals.get("f_locals", {}) if frame is not None and frame.f_back is not None else {}
        note_guard_failure(str(failure.reason), functools.partial(_value_of, names))

    def guards_made(guards: Any) -> None:
        note_guards([line for guard in guards for line in guard.code_list or ()])

    wanted: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
    options = {name: value for name, value in wanted.items() if name in inspect.signature(torch.compile).parameters}
    if not options:
        # before torch 2.12 the limit is one for the whole process
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, RECOMPILE_LIMIT)
    _leave_guards_untimed()
    optimize: Any = torch._dynamo.optimize(backend, guard_export_fn=guards_made, guard_fail_fn=guard_failed, **options)
    convert = optimize.callback

    @functools.wraps(convert)  # with the attributes by which torch finds the backend
    def convert_with_options(*args: Any, **kwargs: Any) -> Any:
        global _conversions
        _conversions += 1
        _converted.module = _module_of(getattr(args[0], "f_locals", {}))
        settings = dynamo_config.patch(_DYNAMO_OPTIONS)
        sizes = _comparing_sizes_of(_converted.module)
        try:
            with while_converting[-1](_converted.module), _tracing, settings, sizes, _leaving_generators_to_python():
                return convert(*args, **kwargs)
        finally:
            _converted.module = None  # holds no model

    optimize.callback = convert_with_options
    return optimize(function)


def _comparing_sizes_of(module: Any) -> AbstractContextManager[None]:
    """Have Dynamo trace a size as one that changes only where it has changed between conversions of this module.

    By torch's own, layers whose sizes differ have symbolic sizes, whose graphs take half as long again to trace.
    """
    from torch._dynamo import pgo

    def of_module(of_all: Any) -> Any:
        return of_all if module is None else _sizes_seen.setdefault(module, defaultdict(pgo.CodeState))

    return replaced(pgo, "_CODE_STATE", of_module)


def _leaving_generators_to_python() -> AbstractContextManager[Any]:
    """Have Python draw from ``random.Random``, whose states Dynamo would make constants of the graph."""
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables.misc import RandomVariable

    def refuse(*_: Any, **__: Any) -> None:
        raise Unsupported("a generator of random numbers that Python draws from")

    both = ExitStack()
    both.enter_context(replaced(RandomVariable, "__init__", lambda _: refuse))
    both.enter_context(replaced(RandomVariable, "is_supported_random_obj", lambda _: staticmethod(lambda _: False)))
    return both


def conversions() -> int:
    """Return how many frames Dynamo has been asked to convert for us, in this process."""
    return _conversions


def allocation_on(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """Return torch's fastest function that allocates a strided tensor without values: half of 20 us on CPUs."""
    if device.type == "cpu":
        return torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


@functools.cache
def _leave_guards_untimed() -> None:
    """Keep Dynamo from timing the guards of each new graph for its debug log: 20 of a small unit's 120 ms."""
    from torch._dynamo import guards

    if hasattr(guards, "profile_guard_manager") and not guards.guards_log.isEnabledFor(logging.DEBUG):
        guards.profile_guard_manager = lambda *_: 0.0


def _value_of(names: dict[str, Any], expression: str) -> str | None:
    """Return the value of a guard's expression, as a short text: numbers and texts themselves, else the type."""
    try:
        value = eval(expression, {}, dict(names))
    except Exception:  # the expression uses names that only Dynamo has
        return None
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(value)[:60]
    return f"a {type(value).__name__}"


def graph_of(
    function: Callable[..., torch.Tensor],
    shapes: Sequence[Sequence[int | None]],
    decompositions: Mapping[OpOverload, Callable[..., Any]],
) -> GraphModule:
    """Return the graph of ATen calls of a function of float32 tensors on the CPU; the graph returns a list.

    Args:
        shapes: the shape of each tensor; None is a size that can change, the same one everywhere.
        decompositions: how to write operators by others.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for shape in shapes:
        kinds = [DimDynamic.DUCK if size is None else DimDynamic.STATIC for size in shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        example = torch.empty([3 if size is None else size for size in shape])  # for torch, 0 and 1 cannot change
        fakes.append(mode.from_tensor(example, symbolic_context=context))
    with mode, torch.no_grad():
        return make_fx(lambda *tensors: [function(*tensors)], dict(decompositions))(*fakes)


def converted_call() -> tuple[Any, str | None]:
    """Return the module (or None) whose call Dynamo converts now, and the name of the conversion, such as ``"0/3"``.

    Dynamo's reasons begin with the name of the conversion that has made the graph which does not fit.
    """
    return getattr(_converted, "module", None), str(torch._guards.CompileContext.current_compile_id() or "") or None


def _module_of(names: Mapping[str, Any]) -> Any:
    """Return the first module among a call's arguments; Dynamo's own frames have all of them in one tuple."""
    values = [each for value in names.values() for each in (value if isinstance(value, tuple) else (value,))]
    return next((value for value in values if isinstance(value, torch.nn.Module)), None)


def graph_breaks() -> list[tuple[str, str]]:
    """Return why Dynamo has divided functions in this process, and the line of the user's code: ``file:line``."""
    from torch._dynamo import utils

    breaks: dict[tuple[str, str], None] = {}
    for each in utils.graph_break_reasons:
        line = each.user_stack[-1] if each.user_stack else None
        where = f"{line.filename}:{line.lineno}" if line is not None else "unknown"
        breaks[" ".join(str(each.reason).split())[:300], where] = None
    return list(breaks)


def is_dynamos(error: Exception) -> bool:
    """Return True for an error of Dynamo itself."""
    return isinstance(error, TorchDynamoException)


def partitioner_options(fraction: float, joins_equal_calls: bool) -> AbstractContextManager[Any]:
    """Set what the min-cut partitioner does in a ``with`` block.

    Args:
        fraction: what it keeps of what it would keep; it keeps what it must in any case.
        joins_equal_calls: it makes one call of several with the same arguments. In torch 2.13 that imports Inductor's
            lowerings, which takes more than a second.
    """
    options = ExitStack()
    options.enter_context(functorch_config.patch(activation_memory_budget=fraction, cse=joins_equal_calls))
    if Version(torch.__version__) < Version("2.8"):
        options.enter_context(replaced(partitioners, _KNAPSACK, around(_saving_what_must_be_saved)))
    return options


def _saving_what_must_be_saved(solve: Any, *arguments: Any) -> tuple[float, list[int], list[int]]:
    """Solve the partitioner's knapsack, and keep the nodes that are marked ``MUST_SAVE``."""
    runtime, kept, again = solve(*arguments)
    nodes = arguments[-1]
    return runtime, kept, [i for i in again if nodes[i].meta.get("recompute") is not CheckpointPolicy.MUST_SAVE]


def promoted_dtype(*values: Any) -> torch.dtype:
    """Return the dtype in which PyTorch computes with tensors and numbers, element by element."""
    return elementwise_dtypes(*values, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a function of a list of arguments that AOTAutograd calls with that list, which it may empty."""

    def run(arguments: list[Any]) -> Any:
        return function(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def allow_second_backwards() -> None:
    """Let the backward of the graph whose forward is compiled now run more than once (``retain_graph=True``).

    Torch refuses that where Inductor may overwrite what the forward keeps.
    """
    context: Any = torch._guards.TracingContext.try_get()
    buffers = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
    if buffers:
        buffers.clear()


def is_taken_apart(arguments: Iterable[Any]) -> bool:
    """Return True where torch does not just compute with real tensors, so that a call must run the user's own code.

    It traces, compiles, batches, differentiates forward, or lets modes or hooks on all modules see what happens.
    """
    functorch: Any = torch._C._functorch
    return (
        torch.compiler.is_compiling()
        or functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or fx_tracing._is_fx_tracing_flag
        or modules._has_any_global_hook()
        or any(map(_is_special, arguments))
    )


def _is_special(argument: Any) -> bool:
    """Return True for tensors of the device "meta" and of classes of their own, as fake ones, and for containers."""
    if isinstance(argument, torch.Tensor):
        return argument.is_meta or type(argument) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if isinstance(argument, (list, tuple)):
        return any(map(_is_special, argument))
    return isinstance(argument, dict) and any(map(_is_special, argument.values()))


def called_module(depth: int) -> Any:
    """Return the module whose ``__call__`` runs the function `depth` frames up, also of a shallow copy; else None."""
    caller = sys._getframe(depth + 1)
    return caller.f_locals.get("self") if caller.f_globals is _MODULE_GLOBALS else None


def saves_plainly() -> bool:
    """Return True if no saved-tensor hooks are active; activation checkpointing sets such hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def keeps_graph() -> bool:
    """Return True within a backward that was started with ``retain_graph=True``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def in_backward() -> bool:
    """Return True within a backward of this thread, such as while activation checkpointing computes again."""
    return torch._C._current_graph_task_id() != -1


def computes_in_tf32() -> bool:
    """Return True if torch may round the factors of float32 products to TF32 on a GPU."""
    products = torch.backends.cuda.matmul
    if hasattr(products, "fp32_precision"):  # torch 2.9: a script that has set it must not read the other
        return products.fp32_precision == "tf32"
    return products.allow_tf32

"""Collect the statistics of a script that ``ort-zero stats run`` has started, with the change that the command asks."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import random
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from ort_zero import env
from ort_zero.utils.patching import Patch, around

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
"""Ends of the paths of torch's files with collectives."""
_MICRO_BATCH = "train_micro_batch_size_per_gpu"


def request() -> dict[str, Any] | None:
    """Return what ``ort-zero stats run`` asks of this process; None unless it has started the process."""
    return env.request(env.STATISTICS)


def arm() -> None:
    """Seed random numbers, and collect the first model that trains; does nothing if no command asks for it."""
    asked = request()
    if asked is None:
        return
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    if not asked["autocast"]:
        torch.autocast.__init__ = around(_disabled)(torch.autocast.__init__)  # type: ignore[method-assign]
    if section_is_off():
        torch.compile = around(_without_ours)(torch.compile)

    def first_call(call: Any, self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            torch.nn.Module.__call__ = call  # type: ignore[method-assign]
            _collect(self, asked)
        return call(self, *args, **kwargs)

    torch.nn.Module.__call__ = around(first_call)(torch.nn.Module.__call__)  # type: ignore[method-assign]


def _collect(model: Any, asked: dict[str, Any]) -> None:
    from ort_zero.statistics.collect.operators import OperatorRecorder
    from ort_zero.statistics.collect.subscribed_model import GlobalSubscriberManager, unwrapped
    from ort_zero.statistics.collect.subscriber import StatisticsSubscriber
    from ort_zero.statistics.collect.subscriber_base import SubscriberBase

    folder, steps, module = asked["output_dir"], asked["steps"], asked["module"]
    if module is not None:
        _require_module(unwrapped(model), module)

    class End(SubscriberBase):
        """Ends the script before the first step that is not collected."""

        start_step = steps

        def pre_forward_model_apply(self, step: int, model: Any) -> None:
            env.answer(env.STATISTICS, {"steps": step})
            raise SystemExit(0)

    collected: SubscriberBase = StatisticsSubscriber(folder, end_step=steps)
    if asked["operators"]:
        collected = OperatorRecorder(folder, module, steps - 1)
    subscribed = GlobalSubscriberManager.subscribe(model, [collected, End()])
    threading.Thread(target=_tell_where, args=(subscribed, steps, asked["timeout"]), daemon=True).start()


def _tell_where(subscribed: Any, end_step: int, seconds: float) -> None:
    """Report where this rank is, once it has begun no step for so many seconds; take that back when it begins one."""
    step, begun, told = -1, time.monotonic(), False
    while subscribed.step < end_step:
        now = time.monotonic()
        if subscribed.step != step:
            step, begun = subscribed.step, now
            if told:
                env.answer(env.STATISTICS, {})
            told = False
        elif now - begun > seconds and not told:
            env.answer(env.STATISTICS, {"stuck": {"step": step, **_position(subscribed.calls.running)}})
            told = True
        time.sleep(min(seconds / 4, 1.0))


def _position(call: Any) -> dict[str, Any]:
    """Return where this rank is: the module of a running call, the collective, the user's line, the whole stack.

    The main thread's stack counts, unless another thread alone waits in a collective, as autograd's threads do.
    """
    frames = sys._current_frames()
    here = threading.main_thread().ident
    order = sorted((number for number in frames if number != threading.get_ident()), key=lambda number: number != here)
    stacks = [traceback.extract_stack(frames[number]) for number in order]
    stack = next((each for each in stacks if _collective_in(each)), stacks[0])
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    lines = [f for f in stack if not f.filename.startswith(("<", *libraries, str(Path(__file__).parents[1])))]
    line = (lines or stack)[-1]
    return {
        "rank": env.rank(),
        "ranks": env.local_world_size() if env.several_hosts() else env.world_size(),
        "module": None if call is None else call.path,
        "collective": _collective_in(stack),
        "line": f"{line.filename}:{line.lineno} in {line.name}: {line.line}",
        "stack": "".join(traceback.format_list(stack)),
    }


def _collective_in(stack: Iterable[traceback.FrameSummary]) -> str | None:
    """Return the name of the function of torch.distributed's collectives that a stack is in."""
    return next((frame.name for frame in stack if frame.filename.endswith(_COLLECTIVES)), None)


def _require_module(model: Any, wanted: str) -> None:
    """End the script with a report unless the model has a module with this path."""
    from ort_zero.compat.torch_modules import named_modules_of
    from ort_zero.statistics.collect.module_calls import clean_path

    names = [clean_path(name) for name, _ in named_modules_of(model)]
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.4) or names[1:4]
        _refuse(f"--operators {wanted}: {type(model).__name__} has no such module; the nearest are {', '.join(near)}")


def _refuse(reason: str) -> NoReturn:
    """End the script, and have the command say why."""
    env.answer(env.STATISTICS, {"refused": reason})
    raise SystemExit(2)


def _disabled(init: Any, *args: Any, **kwargs: Any) -> None:
    """Construct a ``torch.autocast`` that is disabled."""
    bound = inspect.signature(init).bind(*args, **kwargs)
    bound.arguments["enabled"] = False
    init(*bound.args, **bound.kwargs)


def _without_ours(compile_: Any, *args: Any, **options: Any) -> Any:
    """Call ``torch.compile``, which compiles nothing by a backend of ours."""
    ours = options.get("backend") in ("ort_zero", "onnxrt")
    return compile_(*args, **(options | {"disable": True} if ours else options))


def section_is_off() -> bool:
    """Return True if the script runs without its section."""
    asked = request()
    return asked is not None and asked["changes"].get("ort_zero.enabled") is False


def changed(ds_config: Any) -> Any:
    """Return a DeepSpeed config with the changes that the command asks for; keys are dotted paths.

    Another number of ranks gets the same global batch.
    """
    asked = request()
    if asked is None or not isinstance(ds_config, dict):
        return ds_config
    result = copy.deepcopy(ds_config)
    for path, value in asked["changes"].items():
        *above, key = path.split(".")
        inner = result
        for name in above:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                _refuse(f'--change {path}: "{name}" is {inner!r} in the DeepSpeed config, which has no keys')
        inner[key] = value
    micro = result.get(_MICRO_BATCH)
    if asked["ranks"] and isinstance(micro, int):
        before, now = asked["ranks"]
        if micro * before % now:
            _refuse(f'"{_MICRO_BATCH}": {micro} on {before} ranks is no whole number on {now} ranks')
        result[_MICRO_BATCH] = micro * before // now
    return result


def _config_init(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(config, str) and Path(config).is_file():
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    original(self, changed(config), *args, **kwargs)


def patches() -> tuple[Patch, ...]:
    """Return the patch of DeepSpeed's config, which :func:`changed` changes before anything reads it."""
    from ort_zero.compat import deepspeed as ds_compat  # imports torch

    why = "changes the config as ort-zero stats run asks"
    return (Patch.in_module(ds_compat.CONFIG, "DeepSpeedConfig.__init__", _config_init, why),)

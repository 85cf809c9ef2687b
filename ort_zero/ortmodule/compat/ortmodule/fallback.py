"""The fallback policy of ORTModule's users: what becomes of errors, and of what upstream's ORTModule does not take.

By default PyTorch runs what cannot be a graph, in parts as small as possible, and upstream's policy decides about
errors only. A user who sets the policy means upstream's contract: arguments and results of types that upstream does not
take, and operators that cannot be exported, are then errors, or reasons to run in PyTorch, as that policy says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ort_zero.errors import DeviceError, ExportError, UnsupportedTypeError
from ort_zero.ortmodule.compat.ortmodule.wrapping import managers_of

_VARIABLE = "ORTMODULE_FALLBACK_POLICY"
_LEAVE_OUT = f"without {_VARIABLE} ort_zero runs it"


class Fallback:
    """The fallback policy of an ORTModule, as its user has set it.

    Args:
        wrapper: the ORTModule.
        forward: forward of the user's module.
    """

    def __init__(self, wrapper: Any, forward: Callable):
        from onnxruntime.training.ortmodule._fallback import _FallbackPolicy as Policy

        manager = managers_of(wrapper)[0]
        self._manager = manager._fallback_manager
        self._level = manager._debug_options.logging.log_level
        self._signature = inspect.signature(forward)
        self._parts_noted = False
        policy = self._manager.policy
        self._name = policy.name or str(policy)
        # upstream's own default; a user's value from the environment is always a single flag
        default = (
            Policy.FALLBACK_UNSUPPORTED_DEVICE
            | Policy.FALLBACK_UNSUPPORTED_DATA
            | Policy.FALLBACK_UNSUPPORTED_TORCH_MODEL
            | Policy.FALLBACK_UNSUPPORTED_ONNX_MODEL
        )
        self.is_users = policy != default
        """Whether the user has set the policy."""
        self._allows_parts = any(
            policy.is_set(flag)
            for flag in (Policy.FALLBACK_UNSUPPORTED_ONNX_MODEL, Policy.FALLBACK_FORCE_TORCH_FORWARD)
        )

    @property
    def pending(self) -> bool:
        """True if an error lets PyTorch run the whole module from now on."""
        return self._manager.is_pending() and not self._parts_noted

    def check_arguments(self, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Raise for an argument that upstream does not take, if the user has set the policy.

        Raises:
            UnsupportedTypeError: an argument, or part of one, is no tensor, number, text, None, sequence or mapping.
        """
        if not self.is_users:
            return
        try:
            given = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return  # the call itself raises it
        for name, value in given.items():
            named = [(name, value)]
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named = list(value.items())
            for path, kind in (found for one in named for found in _unsupported(*one)):
                raise UnsupportedTypeError(
                    f"ORTModule does not support input type {kind} for input {path} under {_VARIABLE}={self._name}; "
                    f"{_LEAVE_OUT}"
                )

    def check_results(self, types: Iterable[type]) -> None:
        """Raise for a module whose result upstream does not take, if the user has set the policy.

        Args:
            types: type of each container, object and constant in the result.

        Raises:
            UnsupportedTypeError: one of them is no number, text, None, sequence or mapping.
        """
        for kind in types if self.is_users else ():
            if not issubclass(kind, _supported()):
                raise UnsupportedTypeError(
                    f"ORTModule fails to extract schema from data: Unsupported flatten data type: {kind} under "
                    f"{_VARIABLE}={self._name}; {_LEAVE_OUT}"
                )

    def check_operators(self, reasons: Mapping[str, str]) -> None:
        """Note that operators run in PyTorch, or raise for them, if the user has set the policy.

        Args:
            reasons: why an operator without a working symbolic runs in PyTorch, by its name.

        Raises:
            ExportError: the policy does not let PyTorch run them.
        """
        if not self.is_users or not reasons:
            return
        listed = "; ".join(f"{name} ({why})" for name, why in reasons.items())
        error = ExportError(f"operators without an ONNX form under {_VARIABLE}={self._name}: {listed}; {_LEAVE_OUT}")
        if not self._allows_parts:
            raise error
        if not self._parts_noted:
            self.handle(error)
            self._parts_noted = True
            self._manager._raised_fallback_exception = True
            self._manager._logger.warning(
                "Fallback to PyTorch due to exception was triggered, for parts of the model: %s", listed
            )
            if self._manager.retry:
                self._manager._exception, self._manager._raised_fallback_exception = None, False

    def handle(self, error: Exception) -> None:
        """Note that PyTorch takes over after an error, or raise it, by the policy.

        Raises:
            ORTModuleFallbackException: the error in upstream's terms.
        """
        from onnxruntime.training.ortmodule import _fallback

        if isinstance(error, DeviceError):
            kind = _fallback.ORTModuleDeviceException
        elif isinstance(error, UnsupportedTypeError) or isinstance(error.__cause__, TypeError):
            kind = _fallback.ORTModuleIOError
        else:
            kind = _fallback.ORTModuleONNXModelException
            error = RuntimeError(f"There was an error while exporting the PyTorch model to ONNX: {error}")
        self._manager.handle_exception(_fallback.wrap_exception(kind, error), self._level)
        self._parts_noted = False

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Run the module in PyTorch; upstream warns of it, once or with each retry."""
        return self._manager.fallback(self._level, *args, **kwargs)


def _supported() -> tuple[type, ...]:
    """Return the types that upstream takes as arguments and results."""
    import torch

    return (type(None), str, bool, int, float, torch.Tensor, Sequence, Mapping)


def _unsupported(name: str, value: Any) -> Iterator[tuple[str, type]]:
    """Yield the name and the type of each part of an argument that upstream does not take."""
    if not isinstance(value, _supported()):
        yield name, type(value)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _unsupported(f"{name}_{key}", part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, part in enumerate(value):
            yield from _unsupported(f"{name}_{i}", part)

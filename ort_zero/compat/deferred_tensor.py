"""Tensors without memory, whose values are computed when somebody reads them; autograd sees ordinary ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
COPIES = (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default)
"""Operators whose result has the elements of their argument, in the same places."""
VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
"""Operators that give a tensor other sizes."""
LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD = _aten._log_softmax.default, _aten._log_softmax_backward_data.default


class Values:
    """Values that are computed once, when they are read."""

    def __init__(self, compute: Callable[[], torch.Tensor]):
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._values: torch.Tensor | None = None

    @property
    def are_computed(self) -> bool:
        """Return whether somebody has read the values."""
        return self._values is not None

    def now(self) -> torch.Tensor:
        """Return the values, without history."""
        if self._values is None:
            assert self._compute is not None, "values are computed once"
            with torch.no_grad():
                self._values = self._compute()
            self._compute = None  # for what it holds
        return self._values


class DeferredTensor(torch.Tensor):
    """A tensor without memory of its own."""

    content: Values

    @staticmethod
    def __new__(
        cls, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, values: Values, *rest: Any
    ) -> DeferredTensor:
        """Return a tensor without memory of its own."""
        self = torch.Tensor._make_wrapper_subclass(cls, sizes, dtype=dtype, device=device)
        self.content = values
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def without_values(cls, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator without computing the values; None if the operator must have them."""
        return None

    def before_change(self) -> None:
        """Compute what is still to be computed of the values, since an operator changes them in place."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator without the values, or on the values."""
        kwargs = kwargs or {}
        result = cls.without_values(function, args, kwargs)
        if result is not None:
            return result
        read: dict[int, DeferredTensor] = {}

        def plain(tensor: DeferredTensor) -> torch.Tensor:
            if function._schema.is_mutable:
                tensor.before_change()
            values = tensor.content.now()
            read[id(values)] = tensor
            return values

        args, kwargs = tree_map_only(DeferredTensor, plain, (args, kwargs))
        # an operator that changes its argument in place returns it
        return tree_map_only(torch.Tensor, lambda tensor: read.get(id(tensor), tensor), function(*args, **kwargs))

    def meta(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor on torch's meta device with this tensor's sizes, in its dtype or a given one."""
        return torch.empty(self.shape, dtype=dtype or self.dtype, device="meta")

    def _as_plain(self) -> torch.Tensor:
        return self.content.now().detach().requires_grad_(self.requires_grad)


def _of_values(name: str) -> Callable[..., Any]:
    """Return a method that calls the method of this name of a tensor with the values."""

    def method(self: DeferredTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._as_plain(), name)(*args, **kwargs)

    return method


# what reads the memory of a tensor asks no operator for it
for _name in (
    "numpy", "tolist", "data_ptr", "untyped_storage", "__array__", "__dlpack__", "__reduce_ex__", "__repr__",
    "__deepcopy__", "__format__",
):  # fmt: skip
    setattr(DeferredTensor, _name, _of_values(_name))

"""Tensors without memory, whose values are computed when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree


class LazyTensor(torch.Tensor):
    """A tensor whose values are computed once, when an operator reads them; autograd sees an ordinary one.

    Args:
        compute: returns the values, a plain tensor.
        like: has the dtype and the device of the values.
        shape: of the values.
        on_read: called before the values are computed.
    """

    _compute: Callable[[], torch.Tensor] | None
    _known: torch.Tensor | None
    _on_read: Callable[[], None]

    @staticmethod
    def __new__(
        cls,
        compute: Callable[[], torch.Tensor],
        like: torch.Tensor,
        shape: Sequence[int],
        on_read: Callable[[], None],
    ) -> LazyTensor:
        """Return a tensor without memory of its own."""
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        self._compute, self._known, self._on_read = compute, None, on_read
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator on the values."""
        found: dict[int, LazyTensor] = {}

        def plain(lazy: LazyTensor) -> torch.Tensor:
            values = lazy.values_now()
            found[id(values)] = lazy
            return values

        given, named = _pytree.tree_map_only(LazyTensor, plain, (args, kwargs or {}))
        result = func(*given, **named)
        # an operator that changes its argument in place returns it
        return _pytree.tree_map_only(torch.Tensor, lambda tensor: found.get(id(tensor), tensor), result)

    def values_now(self) -> torch.Tensor:
        """Return the values as a plain tensor without history; they are computed at the first call."""
        if self._known is None:
            assert self._compute is not None
            self._on_read()
            with torch.no_grad():
                self._known = self._compute()
            self._compute = None  # it holds the weight
        return self._known

    def _as_plain(self) -> torch.Tensor:
        """Return a plain tensor with the same values that requires grad as this one does."""
        return self.values_now().detach().requires_grad_(self.requires_grad)

    # what reads the memory of a tensor asks no operator for it

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values as an array."""
        return self._as_plain().numpy(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_plain().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._as_plain().tolist()

    def data_ptr(self) -> int:
        """Return the address of the values."""
        return self.values_now().data_ptr()

    def untyped_storage(self) -> Any:
        """Return the memory of the values."""
        return self.values_now().untyped_storage()

    def storage(self) -> Any:
        """Return the memory of the values, with their type."""
        return self.values_now().storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._as_plain().__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain().__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return repr(self._as_plain())

    def __format__(self, spec: str) -> str:
        return format(self._as_plain(), spec)

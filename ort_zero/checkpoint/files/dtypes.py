"""Translate dtypes between the codes of safetensors, the names of torch and the values of ``--dtype``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ort_zero.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_TABLE = {
    "BOOL": (1, "bool"), "U8": (1, "uint8"), "I8": (1, "int8"), "U16": (2, "uint16"), "I16": (2, "int16"),
    "U32": (4, "uint32"), "I32": (4, "int32"), "U64": (8, "uint64"), "I64": (8, "int64"), "F16": (2, "float16"),
    "BF16": (2, "bfloat16"), "F32": (4, "float32"), "F64": (8, "float64"), "C64": (8, "complex64"),
    "F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"),
}  # fmt: skip
"""Bytes per element, and the name of torch's dtype, by code."""
_WITHOUT_CODE = {
    "complex32": 4, "complex128": 16, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "qint8": 1,
    "quint8": 1, "qint32": 4,
}  # fmt: skip
"""Bytes per element of torch's dtypes without a safetensors code."""
_ITEMSIZES = {**{name: size for size, name in _TABLE.values()}, **_WITHOUT_CODE}
_CODES = {name: code for code, (_, name) in _TABLE.items()}
_SHORT = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}

CHOICES = ("keep", *_SHORT)


def itemsize(code: str) -> int:
    try:
        return _TABLE[code][0]
    except KeyError:
        raise CheckpointError(f"unknown dtype {code!r}; known: {', '.join(_TABLE)}") from None


def is_dtype_code(code: str) -> bool:
    return code in _TABLE


def is_floating(code: str) -> bool:
    """Return True for the codes of dtypes that ``--dtype`` casts."""
    return code in ("F64", "F32", "F16", "BF16")


def is_dtype_name(name: str) -> bool:
    """Return True if torch has a dtype of this name, such as "float32"."""
    return name in _ITEMSIZES


def itemsize_of(name: str) -> int:
    """Return the bytes per element of a torch dtype by its name, such as "float32"."""
    return _ITEMSIZES[name]


def code_of(dtype: torch.dtype | str) -> str:
    """Return the safetensors code of a torch dtype or of its name."""
    name = str(dtype).removeprefix("torch.")
    if name not in _CODES:
        raise CheckpointError(f"tensors of torch.{name} cannot be stored; known: {', '.join(_CODES)}")
    return _CODES[name]


def name_of(code: str) -> str:
    """Return torch's name of the dtype of a code, such as "float32"."""
    itemsize(code)
    return _TABLE[code][1]


def torch_dtype(code: str) -> torch.dtype:
    import torch

    return getattr(torch, name_of(code))


def output_code(choice: str, code: str) -> str:
    """Return the code in which a tensor of dtype `code` is written under ``--dtype choice``; only floats are cast."""
    return code if choice == "keep" or not is_floating(code) else _SHORT[choice]

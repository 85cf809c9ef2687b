"""Define the types and limits of ``manifest.json``. Import this module late: pydantic takes long to import."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.allowed_names import check_tag, is_config_name, is_plain_name
from ort_zero.errors import CheckpointError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _file_name(name: str) -> str:
    if not is_plain_name(name):
        raise ValueError("must be the name of a file in the checkpoint's own folder")
    return name


def _config_name(name: str) -> str:
    if not is_config_name(name):
        raise ValueError("is not the name of a configuration file that a checkpoint may bring")
    return name


def _dtype_code(code: str) -> str:
    if not dtypes.is_dtype_code(code):
        raise ValueError("unknown dtype")
    return code


def _tag(tag: str) -> str:
    try:
        check_tag(tag)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    return tag


def _printable(text: str) -> str:
    if not text.isprintable():  # control characters can make a terminal show another text
        raise ValueError("holds characters that are not printable")
    return text


def _content(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("is no text that UTF-8 can hold") from None
    return text


_Size = Annotated[int, Field(ge=0, lt=1 << 63)]
_Name = Annotated[str, AfterValidator(_printable)]
_Dtype = Annotated[str, AfterValidator(_dtype_code)]


class ManifestFile(_Strict):
    """A file of the checkpoint."""

    name: Annotated[str, AfterValidator(_file_name)]
    size: _Size
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class ManifestTensor(_Strict):
    """A tensor, and the pieces that hold its bytes."""

    name: _Name
    kind: _Name
    dtype: _Dtype
    shape: Annotated[list[_Size], Field(max_length=64)]
    pieces: list[Annotated[list[Any], Field(min_length=7, max_length=7)]]
    """Lists, which are small in JSON: the fields of :class:`~ort_zero.checkpoint.pieces.PieceRun`, which checks their
    types, with the checksums in base64."""


class ManifestGroup(_Strict):
    """A parameter group of the optimizer."""

    names: list[_Name]
    options: dict[str, Any]


class ManifestOptimizer(_Strict):
    """The optimizer without the tensors of its state."""

    class_name: _Name | None
    groups: list[ManifestGroup]
    scalars: dict[str, dict[str, Annotated[float, Field(allow_inf_nan=False)]]]


class Manifest(_Strict):
    """The content of ``manifest.json`` without its digest."""

    format: Literal["ort_zero.checkpoint"]
    version: int
    tag: Annotated[str, AfterValidator(_tag)]
    step: _Size
    world_size: Annotated[int, Field(ge=1, le=1 << 20)]
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    dtype: _Dtype
    """Dtype of the module's floating-point weights, which are the masters cast to this dtype."""
    run_id: str
    save_id: str
    versions: dict[str, str]
    aliases: dict[_Name, _Name]
    frozen: list[_Name]
    left_out: list[_Name]
    optimizer: ManifestOptimizer | None
    config: dict[Annotated[str, AfterValidator(_config_name)], Annotated[str, AfterValidator(_content)]]
    files: list[ManifestFile]
    tensors: list[ManifestTensor]

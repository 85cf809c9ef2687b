"""Define the types and limits of ``manifest.json``. Import this module late: pydantic takes long to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ort_zero.checkpoint.files import dtypes
from ort_zero.checkpoint.files.allowed_names import check_tag, is_config_name, is_plain_name
from ort_zero.errors import CheckpointError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _must(test: Callable[[str], bool], why: str) -> AfterValidator:
    """Return the check that `test` is true of a text."""

    def check(text: str) -> str:
        if not test(text):
            raise ValueError(why)
        return text

    return AfterValidator(check)


def _is_utf8(text: str) -> bool:
    try:
        return text.encode() is not None
    except UnicodeEncodeError:
        return False


def _tag(tag: str) -> str:
    try:
        check_tag(tag)
    except CheckpointError as error:
        raise ValueError(str(error)) from None
    return tag


_Size = Annotated[int, Field(ge=0, lt=1 << 63)]
# control characters can make a terminal show another text
_Name = Annotated[str, _must(str.isprintable, "holds characters that are not printable")]
_Dtype = Annotated[str, _must(dtypes.is_dtype_code, "unknown dtype")]
_FileName = Annotated[str, _must(is_plain_name, "must be the name of a file in the checkpoint's own folder")]
_ConfigName = Annotated[str, _must(is_config_name, "is no name of a configuration file that a checkpoint may bring")]
_Content = Annotated[str, _must(_is_utf8, "is no text that UTF-8 can hold")]


class ManifestFile(_Strict):
    name: _FileName
    size: _Size
    xxh3_128: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class ManifestTensor(_Strict):
    name: _Name
    kind: _Name
    dtype: _Dtype
    shape: Annotated[list[_Size], Field(max_length=64)]
    pieces: list[Annotated[list[Any], Field(min_length=7, max_length=7)]]
    """Lists, which are small in JSON: the fields of :class:`~ort_zero.checkpoint.pieces.PieceRun`, which checks their
    types, with the checksums in base64."""


class ManifestGroup(_Strict):
    names: list[_Name]
    options: dict[str, Any]


class ManifestOptimizer(_Strict):
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
    config: dict[_ConfigName, _Content]
    files: list[ManifestFile]
    tensors: list[ManifestTensor]

"""Parse the ``"ort_zero"`` section of the DeepSpeed JSON: types, defaults, errors with dotted paths."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from ort_zero.errors import ConfigError

SECTION = "ort_zero"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class CompileConfig(_Strict):
    """The section ``ort_zero.compile``: how the compile backend runs the model."""

    verify: Literal["sampled", "always", "off"] = "sampled"
    """Compare each segment with PyTorch at its first run and at samples of later runs, at every run, or never."""
    place: Literal["measured", "ort"] = "measured"
    """"measured": the faster of ONNX Runtime and PyTorch runs a segment. "ort": ONNX Runtime runs all that it can."""
    runners: list[Literal["ort", "inductor", "torch"]] | None = Field(default=None, min_length=1)
    """What may run the units: the fastest of the list runs each unit whole. None: ["ort", "torch"] on CPUs, ["ort",
    "inductor", "torch"] on GPUs. Inductor needs a C++ compiler on a CPU and Triton on a GPU."""
    fuse_loss: Literal["auto", "on", "off"] = "auto"
    """"on": heads of 4,096 classes or more and their cross entropy are computed together, chunk by chunk.
    "auto": on CPUs; on GPUs that saves memory and takes more time."""
    max_unit_elements: int | None = Field(default=None, ge=1)
    """Maximum number of parameter elements that are gathered together; larger blocks are divided. None: no limit."""
    reproducers: str | None = None
    """Folder for reproducers of segments that fail or differ; None is ``ort_zero_reproducers``."""

    @field_validator("runners")
    @classmethod
    def _check_runners(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        if value is not None and not {"ort", "inductor"} & set(value):
            raise ValueError('must have "ort" or "inductor"; PyTorch runs the model with "backend": "torch"')
        if value is not None and info.data.get("place") == "ort" and "ort" not in value:
            raise ValueError('must have "ort", since "place" is "ort"')
        return value


class OrtModuleConfig(_Strict):
    """The section ``ort_zero.ortmodule``: how onnxruntime-training runs the model's units."""

    place: Literal["measured", "ort"] = "measured"
    """"measured": a unit that takes more than 1.3 times its time in PyTorch goes back to PyTorch. "ort": none does."""


class CheckpointConfig(_Strict):
    """The section ``ort_zero.checkpoint``: the format of ``engine.save_checkpoint``."""

    sharded: bool = True
    """Write shards with a manifest; False writes DeepSpeed's own files. Both formats can be loaded."""
    async_save: bool = False
    """Copy and write in the background; the next optimizer step waits for the copy."""

    @model_validator(mode="after")
    def _require_sharded_for_async(self) -> CheckpointConfig:
        if self.async_save and not self.sharded:
            raise ValueError('"async_save" needs "sharded": true')
        return self


class StatisticsConfig(_Strict):
    """The section ``ort_zero.statistics``: collection of statistics of activations, gradients and parameters."""

    enabled: bool = False
    """Collect statistics of this run."""
    output_dir: str | None = None
    """Folder of the run, the same on all ranks."""
    start_step: int = Field(default=0, ge=0)
    """First step that is collected; a step is one call of the whole model."""
    end_step: int | None = None
    """Step before which collection ends; None: never."""
    override_output_dir: bool = False
    """Delete the statistics of another run in the folder."""
    parameters: Literal["sample", "full", "off"] = "sample"
    """"sample": up to 4,096 elements of each parameter and of its gradient. "full": all elements. "off": none."""

    @model_validator(mode="after")
    def _check_values(self) -> StatisticsConfig:
        if self.enabled and not self.output_dir:
            raise ValueError("output_dir must name a folder where statistics are enabled")
        if self.end_step is not None and self.end_step <= self.start_step:
            raise ValueError(f"end_step {self.end_step} is not above start_step {self.start_step}")
        return self


class MetricsConfig(_Strict):
    """The section ``ort_zero.metrics``: figures of the running training, for Prometheus and DeepSpeed's monitors."""

    path: str | None = None
    """File for the newest figures in Prometheus' text format, replaced at each write. Rank 0 writes the file; with
    ``{rank}`` in the path each rank writes its own file."""
    every: int = Field(default=10, ge=1)
    """Optimizer steps between two writes."""
    monitor: bool = True
    """Also send the figures to TensorBoard, Weights & Biases, CSV, ... if the DeepSpeed config enables these."""


class MemoryConfig(_Strict):
    """The section ``ort_zero.memory``: which activations the backward computes again instead of storing them."""

    recompute: str | list[str] = "off"
    """off, all or auto; ORTModule also takes a plan ("FastGelu+:1:12,..." or a list of such items), or its path."""
    budget: str | int | None = None
    """For "auto": "6GiB", or "65%" of what forwards keep for backwards without recomputation. None: four fifths of the
    memory that is free after the first step; "compile" alone."""


class Config(_Strict):
    """The whole ``"ort_zero"`` section."""

    enabled: bool = True
    """False: the section has no effect."""
    backend: Literal["auto", "compile", "ortmodule", "torch"] = "auto"
    """The engine that runs units: "compile" in today's onnxruntime, "ortmodule" in onnxruntime-training. With "torch"
    PyTorch runs the model. "auto" is "compile", unless the variable ORT_ZERO_BACKEND is "ortmodule"."""
    fallback: Literal["raise", "warn"] = "warn"
    """Action where a unit cannot be compiled: raise an error, or warn once and run the unit in PyTorch."""
    exclude: list[str] = Field(default_factory=list)
    """Glob patterns of module paths that stay in PyTorch."""
    log_level: str = "INFO"
    """DEBUG, DEVINFO, INFO, WARNING or ERROR."""
    cpu_memory: bool = True
    """On CPUs: keep freed memory; under ZeRO gather and reduce in place, bound buckets, update Adam in pieces. Needs no
    ONNX Runtime, and serves every backend, "torch" too. False leaves this to DeepSpeed, torch and glibc."""
    save_onnx: str | None = None
    """Folder into which rank 0 writes the graphs as ONNX files; None writes none."""
    compile: CompileConfig = Field(default_factory=CompileConfig)
    ortmodule: OrtModuleConfig = Field(default_factory=OrtModuleConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    statistics: StatisticsConfig = Field(default_factory=StatisticsConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)

    @field_validator("log_level")
    @classmethod
    def _check_log_level(cls, value: str) -> str:
        from ort_zero.log import LEVELS

        if value.upper() not in LEVELS:
            raise ValueError(f"must be one of {', '.join(LEVELS)}")
        return value.upper()

    def engine(self) -> str:
        """Return what runs the model: "compile", "ortmodule" or "torch".

        Raises:
            ConfigError: the section has keys that this engine does not have.
        """
        from ort_zero.compat import versions

        engine = versions.engine() if self.backend == "auto" else self.backend
        for other, part in (("compile", self.compile), ("ortmodule", self.ortmodule)):
            if engine != other and part.model_fields_set:
                raise ConfigError(
                    f'{SECTION}.{other}.{min(part.model_fields_set)}: a key of "backend": "{other}", and the backend '
                    f'is "{engine}"; remove it, or set "backend": "{other}"'
                )
        memory = self.memory
        if engine == "torch" and memory.recompute != "off":
            raise ConfigError(
                f'{SECTION}.memory.recompute: {memory.recompute!r} needs ONNX Runtime, and the backend is "torch"; in '
                "PyTorch use torch.utils.checkpoint"
            )
        if engine == "compile" and memory.recompute not in ("off", "auto", "all"):
            raise ConfigError(
                f"{SECTION}.memory.recompute: a plan belongs to onnxruntime-training, and the backend is "
                '"compile"; use "auto" with a "budget", or "all", or set "backend": "ortmodule"'
            )
        if memory.budget is not None and memory.recompute != "auto":
            raise ConfigError(
                f'{SECTION}.memory.budget: {memory.budget!r} belongs to "recompute": "auto", and "recompute" is '
                f"{memory.recompute!r}"
            )
        if engine == "ortmodule" and memory.recompute == "auto" and memory.budget is None:
            raise ConfigError(f'{SECTION}.memory: "recompute": "auto" needs a "budget" such as "60%" in "ortmodule"')
        return engine


def parse(section: Any) -> Config:
    """Return the validated ``"ort_zero"`` section.

    Raises:
        ConfigError: an unknown key, a wrong type or value; the message names the key's dotted path, the value and,
            for an unknown key, the nearest valid name.
    """
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{SECTION}" in the DeepSpeed config must be an object, not {section!r}')
    try:
        config = Config.model_validate(dict(section))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain_all(error.errors()))) from None
    return config


def section_of(ds_config: Mapping[str, Any] | None) -> Config | None:
    """Return the section of a DeepSpeed config dict, None if the section is missing or has ``"enabled": false``.

    Raises:
        ConfigError: see :func:`parse`; also for a misspelt section name such as ``"ort-zero"``.
    """
    if not isinstance(ds_config, Mapping):
        return None
    if SECTION not in ds_config:
        for key in ds_config:
            if isinstance(key, str) and key != SECTION and key.lower().replace("-", "_") in (SECTION, "ortzero"):
                raise ConfigError(f'unknown key "{key}" in the DeepSpeed config; did you mean "{SECTION}"?')
        return None
    config = parse(ds_config[SECTION])
    return config if config.enabled else None


def read_json(path: Path, what: str) -> Any:
    """Return what a JSON file of the user's holds.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not JSON: {error}") from None


def read_section(path: Path) -> Config:
    """Return the section of a DeepSpeed JSON that runs the model in ONNX Runtime.

    Raises:
        ConfigError: names the file, and what is wrong.
    """
    content = read_json(path, "the config")
    try:
        section = section_of(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if section is None:
        raise ConfigError(f'{path} has no enabled section "{SECTION}": add "ort_zero": {{}} to it')
    if section.engine() == "torch":
        raise ConfigError(f'{path} has "backend": "torch": memory is planned for ONNX Runtime')
    return section


def _explain_all(errors: list[Any]) -> list[str]:
    """Return one line for each wrong key, which joins the errors from all branches of a union type."""
    lines: list[str] = []
    wrong: dict[str, tuple[list[str], Any]] = {}
    for error in errors:
        where = [str(part) for part in error["loc"]]
        if error["type"] == "extra_forbidden":
            lines.append(f"{SECTION}.{'.'.join(where)}: unknown key (value {error['input']!r}); {_right_key(where)}")
            continue
        # a union's branches add their own names to the location
        path = ".".join(p for p in where if "[" not in p and p not in ("str", "none"))
        wrong.setdefault(path, ([], error["input"]))[0].append(error["msg"].removeprefix("Value error, "))
    lines += [
        f"{SECTION}.{path}: {'; or '.join(messages)}, got {value!r}" if path else f"{SECTION}: {'; '.join(messages)}"
        for path, (messages, value) in wrong.items()
    ]
    return lines


def _right_key(where: list[str]) -> str:
    """Return which key an unknown one stands for: of the same name elsewhere, else of a similar name."""
    *above, key = where
    paths = list(_paths_of_keys(Config))
    here = [path for path in paths if path[:-1] == tuple(above)]
    meant = [path for path in paths if path[-1] == key]
    for candidates, cutoff in ((here, 0.8), (paths, 0.7), (here, 0.5)):
        near = difflib.get_close_matches(key, [path[-1] for path in candidates], n=1, cutoff=cutoff)
        meant = meant or [path for path in candidates if path[-1] in near]
    if not meant:
        return f"valid keys: {', '.join(path[-1] for path in here)}"
    names = [path[-1] if path in here else ".".join(path) for path in meant]
    return f"did you mean {' or '.join(map(json.dumps, names))}?"


def _paths_of_keys(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each key of a section, with the keys of the sections in it."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths_of_keys(field.annotation, (*above, name))

"""Parse the ``"ort_zero"`` section of the DeepSpeed JSON: types, defaults, errors with dotted paths."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ort_zero.errors import ConfigError

SECTION = "ort_zero"
_SHARED = ("exclude", "fallback", "log_level", "save_onnx")
"""Options of both engines; the section has them, and for older configs also its part ``ortmodule``."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OrtModuleConfig(_Strict):
    """The section ``ort_zero.ortmodule``: how ONNX Runtime runs the model."""

    enabled: bool = True
    """Run the model in ONNX Runtime; False keeps PyTorch execution."""
    fallback: Literal["raise", "warn"] = "raise"
    """Action after a failed export: raise an error, or warn once on rank 0 and train in PyTorch."""
    split: Literal["auto", "off"] = "auto"
    """With "auto", PyTorch runs a forward that cannot be exported, and each of its submodules gets a graph.
    With "off", or with ``fallback`` "warn", such a forward is a failed export."""
    place: Literal["measured", "ort"] = "measured"
    """"measured": a unit that takes over 1.3 times as long as in PyTorch goes back to PyTorch. "ort": none does."""
    exclude: list[str] = Field(default_factory=list)
    """Glob patterns of module paths that stay in PyTorch."""
    log_level: str = "INFO"
    """DEBUG, VERBOSE, DEVINFO, INFO, WARNING or ERROR."""
    graph_cache_size: int = Field(default=8, ge=1)
    """Maximum number of graphs in memory for each mode, training and inference."""
    cache_dir: str | None = "auto"
    """Folder of the export cache; "auto" is the user's cache folder if it is safe, None keeps no cache across runs."""
    cache_key: str | None = None
    """Text that the user adds to the export cache's key, for changes that the cache cannot detect."""
    ort_kernels: list[str] = Field(default_factory=list)
    """Glob patterns of replaced kernels (``status()`` names them) for which ONNX Runtime's own stay; "*" for all."""
    fuse_loss: Literal["auto", "on", "off"] = "auto"
    """Whether a language-model head and its cross entropy become one node. The node computes only rows with a label and
    never stores all logits. "auto" means "on" for 4,096 classes or more."""
    drop_padding: bool = False
    """Whether graphs with gradients on the CPU skip tokens that an attention mask hides, between embedding and results.
    The model's results for these tokens then have no meaning."""
    save_onnx: str | None = None
    """Folder into which rank 0 writes the graphs as ONNX files; None writes none."""

    @field_validator("log_level")
    @classmethod
    def _check_log_level(cls, value: str) -> str:
        from ort_zero.log import level_names

        if value.upper() not in level_names():
            raise ValueError(f"must be one of {', '.join(level_names())}")
        return value.upper()


class CompileConfig(_Strict):
    """The section ``ort_zero.compile``: how the compile backend runs the model."""

    verify: Literal["sampled", "always", "off"] = "sampled"
    """Compare each segment with PyTorch at its first run and at samples of later runs, at every run, or never."""
    place: Literal["measured", "ort"] = "measured"
    """"measured": the faster of ONNX Runtime and PyTorch runs a segment. "ort": ONNX Runtime runs all that it can."""
    fuse_loss: Literal["auto", "on", "off"] = "auto"
    """"on": heads of 4,096 classes or more and their cross entropy are computed together, chunk by chunk.
    "auto": on CPUs; on GPUs that saves memory and takes more time."""
    max_unit_elements: int | None = Field(default=None, ge=1)
    """Maximum number of parameter elements that are gathered together; larger blocks are divided. None: no limit."""
    reproducers: str | None = None
    """Folder for reproducers of segments that fail or differ; None is ``ort_zero_reproducers``."""


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
    output_dir: str | None = None
    start_step: int = Field(default=0, ge=0)
    end_step: int | None = None
    override_output_dir: bool = False
    run_on_cpu: bool = False
    bucket_size: int = Field(default=1 << 22, ge=1)
    parameters: Literal["sample", "full", "off"] = "sample"

    @model_validator(mode="after")
    def _check_values(self) -> StatisticsConfig:
        if self.enabled and not self.output_dir:
            raise ValueError("output_dir must name a folder where statistics are enabled")
        if self.end_step is not None and self.end_step <= self.start_step:
            raise ValueError(f"end_step {self.end_step} is not above start_step {self.start_step}")
        return self


class MetricsConfig(_Strict):
    """The section ``ort_zero.metrics``: figures of the running training, for files and DeepSpeed's monitors."""

    path: str | None = None
    """File to write: ``.prom`` gets the newest figures for Prometheus, any other suffix one line of JSON per write.
    Rank 0 writes the file; with ``{rank}`` in the path each rank writes its own file."""
    every: int = Field(default=10, ge=1)
    """Optimizer steps between two writes."""
    monitor: bool = True
    """Also send the figures to TensorBoard, Weights & Biases, CSV, ... if the DeepSpeed config enables these."""


class MemoryConfig(_Strict):
    """The section ``ort_zero.memory``: which activations the backward computes again instead of storing them."""

    recompute: str | list[str] = "off"
    """off, all or auto; ORTModule also takes a plan ("FastGelu+:1:12,..." or a list of such items), or its path."""
    budget: str | int | None = None
    """For "auto": "6GiB", or "65%" of the memory without recomputation. With the compile backend, of what a forward of
    the compiled units keeps for the backward; with ORTModule, of a running training graph."""
    level: Literal[0, 1, 2] | None = None
    """0: any sub-graph; 1: within transformer layers; 2: as 1, with ORT's "compromise". None: 1 for "all", else 0."""
    checkpointing: Literal["refuse", "recompute"] = "refuse"
    """Treatment of a model with torch's activation checkpointing: refuse the model, or let ONNX Runtime compute the
    checkpointed blocks again in the backward."""

    @model_validator(mode="after")
    def _refuse_two_choices(self) -> MemoryConfig:
        if self.checkpointing == "recompute" and (self.recompute != "off" or self.budget is not None):
            choice = {"recompute": self.recompute} if self.recompute != "off" else {"budget": self.budget}
            setting = json.dumps(choice)[1:-1]
            raise ValueError(
                f'"checkpointing": "recompute" computes again the blocks that the model checkpoints, and {setting} '
                'makes another choice: drop "recompute" and "budget", or drop "checkpointing" and switch '
                "checkpointing off in the model"
            )
        return self


class Config(_Strict):
    """The whole ``"ort_zero"`` section."""

    enabled: bool = True
    backend: Literal["auto", "compile", "ortmodule"] = "auto"
    """The engine: torch.compile with today's onnxruntime, or ORTModule of onnxruntime-training. "auto" is "compile",
    unless the variable ORT_ZERO_BACKEND is "ortmodule"."""
    fallback: Literal["raise", "warn"] | None = None
    """Action after a failed export or compilation. None: ORTModule raises; a unit that cannot be compiled runs in
    PyTorch, with a warning."""
    exclude: list[str] = Field(default_factory=list)
    """Glob patterns of module paths that stay in PyTorch."""
    log_level: str = "INFO"
    """DEBUG, VERBOSE, DEVINFO, INFO, WARNING or ERROR."""
    save_onnx: str | None = None
    """Folder into which rank 0 writes the graphs as ONNX files; None writes none."""
    ortmodule: OrtModuleConfig = Field(default_factory=OrtModuleConfig)
    compile: CompileConfig = Field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    statistics: StatisticsConfig = Field(default_factory=StatisticsConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    memory_efficient_gradients: bool = False
    """Give each gradient to its parameter as soon as the graph has computed it, as ZeRO-3 always does."""

    @model_validator(mode="before")
    @classmethod
    def _share(cls, section: Any) -> Any:
        """Give the options of both engines one value, whether they stand in the section or below ``ortmodule``."""
        inner = section.get("ortmodule", {}) if isinstance(section, dict) else None
        if not isinstance(inner, dict):
            return section
        outer = {key: section[key] for key in _SHARED if key in section}
        for key in _SHARED:
            if key in outer and key in inner and outer[key] != inner[key]:
                raise ValueError(
                    f'"{key}" is {outer[key]!r} in the section and {inner[key]!r} below "ortmodule"; keep one of them'
                )
        shared = {key: inner[key] for key in _SHARED if key in inner} | outer
        explicit = {key: value for key, value in outer.items() if value is not None}
        return {**section, **shared, "ortmodule": {**inner, **explicit}} if shared else section

    def engine(self) -> str:
        """Return the engine that runs models: "compile" or "ortmodule".

        Raises:
            ConfigError: the section has keys of the other engine.
        """
        from ort_zero.compat import versions

        engine = versions.engine() if self.backend == "auto" else self.backend
        chosen = f'the backend is "{engine}"'
        if engine == "compile":
            foreign = sorted(self.ortmodule.model_fields_set - {*_SHARED, "enabled"})
            if foreign:
                raise ConfigError(
                    f'{SECTION}.ortmodule.{foreign[0]}: a key of ORTModule, and {chosen}; remove it, or set "backend": '
                    '"ortmodule"'
                )
            self._refuse_memory_of_ortmodule(chosen)
        elif self.compile.model_fields_set:
            key = sorted(self.compile.model_fields_set)[0]
            raise ConfigError(
                f'{SECTION}.compile.{key}: a key of the compile backend, and the backend is "ortmodule"; remove it, or '
                'set "backend": "compile"'
            )
        return engine

    def _refuse_memory_of_ortmodule(self, chosen: str) -> None:
        memory = self.memory
        foreign = sorted(memory.model_fields_set & {"checkpointing", "level"})
        if foreign or memory.recompute not in ("off", "auto", "all"):
            raise ConfigError(
                f"{SECTION}.memory.{foreign[0] if foreign else 'recompute'}: belongs to ORTModule, and {chosen}; use "
                '"recompute": "auto" with a "budget", "recompute": "all", gradient_checkpointing=True or '
                'torch.utils.checkpoint, or set "backend": "ortmodule"'
            )
        if (memory.recompute == "auto") != (memory.budget is not None):
            raise ConfigError(
                f'{SECTION}.memory: "recompute": "auto" and a "budget" such as "60%" or "2GiB" belong together, and '
                f'"recompute" is {memory.recompute!r}, "budget" {memory.budget!r}'
            )

    @model_validator(mode="after")
    def _require_ortmodule_for_recompute(self) -> Config:
        if self.memory.recompute != "off" and not self.ortmodule.enabled:
            raise ValueError(
                f'"memory.recompute" {self.memory.recompute!r} needs "ortmodule": {{"enabled": true}}; in PyTorch use '
                "torch.utils.checkpoint"
            )
        return self


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

    Args:
        path: path of the file.
        what: name of the file in the error message, such as "the plan file".

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
    if not section.ortmodule.enabled:
        raise ConfigError(f'{path} has "ortmodule": {{"enabled": false}}: memory is planned for ONNX Runtime')
    return section


def _explain_all(errors: list[Any]) -> list[str]:
    """Return one line for each wrong key, which joins the errors from all branches of a union type."""
    lines: list[str] = []
    wrong: dict[str, tuple[list[str], Any]] = {}
    for error in errors:
        where = [str(part) for part in error["loc"]]
        if error["type"] == "extra_forbidden":
            valid = _field_names(where[:-1])
            near = difflib.get_close_matches(where[-1], valid, n=1, cutoff=0.5)
            hint = f'did you mean "{near[0]}"?' if near else f"valid keys: {', '.join(valid)}"
            lines.append(f"{SECTION}.{'.'.join(where)}: unknown key (value {error['input']!r}); {hint}")
            continue
        # a union's branches add their own names to the location
        path = ".".join(p for p in where if "[" not in p and p not in ("str", "none"))
        wrong.setdefault(path, ([], error["input"]))[0].append(error["msg"].removeprefix("Value error, "))
    lines += [
        f"{SECTION}.{path}: {'; or '.join(messages)}, got {value!r}" if path else f"{SECTION}: {'; '.join(messages)}"
        for path, (messages, value) in wrong.items()
    ]
    return lines


def _field_names(path: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        model = model.model_fields[part].annotation  # type: ignore[assignment]
    return list(model.model_fields)

"""Write the stub of a model card, ``README.md``, with facts from the checkpoint and headings for the author."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ort_zero.checkpoint.aggregation.aggregation_plan import Plan
from ort_zero.checkpoint.files import json_text
from ort_zero.checkpoint.records import Source

NAME = "README.md"
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum")
_LIBRARIES = {"adapter_config.json": "peft", "model_index.json": "diffusers", "config.json": "transformers"}


def model_card(source: Source, plan: Plan, extras: Mapping[str, bytes]) -> bytes:
    """Return the text of ``README.md``: front matter for the Hugging Face hub, facts, and headings to fill in.

    Args:
        source: the checkpoint.
        plan: the plan of the aggregation.
        extras: content of the configuration files that are written, by name.
    """
    config = _table(extras.get("config.json"))
    architectures = [name for name in _list(config.get("architectures")) if isinstance(name, str)]
    library = next((library for name, library in _LIBRARIES.items() if name in extras), None)
    dtypes = sorted(
        {entry.dtype for file in plan.files for entry in file.entries if not entry.tensor.is_optimizer_state}
    )
    facts = {
        "architecture": ", ".join(architectures),
        "parameters": f"{plan.parameters:,}",
        "dtypes": ", ".join(dtypes),
        "training steps": "" if source.step is None else f"{source.step:,}",
        "trained with": f"DeepSpeed ZeRO-{source.zero_stage} on {source.world_size} ranks",
        "optimizer": _optimizer(source),
        "checkpoint": f"tag `{source.tag}`, aggregated by ort_zero",
    }
    front = ["---", *([f"library_name: {library}"] if library else []), "---"]
    lines = [*front, "", f"# {architectures[0] if architectures else 'Model'}", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in facts.items() if value]
    for heading in ("License", "Training data", "Intended use and limits", "Evaluation"):
        lines += ["", f"## {heading}", "", "To be filled in by the author."]
    return ("\n".join(lines) + "\n").encode()


def _optimizer(source: Source) -> str:
    optimizer = source.optimizer
    if optimizer is None or optimizer.class_name is None:
        return ""
    options = optimizer.groups[0].options if optimizer.groups else {}
    settings = ", ".join(f"{key} {options[key]}" for key in _OPTIONS if options.get(key) is not None)
    return f"{optimizer.class_name} ({settings})" if settings else optimizer.class_name


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(content: bytes | None) -> dict[str, Any]:
    try:
        value = json_text.loads(content) if content else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

"""The pairs of versions that ``make matrix`` tries: each crosses a change in what ort_zero depends on."""

from __future__ import annotations

from dataclasses import dataclass

OLD_HUB = ("huggingface_hub==0.36.0",)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One environment, and what it differs by from the pinned one.

    Attributes:
        name: name of the environment and of its result.
        packages: requirements, installed without what they need themselves, over those of the pinned environment.
        why: the change that this pair crosses.
        python: version of Python; only that of the pinned environment has its packages below.
    """

    name: str
    packages: tuple[str, ...]
    why: str
    python: str = "3.11"

    @property
    def runs_ort(self) -> bool:
        """Whether onnxruntime-training has a wheel for this Python."""
        return self.python in ("3.10", "3.11")


PAIRS = (
    Pair(name="pinned", packages=(), why="the versions of constraints.txt"),
    Pair(
        name="deepspeed-0.18.9",
        packages=("deepspeed==0.18.9",),
        why="hooks as in 0.19, another optimizer; its own step fails over gloo under ZeRO-1 and 2",
    ),
    Pair(name="deepspeed-0.17.6", packages=("deepspeed==0.17.6",), why="leaf modules by threshold"),
    Pair(name="deepspeed-0.16.9", packages=("deepspeed==0.16.9",), why="hooks that close over a message function"),
    Pair(
        name="deepspeed-0.15.4",
        packages=("deepspeed==0.15.4",),
        why="_register_hooks_recursively; functions of the backward one level deeper; module.id",
    ),
    Pair(
        name="deepspeed-0.14.5",
        packages=("deepspeed==0.14.5",),
        why="_end_of_forward_hook; a coordinator for each mode",
    ),
    Pair(name="torch-2.15", packages=("torch==2.15.0",), why="the newest torch"),
    Pair(
        name="torch-2.8",
        packages=("torch==2.8.0", "deepspeed==0.17.6", "transformers==4.57.1", "tokenizers==0.22.1", *OLD_HUB),
        why="no torchscript_exporter package; autograd nodes in std::shared_ptr",
    ),
    Pair(
        name="torch-2.6",
        packages=(
            *("torch==2.6.0", "deepspeed==0.16.9", "transformers==4.48.3", "tokenizers==0.21.0"),
            *("huggingface_hub==0.27.1", "accelerate==1.2.1"),
        ),
        why="the C++ ABI from before C++11",
    ),
    Pair(
        name="torch-2.4",
        packages=(
            *("torch==2.4.1", "deepspeed==0.14.5", "transformers==4.44.2", "tokenizers==0.19.1"),
            *("huggingface_hub==0.27.1", "accelerate==0.34.2"),
        ),
        why="no dynamo argument of the export; torch loads no plugins",
    ),
    Pair(name="python-3.12", packages=("torch==2.13.0",), python="3.12", why="no wheel of onnxruntime-training"),
    Pair(name="python-3.13", packages=("torch==2.13.0",), python="3.13", why="no wheel of onnxruntime-training"),
)

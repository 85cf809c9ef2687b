"""The pairs of versions that ``make matrix`` tries: each crosses a change in what ort_zero depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steps import STEPS

ALL = tuple(STEPS)
DEEPSPEED = ("hooks", "parity", "features", "reader", "checkpoints", "statistics")
ONNXRUNTIME = ("compiled", "OpInfo", "parity")
TRANSFORMERS = ("compiled", "parity", "accelerate")
PYTHON = ("hooks", "compiled", "parity", "reader", "checkpoints", "statistics")
TORCH = (*PYTHON, "OpInfo", "features")
"""The steps that another version of one package can make fail."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One environment, and what it differs by from the pinned one.

    Attributes:
        name: name of the environment and of its result.
        packages: requirements, installed without what they need themselves, over those of the pinned environment.
        why: the change that this pair crosses.
        python: version of Python; only that of the pinned environment has its packages below.
        steps: the names of what is run, see :data:`steps.STEPS`.
    """

    name: str
    packages: Sequence[str]
    why: str
    python: str = "3.11"
    steps: tuple[str, ...] = ALL


PAIRS = (
    Pair(name="pinned", packages=(), why="the versions of .ci/constraints.txt"),
    *(
        Pair(name=f"deepspeed-{version}", packages=(f"deepspeed=={version}",), why=why, steps=DEEPSPEED)
        for version, why in {
            "0.18.9": "hooks as in 0.19, another optimizer; its own step fails over gloo under ZeRO-1 and 2",
            "0.17.6": "leaf modules by threshold",
            "0.16.9": "hooks that close over a message function",
        }.items()
    ),
    *(
        Pair(name=f"torch-{version}", packages=(f"torch=={version}",), why=why, steps=TORCH)
        for version, why in {
            "2.15.0": "the newest torch",
            "2.14.1": "the next to the newest",
            "2.10.0": "half-way between the lowest torch and the newest",
        }.items()
    ),
    Pair(
        name="torch-2.8.0",
        packages="torch==2.8.0 deepspeed==0.17.6 transformers==4.57.6 tokenizers==0.22.1 "
        "huggingface_hub==0.36.0".split(),
        why="the last torch with a backend onnxrt; transformers 4 of its last release",
    ),
    Pair(
        name="torch-2.7.1",
        packages="torch==2.7.1 deepspeed==0.16.9 transformers==4.48.3 tokenizers==0.21.0 huggingface_hub==0.27.1 "
        "accelerate==1.2.1".split(),
        why="the lowest torch; accelerate 1.2",
    ),
    *(
        Pair(name=f"onnxruntime-{version}", packages=(f"onnxruntime=={version}",), why=why, steps=ONNXRUNTIME)
        for version, why in {
            "1.26.0": "half-way between the lowest onnxruntime and the newest",
            "1.22.1": "the last one that has Python 3.10, but for 1.23",
            "1.20.1": "the next to the lowest",
            "1.19.2": "the lowest onnxruntime",
        }.items()
    ),
    Pair(
        name="transformers-5.24.0",
        packages=("transformers==5.24.0",),
        why="the newest transformers",
        steps=TRANSFORMERS,
    ),
    Pair(
        name="transformers-5.0.0",
        packages="transformers==5.0.0 tokenizers==0.22.1 huggingface_hub==1.3.0 accelerate==1.10.1 httpx==0.28.1 "
        "httpcore==1.0.9".split(),
        why="the first transformers 5; accelerate 1.10",
        steps=TRANSFORMERS,
    ),
    *(
        Pair(name=f"python-{python}", packages=("torch==2.13.0",), python=python, why=why, steps=PYTHON)
        for python, why in {
            "3.10": "the lowest Python; onnxruntime 1.23, the last one for it",
            "3.12": "a later Python",
            "3.13": "a later Python",
        }.items()
    ),
)

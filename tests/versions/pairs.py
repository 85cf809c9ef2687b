"""The pairs of versions that ``make matrix`` tries: each crosses a change in what ort_zero depends on."""

from __future__ import annotations

from dataclasses import dataclass

OLD_HUB = ("huggingface_hub==0.36.0",)
WITHOUT_ORT = r"onnxruntime is not installed; ort_zero works with onnxruntime>=1\.19: pip install"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One environment, and what it differs by from the pinned one.

    Attributes:
        name: name of the environment and of its result.
        packages: requirements, installed without what they need themselves, over those of the pinned environment.
        why: the change that this pair crosses.
        python: version of Python; only that of the pinned environment has its packages below.
        also: steps of :data:`steps.STEPS` that are run for this pair though a short run leaves them out.
        full: steps that are run in full for this pair.
        refused: what the error says with which ONNX Runtime is refused there, a regular expression; None if models
            run in it.
        trains: whether anything trains there; else the error alone is looked at.
    """

    name: str
    packages: tuple[str, ...]
    why: str
    python: str = "3.11"
    also: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    refused: str | None = None
    trains: bool = True


PAIRS = (
    Pair(name="pinned", packages=(), why="the versions of .ci/constraints.txt"),
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
        why="no torchscript_exporter package; autograd nodes in std::shared_ptr; transformers 4 of its last release",
        also=("accelerate",),
    ),
    Pair(
        name="torch-2.6",
        packages=(
            *("torch==2.6.0", "deepspeed==0.16.9", "transformers==4.48.3", "tokenizers==0.21.0"),
            *("huggingface_hub==0.27.1", "accelerate==1.2.1"),
        ),
        why="the C++ ABI from before C++11; accelerate 1.2",
        also=("accelerate",),
    ),
    Pair(
        name="torch-2.4",
        packages=(
            *("torch==2.4.1", "deepspeed==0.14.5", "transformers==4.44.2", "tokenizers==0.19.1"),
            *("huggingface_hub==0.27.1", "accelerate==0.34.2"),
        ),
        why="the lowest versions: no dynamo argument of the export; torch loads no plugins",
        also=("accelerate",),
    ),
    Pair(
        name="transformers-5.0",
        packages=(
            *("transformers==5.0.0", "tokenizers==0.22.1", "huggingface_hub==1.3.0", "accelerate==1.10.1"),
            *("httpx==0.28.1", "httpcore==1.0.9"),
        ),
        why="the first transformers 5; accelerate 1.10",
        also=("accelerate",),
    ),
    Pair(name="python-3.10", packages=("torch==2.13.0",), python="3.10", why="the lowest Python"),
    *(
        Pair(
            name=f"python-{python}",
            packages=("torch==2.13.0",),
            python=python,
            why="without ONNX Runtime: checkpoints, statistics and training in PyTorch",
            full=("one process", "checkpoints"),
            refused=WITHOUT_ORT,
        )
        for python in ("3.12", "3.13")
    ),
    Pair(
        name="refused-deepspeed",
        packages=("deepspeed==0.14.4",),
        why="a DeepSpeed below those that were tried",
        refused=r"deepspeed 0\.14\.4; ort_zero works with deepspeed>=0\.14\.5: pip install 'deepspeed==",
        trains=False,
    ),
    Pair(
        name="refused-torch",
        packages=("torch==2.3.1", "deepspeed==0.14.5"),
        why="a torch below those that were tried",
        refused=r"torch 2\.3\.1.*; ort_zero works with torch>=2\.4: pip install 'torch==",
        trains=False,
    ),
    Pair(
        name="refused-onnxruntime",
        packages=("onnxruntime-training==1.18.0",),
        why="an onnxruntime-training below those that were tried",
        refused=r"onnxruntime-training 1\.18\.0; ort_zero works with onnxruntime-training>=1\.19: pip install",
        trains=False,
    ),
)

"""Which tests of the repository ``make matrix`` runs in each environment.

They are those that another version of torch, DeepSpeed, onnxruntime, transformers, accelerate or Python can make fail;
what depends on our code alone is tested with the pinned versions by ``make test``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tests whose counts are one column of the table.

    Attributes:
        tests: folders, files, or tests in them.
        without: beginnings of the ids of tests that are left out.
    """

    tests: tuple[str, ...]
    without: tuple[str, ...] = ()


_COMPILED = "tests/compile/contract/test_"
_READER = "tests/dist/test_deepspeed_reader.py"
_CLEAN = "tests/dist/test_statistics_ranks.py::test_clean_runs_are_the_same"

STEPS = {
    "hooks": Step(
        tests=(
            *(
                f"tests/unit/test_{name}.py"
                for name in (
                    "deepspeed_files deepspeed_hooks_probe deepspeed_patches optimizer_state patching "
                    "torch_extensions versions"
                ).split()
            ),
            *(f"tests/contract/test_{name}.py" for name in ("deepspeed_hooks", "plugin_lifecycle")),
        )
    ),
    "compiled": Step(
        tests=(
            "tests/compile/unit",
            *(
                f"{_COMPILED}{name}.py"
                for name in (
                    "backend compiled_errors compiled_modules compiled_statistics compiled_transitions head_and_loss "
                    "memory_budget reports backend_by_name"
                ).split()
            ),
        ),
    ),
    "OpInfo": Step(tests=(f"{_COMPILED}compiled_opinfo.py",)),
    "parity": Step(tests=("tests/compile/dist/test_unit_parity.py",)),
    "features": Step(tests=tuple(f"tests/compile/dist/test_unit_{name}.py" for name in ("features", "failures"))),
    "reader": Step(
        tests=(_READER,),
        without=tuple(
            f"{_READER}::test_{name}[{world}-"
            for world in (1, 3)  # what is written by two ranks has all forms
            for name in (
                "weights_are_those_of_zero_to_fp32 masters_and_moments_are_those_of_the_live_optimizer "
                "what_is_known_besides_tensors stage_0_gives_the_weights_of_the_module verify_finds_nothing"
            ).split()
        ),
    ),
    "checkpoints": Step(tests=("tests/dist/test_resumes.py::test_a_training_goes_on",)),
    "statistics": Step(
        tests=(
            "tests/contract/test_statistics.py::test_numbers_are_those_of_numpy",
            "tests/contract/test_statistics.py::test_evaluation_has_no_gradients_and_is_a_step",
            f"{_CLEAN}[ort zero-3-bert]",
            f"{_CLEAN}[torch zero-3-bert]",
        )
    ),
    "accelerate": Step(
        tests=(
            f"{_COMPILED}backend_by_name.py",
            "tests/dist/test_checkpoint_frameworks.py::test_accelerate_saves_and_loads_state",
        )
    ),
}
"""The tests of each step; plain DeepSpeed and ``doctor`` come before them."""

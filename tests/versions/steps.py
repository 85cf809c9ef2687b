"""Which tests of the repository ``make matrix`` runs in each environment.

A short run takes those that another version of torch, DeepSpeed, transformers, accelerate or Python can make fail; what
depends on our own code alone is tested with the pinned versions by ``make test``. ``--full`` takes whole folders.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Step:
    """Tests whose counts are one column of the table.

    Attributes:
        short: files, or tests in them, of a short run.
        full: files or folders of a full run.
        without: what a short run leaves out of `short`: beginnings of the ids of tests.
        full_without_ort: files or folders of a full run where onnxruntime-training has no wheel, if they are others.
        needs_ort: whether they are left out where onnxruntime-training has no wheel.
        by_default: whether a short run has them for every pair.
    """

    short: tuple[str, ...]
    full: tuple[str, ...]
    without: tuple[str, ...] = ()
    full_without_ort: tuple[str, ...] = ()
    needs_ort: bool = True
    by_default: bool = True


def _in(folder: str, names: str) -> tuple[str, ...]:
    """Return the test files of a folder, or of the folder of that name among the old engine's tests."""
    found = []
    for name in names.split():
        file = f"{folder}/test_{name}"
        found.append(f"tests/{file}" if (_TESTS / file).exists() else f"tests/ortmodule/{file}")
    return tuple(found)


_HOOKS = (
    *_in(
        "unit",
        "deepspeed_files.py deepspeed_hooks_probe.py deepspeed_programs.py engine_patch.py gather_memory.py "
        "gather_reduce.py optimizer_state.py patching.py versions.py",
    ),
    *_in("contract", "deepspeed_hooks.py ortmodule_models.py"),
)
_EXPORTER = (
    *_in(
        "unit",
        "backward_ends.py block_copies.py fallback_policy.py impure_calls.py log.py pytree.py random_states.py "
        "replace_kernels.py shape_inference.py size_guard.py smaller_parts.py source_edits.py "
        "statistics_subscribers.py storage_writes.py tensor_splits.py trace_origins.py value_guards.py",
    ),
    *_in(
        "contract",
        "argument_writes.py attributes.py autograd_functions.py bare_ortmodule.py buffers_of_any_kind.py "
        "checkpointed_blocks.py embedding_symbolic.py excluded_modules.py fused_loss.py ortmodule_models.py "
        "pytorch_parts.py recurrent_layers.py results.py sizes.py wrapped_module.py",
    ),
)
_PARITY = "tests/ortmodule/dist/test_parity.py::test_trains_like_pytorch_and_in_ort"
_ZERO3 = "tests/ortmodule/dist/test_zero3_features.py::test_"
_READER = "tests/dist/test_deepspeed_reader.py"
_CLEAN = "tests/dist/test_statistics_ranks.py::test_clean_runs_are_the_same"

STEPS = {
    "one process": Step(
        short=_HOOKS,
        full=("tests/unit", "tests/contract", "tests/ortmodule/unit", "tests/ortmodule/contract"),
        full_without_ort=("tests/unit", "tests/contract"),
    ),
    "exporter": Step(short=_EXPORTER, full=_EXPORTER, by_default=False),
    "parity": Step(
        short=(
            f"{_PARITY}[mlp-[1,2,3]-2-{{}}]",
            f"{_PARITY}[bert-[1,2,3]-2-{{'gas':2}}]",
        ),
        full=("tests/ortmodule/dist/test_parity.py",),
    ),
    "zero3": Step(
        short=tuple(
            f"{_ZERO3}{name}"
            for name in (
                "weights_that_are_used_outside_of_their_module tied_weights_across_modules "
                "modules_that_are_called_several_times order_of_modules_that_changes_from_step_to_step "
                "modules_that_some_steps_leave_out freezing_and_unfreezing_in_mid_training "
                "layers_that_are_frozen_from_the_start reading_and_changing_weights_in_mid_training "
                "gradient_hooks_are_called_as_in_plain_deepspeed actor_and_critic "
                "a_loss_that_goes_through_two_engines a_module_whose_engine_was_destroyed_gets_another_one "
                "a_destroyed_engine_leaves_nothing_behind"
            ).split()
        ),
        full=("tests/ortmodule/dist/test_zero3_features.py",),
    ),
    "reader": Step(
        short=(_READER,),
        full=(_READER, "tests/dist/test_deepspeed_resume.py"),
        without=tuple(
            f"{_READER}::test_{name}[{world}-"
            for world in (1, 3, 8)  # what is written by two ranks has all forms
            for name in (
                "weights_are_those_of_zero_to_fp32 masters_and_moments_are_those_of_the_live_optimizer "
                "what_is_known_besides_tensors stage_0_gives_the_weights_of_the_module verify_finds_nothing"
            ).split()
        ),
        needs_ort=False,
    ),
    "checkpoints": Step(
        short=("tests/dist/test_sharded_checkpoints.py::test_masters_move_between_precisions",),
        full=("tests/dist/test_sharded_checkpoints.py", "tests/dist/test_aggregate_ranks.py"),
        needs_ort=False,
    ),
    "statistics": Step(
        short=(
            "tests/contract/test_statistics.py::test_numbers_are_those_of_numpy",
            "tests/contract/test_statistics.py::test_evaluation_has_no_gradients_and_is_a_step",
            f"{_CLEAN}[ort zero-3-bert]",
            f"{_CLEAN}[torch zero-3-bert]",
        ),
        full=("tests/contract/test_statistics.py", "tests/dist/test_statistics_ranks.py"),
        needs_ort=False,
    ),
    "accelerate": Step(
        short=(
            "tests/ortmodule/dist/test_trainer_example.py",
            "tests/dist/test_checkpoint_frameworks.py::test_accelerate_saves_and_loads_state",
        ),
        full=(
            "tests/dist/test_checkpoint_frameworks.py",
            "tests/ortmodule/dist/test_trainer_example.py",
        ),
        by_default=False,
    ),
}
"""The tests of each step; plain DeepSpeed, ``doctor`` and the C++ extensions come before them."""

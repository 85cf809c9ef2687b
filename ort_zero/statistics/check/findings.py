"""Define findings, and the table of what is said of each: kind, direction, text, advice, and whether it is certain."""

from __future__ import annotations

from dataclasses import dataclass

from ort_zero.statistics.check.history import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is wrong in a run, with the step and rank where it shows first."""

    kind: str
    step: int
    rank: int
    direction: str
    """``"forward"``, ``"backward"``, ``"parameter"``, ``"update"``, ``"input"`` or ``"mode"``."""
    module: str
    """Path of a module, or name of a parameter; empty for the whole model."""
    value: str
    text: str
    """What is wrong, the same for all steps and modules to which it happens."""
    advice: str
    """What to do."""
    certain: bool
    """False: the run may be as its user wants it."""
    others: int = 0
    """Number of other modules or parameters to which the same happens."""

    @property
    def place(self) -> str:
        """The module or parameter, and how many others there are."""
        return f"{self.module or '(root)'}{f' and {self.others} more' if self.others else ''}"


_OPTIMIZER_AFTER = "make the optimizer after the last change of the model (to, resize, tie, load)"
_CALL_THE_WRAPPER = (
    "call the wrapped model in every step, not the module inside; wrap after the last change of device, dtype or layers"
)
_TIE = "tie them again (model.tie_weights()) after what replaced one of them, then make the optimizer"

TEXTS: dict[str, dict[str, tuple[str, str, str]]] = {
    "not finite": {
        "nan in the batch": ("input", "the batch has it", "clean the data: the model gets it as it is"),
        "nan in a parameter": (
            "parameter", "a parameter has it before the forward; all that was recorded before is finite",
            "the last update made it: lower the learning rate, clip gradients, look at the optimizer's epsilon"),
        "nan in the forward": (
            "forward", "it arises in this module, whose parameters are finite and whose inputs have no NaN",
            "look for a division by 0, a logarithm or root of 0 and below, or an overflow in this module"),
        "overflow": ("forward", "values leave the range of float16 (65504) in this module, whose inputs are finite",
            "use bfloat16, or make the values of this module smaller"),
        "nan in the backward": ("backward", "it arises in the gradient of this tensor; the forward is finite",
            "look for a root, logarithm or division at 0 behind this tensor, and clip gradients"),
        "nan in the update": ("update", "gradients are finite after the backward, and not in the optimizer",
            "look at the loss, if it is computed outside the model, at the reduction, at unscaling and clipping"),
        "skipped": ("backward", "a loss scaler skips one step after the other",
            "gradients overflow at every scale: find the module with the largest values, or use bfloat16"),
    },
    "replicas apart": {
        "parameters apart": ("parameter", "the parameter differs between data-parallel ranks", _CALL_THE_WRAPPER),
        "gradients apart": ("backward", "the gradient in the optimizer differs between data-parallel ranks",
            _CALL_THE_WRAPPER),
        "shared apart": ("parameter", "tensor-parallel ranks share the parameter, and it differs between them",
            "make the update the same on all ranks: gradients, clipping, weight decay; then copy the weights of one"),
        "drifted apart": ("parameter",
            "the parameter was equal on all ranks and is not now: replicas may have drifted apart", _CALL_THE_WRAPPER),
    },
    "no update": {
        "unchanged": ("update", "the parameter has a gradient and a learning rate, and does not change",
            "raise its learning rate, and look at what resets the parameter"),
        "idle optimizer": ("update", "the optimizer steps, and no tensor in it has a gradient",
            f"call backward, and zero_grad() only after the step; give the optimizer what trains; {_OPTIMIZER_AFTER}"),
        "other tensor": ("update", "the optimizer holds another tensor than the model", _OPTIMIZER_AFTER),
        "stale gradient": ("update", "the gradient still contains that of an earlier update",
            "call optimizer.zero_grad() between an update and the next backward"),
        "zero gradients": ("backward", "every gradient is zero", "look at the loss: it may not depend on the model"),
        "frozen changes": ("update", "a frozen parameter changes",
            "set its grad to None, or take it out of the optimizer"),
        "lost in rounding": (
            "update", "the parameter has a gradient and does not change: updates may be lost in rounding",
            "keep a copy in float32 for the optimizer, or raise the learning rate"),
        "never a gradient": ("update",
            "the optimizer holds the parameter, and it never has a gradient: it may be unused", "freeze it, or use it"),
        "always zero": ("backward", "its gradient is always zero: the parameter may reach nothing",
            "look at what is computed from it"),
        "no optimizer": ("update", "the parameter has gradients, and no optimizer holds it: it may be forgotten",
            "give it to the optimizer, or freeze it with requires_grad_(False)"),
        "average": ("update", "a frozen parameter changes: it may be an average of others", "none if that is meant"),
    },
    "out of proportion": {
        "no rate": ("update", "the learning rate is 0 from the beginning", "look at the scheduler"),
        "large updates": ("update", "updates are larger than the weights that they change",
            "lower the learning rate, or warm it up"),
        "rate ends": ("update", "the learning rate became 0: the schedule may be shorter than the run",
            "look at the scheduler's number of steps, and where it steps"),
    },
    "dead or saturated": {
        "zero outputs": ("forward", "the output is zero in every element, step after step",
            "lower the learning rate, look at the initialization and at what comes before"),
        "constant outputs": (
            "forward", "the output has one value in every element, step after step: it may be saturated",
            "look at the initialization, and at the range of what comes before"),
    },
    "mode": {
        "trains in eval": ("mode", "after an evaluation, training goes on in evaluation mode",
            "call model.train() after each evaluation"),
        "dropout in eval": ("mode", "dropout is active in evaluation mode",
            "pass p=0, or self.training, in evaluation mode"),
        "unfitted": ("mode", "the module evaluates with statistics that no forward in training mode has computed",
            "run a forward in training mode first, or load trained statistics"),
        "only in eval": ("mode", "training runs in evaluation mode from the beginning, which may be meant",
            "call model.train() before training"),
        "evaluates in train": ("mode", "a forward without gradients runs in training mode, which may be meant",
            "call model.eval() before an evaluation"),
        "baseline": ("mode", "the module evaluates with untrained statistics before training: it may be a baseline",
            "run a forward in training mode first, or load trained statistics"),
        "part in train": (
            "mode", "the module is in training mode within a model in evaluation mode, which may be meant",
            "call model.eval() after the last change of a mode"),
        "not repeatable": ("mode", "an evaluation of the same batch gives another result: dropout may be active",
            "pass self.training to functional dropout"),
    },
    "data": {
        "equal batches": ("input", "data-parallel ranks train on the same batches",
            "use a DistributedSampler, or shard by rank"),
        "equal workers": ("input", "the workers of a data loader yield equal batches",
            "seed random generators in worker_init_fn; share an IterableDataset out by get_worker_info()"),
        "no labels": ("input", "every label of the batch is -100, which losses ignore",
            "look at masking and truncation"),
        "same batch again": ("input", "a batch follows itself: workers may draw the same random numbers",
            "seed NumPy in worker_init_fn, look at the sampler"),
        "a batch without labels": ("input", "every label of a batch is -100, which losses ignore; that may happen",
            "look at truncation"),
    },
    "untied": {
        "untied": ("parameter", "weights that were one tensor are two", _TIE),
        "not tied": ("parameter", "embeddings that the configuration ties are two tensors of the same values", _TIE),
        "perhaps tied": ("parameter", "embeddings that the configuration ties are two tensors, which may be meant",
            _TIE),
    },
}  # fmt: skip
"""By kind and name: direction, what is wrong, what to do."""
_HINTS = frozenset((
    "drifted apart", "lost in rounding", "never a gradient", "always zero", "no optimizer", "average", "rate ends",
    "constant outputs", "only in eval", "evaluates in train", "baseline", "part in train", "not repeatable",
    "same batch again", "a batch without labels", "perhaps tied",
))  # fmt: skip
"""Names of what may be as the user wants it; the text says "may"."""
_KINDS = {name: kind for kind, texts in TEXTS.items() for name in texts}


def found(name: str, record: StepRecord, module: str = "", value: str = "") -> Finding:
    """Return the finding with a name in :data:`TEXTS`, at the step and rank of a record."""
    kind = _KINDS[name]
    direction, text, advice = TEXTS[kind][name]
    return Finding(
        kind=kind, step=record.step, rank=record.rank, direction=direction, module=module, value=value, text=text,
        advice=advice, certain=name not in _HINTS,
    )  # fmt: skip

"""The decision about graphs: the whole table, without ONNX Runtime."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ort_zero.ortmodule.runtime.export import pytree
from ort_zero.ortmodule.runtime.guards.decide import decide
from ort_zero.ortmodule.runtime.guards.keys import (
    Action,
    ExportKey,
    Graphs,
    KnownGraph,
    ModelVersion,
    Observed,
    PostExportProcessedModelInfo,
    ProcessKey,
    TensorInput,
)


def forward(input_ids, mask=None, *rest, flag=False, **more):
    """Have every kind of parameter."""


PLAIN, FIRST = ProcessKey(), ModelVersion()


def observed(*args, process=PLAIN, model=FIRST, readers=(), **kwargs) -> Observed:
    call = pytree.flatten_call(args, kwargs, pytree.parameters_of(forward))
    tensors = tuple(TensorInput(n, str(t.dtype), t.dim()) for n, t in zip(call.names, call.tensors, strict=True))
    return Observed(ExportKey(call.structure, tensors, model, readers), process)


def graphs(*known: Observed, differentiable=frozenset()) -> Graphs:
    """Return graphs that were made for these calls, last used first."""
    return Graphs(tuple(KnownGraph(i + 1, o.export, o.process, frozenset(differentiable)) for i, o in enumerate(known)))


IDS, MASK = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8)


def test_the_first_call_exports():
    transition = decide(Graphs(), observed(IDS))
    assert (transition.action, transition.reasons) == (Action.EXPORT, ("first call",))
    assert transition.action.builds


@pytest.mark.parametrize(
    "ids", [torch.ones_like(IDS), torch.zeros(2, 5, dtype=torch.int64), torch.zeros(7, 8, dtype=torch.int64)],
    ids=["another step", "another length", "another batch size"],
)  # fmt: skip
def test_what_is_reused(ids):
    known = observed(IDS, flag=True, mask=MASK)
    transition = decide(graphs(known), observed(ids, flag=True, mask=MASK[:, : ids.shape[1]]))
    assert (transition.action, transition.reasons, transition.graph) == (Action.REUSE, (), 1)
    assert not transition.action.builds


ANEW = [
    (((IDS,), {}), ((IDS,), {"labels": IDS.clone()}), 'input "labels" appeared'),
    (((IDS,), {"labels": IDS.clone()}), ((IDS,), {}), 'input "labels" disappeared'),
    (((IDS,), {"labels": None}), ((IDS,), {"labels": IDS.clone()}), 'input "labels" appeared'),
    (((IDS,), {"labels": IDS.clone()}), ((IDS,), {"labels": None}), 'input "labels" disappeared'),
    (((IDS,), {}), ((IDS,), {"labels": None}), '"labels": not given -> None'),
    (((IDS,), {"mask": MASK}), ((IDS,), {"mask": MASK.double()}), 'input "mask": torch.float32 -> torch.float64'),
    (((IDS,), {"mask": MASK}), ((IDS,), {"mask": MASK[None]}), 'input "mask": rank 2 -> 3'),
    (((IDS, MASK, False), {}), ((IDS, MASK, True), {}), "arg 2: bool False -> True"),
    (((IDS,), {"flag": False}), ((IDS,), {"flag": True}), '"flag": bool False -> True'),
    (((IDS,), {"k": 1}), ((IDS,), {"k": 2}), '"k": int 1 -> 2'),
    (((IDS,), {"k": 1.0}), ((IDS,), {"k": 2.0}), '"k": float 1.0 -> 2.0'),
    (((IDS,), {"k": 1}), ((IDS,), {"k": 1.0}), '"k": 1 -> 1.0'),
    (((IDS,), {"k": 1}), ((IDS,), {"k": True}), '"k": 1 -> True'),
    (((IDS,), {"k": "a"}), ((IDS,), {"k": "b"}), "\"k\": str 'a' -> 'b'"),
    (((IDS,), {"k": 1}), ((IDS,), {"k": None}), '"k": 1 -> None'),
    (((IDS,), {"xs": [MASK]}), ((IDS,), {"xs": [MASK, MASK.clone()]}), 'input "xs"[1] appeared'),
    (((IDS,), {"xs": [MASK]}), ((IDS,), {"xs": (MASK,)}), '"xs": list -> tuple'),
    (((IDS,), {"s": {"a": 1, "b": {"c": 2}}}), ((IDS,), {"s": {"a": 1, "b": {"c": 3}}}),
     "\"s\"['b']['c']: int 2 -> 3"),
    (((IDS,), {"mask": MASK}), ((IDS,), {"mask": IDS}),
     'input "mask" is another tensor than before among those given twice'),
    (((IDS,), {"k": 1, "mask": MASK}), ((IDS,), {"mask": MASK, "k": 1}), "arguments are given in another order"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "reason"), ANEW, ids=[reason for *_, reason in ANEW])
def test_what_exports_anew(old, new, reason):
    before, after = observed(*old[0], **old[1]), observed(*new[0], **new[1])
    transition = decide(graphs(before), after)
    assert transition.action is Action.EXPORT
    assert reason in transition.reasons
    assert decide(graphs(before), before).action is Action.REUSE


def test_an_argument_that_comes_in_between_is_the_only_one_named():
    labels = IDS.clone()
    before, after = observed(IDS, labels=labels), observed(IDS, mask=MASK, labels=labels)
    assert decide(graphs(before), after).reasons == ('input "mask" appeared',)


def test_all_reasons_are_listed():
    before = observed(IDS, flag=False, mask=MASK)
    after = observed(IDS, flag=True, mask=MASK.double(), labels=IDS.clone(), process=ProcessKey(frozen=("a.weight",)))
    assert set(decide(graphs(before), after).reasons) == {
        '"flag": bool False -> True',
        'input "mask": torch.float32 -> torch.float64',
        'input "labels" appeared',
        'parameter "a.weight" frozen',
    }


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ModelVersion(1, ('layer "h.0" was replaced (A -> B)',)), 'layer "h.0" was replaced (A -> B)'),
        (ModelVersion(0, (), b"\1\0\0"), "2 submodules to eval()"),
    ],
)
def test_an_edited_module_exports_anew(model, reason):
    known = observed(IDS, model=ModelVersion(0, (), b"\1\1\1"))
    if model.number:
        model = dataclasses.replace(model, modes=b"\1\1\1")
    transition = decide(graphs(known), observed(IDS, model=model))
    assert (transition.action, transition.reasons) == (Action.EXPORT, (reason,))


def test_readers_export_anew():
    session = object()
    there = observed(IDS, readers=(session,))
    assert decide(graphs(observed(IDS)), there).reasons == ("subscribers read values",)
    assert decide(graphs(there), observed(IDS)).reasons == ("no subscriber reads values any more",)
    assert decide(graphs(there), observed(IDS, readers=(object(),))).action is Action.EXPORT


PROCESSED = [
    (ProcessKey(), ProcessKey(frozen=("a",)), 'parameter "a" frozen'),
    (ProcessKey(frozen=("a",)), ProcessKey(), 'parameter "a" no longer frozen'),
    (ProcessKey(), ProcessKey(frozen=tuple("abcdef")), "6 parameters (a, b, c and 3 more) frozen"),
    (ProcessKey(), ProcessKey(frozen=("h.0.a.w", "h.0.b.w")), '2 parameters of "h.0" frozen'),
    (ProcessKey(), ProcessKey(frozen=("a.w", "b.w")), "2 parameters (a.w, b.w) frozen"),
    (ProcessKey(), ProcessKey(inputs=("mask",)), 'input "mask": requires_grad False -> True'),
    (ProcessKey(inputs=("mask",)), ProcessKey(), 'input "mask": requires_grad True -> False'),
    (ProcessKey(), ProcessKey(memory_plan="Gelu+:1:-1"), "memory plan: none -> Gelu+:1:-1"),
    (ProcessKey(), ProcessKey(deterministic=True), "deterministic algorithms: False -> True"),
    (ProcessKey(), ProcessKey(device="cuda:0"), "device: cpu -> cuda:0"),
]


@pytest.mark.parametrize(("old", "new", "reason"), PROCESSED, ids=[reason for *_, reason in PROCESSED])
def test_what_is_only_re_processed(old, new, reason):
    before, after = observed(IDS, mask=MASK, process=old), observed(IDS, mask=MASK, process=new)
    transition = decide(graphs(before, differentiable={"mask"}), after)
    assert (transition.action, transition.reasons, transition.graph) == (Action.REPROCESS, (reason,), 1)
    assert transition.action.builds


def test_an_input_that_was_traced_without_gradient_exports_anew_for_one():
    before, after = observed(IDS, mask=MASK), observed(IDS, mask=MASK, process=ProcessKey(inputs=("mask",)))
    transition = decide(graphs(before), after)
    assert transition.action is Action.EXPORT
    assert transition.reasons == ('input "mask": requires_grad False -> True',)


def test_earlier_graphs_are_used_again():
    plain, labelled, frozen = observed(IDS), observed(IDS, labels=IDS.clone()), ProcessKey(frozen=("a",))
    known = graphs(plain, labelled, observed(IDS, process=frozen))
    assert decide(known, labelled).action is Action.SWITCH and decide(known, labelled).graph == 2
    assert decide(known, labelled).reasons == ('input "labels" appeared',)
    assert decide(known, observed(IDS, process=frozen)).graph == 3
    made = decide(known, observed(IDS, labels=IDS.clone(), process=frozen))
    assert (made.action, made.graph) == (Action.REPROCESS, 2)


def test_records_cannot_be_changed():
    known = graphs(observed(IDS)).known[0]
    for record, name in ((known, "number"), (known.export, "tensors"), (known.process, "frozen"),
                         (decide(Graphs(), observed(IDS)), "action")):  # fmt: skip
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)


def test_inputs_of_a_run_are_parameters_arguments_and_buffers_in_the_order_of_the_graph():
    info = PostExportProcessedModelInfo(
        onnx_graph_input_names=("ids", "weight", "buffer"),
        onnx_graph_input_names_require_grad=("weight",),
        onnx_graph_input_names_user_defined=("ids",),
        onnx_graph_input_names_require_grad_user_defined=(),
        dynamic_axes_map={"ids": {0: "ids_dim0"}},
        buffer_for_ort_runs={"ids": None, "weight": "W", "buffer": None},
        data_accessor={"ids": lambda tensors: tensors["ids"], "buffer": lambda tensors: "B"},
        module_forward_output_schema="schema",
        build_result=lambda tensors, schema, objects, call, held: (tensors, schema, objects),
    )
    assert info.construct_inputs({"ids": 1, "unused": 2}) == [1, "W", "B"]
    assert info.construct_inputs({"ids": 3}) == [3, "W", "B"]  # and the call before is not kept
    assert info.buffer_for_ort_runs["ids"] is None
    assert info.restore_outputs([1], ["mine"]) == ([1], "schema", ["mine"])

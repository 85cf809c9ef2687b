"""One message from what the exporter or ORT raised: the cause, the user's line, the way out."""

from __future__ import annotations

import pytest
from torch import nn

from ort_zero.errors import ExportError, GraphEditError, RankError
from ort_zero.ortmodule.runtime.error_messages import explain

SITE = "/venv/lib/python3.11/site-packages"


class Net(nn.Module):
    """The user's module."""


def traceback(*frames: tuple[str, int, str], error: str) -> str:
    """Return what ORTModule makes of an exception: its own sentence and a whole traceback."""
    lines = [f'  File "{path}", line {line}, in {name}\n    some_code()' for path, line, name in frames]
    return "\n".join(
        ["There was an error while exporting the PyTorch model to ONNX: ", "", "Traceback (most recent call last):"]
        + [*lines, error, ""]
    )


def message(text: str | BaseException) -> str:
    error = text if isinstance(text, BaseException) else RuntimeError(text)
    result = explain(error, Net())
    assert type(result) is ExportError
    return str(result)


CHECKPOINT_FRAMES = (
    ("/home/me/train.py", 41, "forward"),
    (f"{SITE}/torch/utils/checkpoint.py", 503, "checkpoint"),
    (f"{SITE}/onnxruntime/training/ortmodule/_custom_autograd_function_exporter.py", 240, "_export_pt_1_10"),
)


@pytest.mark.parametrize(
    "text",
    [
        traceback(*CHECKPOINT_FRAMES, error="RuntimeError: stopped"),
        traceback(
            ("/home/me/train.py", 41, "forward"),
            error="Exception: The autograd.Function <class 'torch.utils.checkpoint.CheckpointFunction'> cannot be "
            "exported: Exporting the operator 'prim::PythonOp' to ONNX opset version 17 is not supported.",
        ),
        traceback(
            ("/home/me/train.py", 41, "forward"),
            (f"{SITE}/torch/_dynamo/eval_frame.py", 1, "wrapper"),
            error="RuntimeError: Detected that you are using FX to torch.jit.trace a dynamo-optimized function. "
            "This is not supported at the moment.",
        ),
        traceback(
            ("/home/me/train.py", 41, "forward"),
            error="TypeError: 'NoneType' object is not callable: self._gradient_checkpointing_func",
        ),
    ],
)
def test_activation_checkpointing_wins_over_what_it_led_to(text):
    said = message(text)
    assert said.startswith(
        "Net cannot run in ONNX Runtime: the module uses torch activation checkpointing, which cannot be exported"
    )
    assert "gradient_checkpointing_disable()" in said and '{"memory": {"checkpointing": "recompute"}}' in said
    assert "(at /home/me/train.py:41 in forward)" in said


@pytest.mark.parametrize(
    ("text", "operator"),
    [
        (
            "torch.onnx.errors.UnsupportedOperatorError: Exporting the operator 'aten::fft_rfft' to ONNX opset version "
            "17 is not supported. Please feel free to request support or submit a pull request.",
            "aten::fft_rfft",
        ),
        (
            "torch.onnx.errors.OnnxExporterError: Unsupported: ONNX export of operator adaptive pooling. Please open",
            "adaptive",
        ),
        ("torch.onnx.errors.SymbolicValueError: Unsupported: ONNX export of operator unfold. Please", "unfold"),
        (
            "torch.onnx.errors.UnsupportedOperatorError: ONNX export failed on an operator with unrecognized "
            "namespace torchvision::nms. If you are trying to export a custom operator, make sure you registered it",
            "torchvision::nms",
        ),
    ],
)
def test_a_missing_symbolic_names_the_operator_and_the_users_line(text, operator):
    frames = (
        ("/home/me/run.py", 3, "<module>"),
        (f"{SITE}/torch/nn/modules/module.py", 1786, "_call_impl"),
        ("/home/me/model.py", 17, "forward"),
        (f"{SITE}/torch/onnx/_internal/torchscript_exporter/utils.py", 506, "export"),
    )
    said = message(traceback(*frames, error=text))
    assert f": the exporter has no symbolic for the operator {operator} (at /home/me/model.py:17 in forward). " in said


def test_a_missing_kernel_names_the_operator_with_its_version():
    said = message(
        "[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for ReduceMean(13) node with name "
        "'/norm/ReduceMean'"
    )
    assert "provider has no kernel for the operator ReduceMean(13) with these types. " in said
    assert "(at " not in said


def test_a_missing_gradient_names_the_operator():
    said = message(
        "/src/gradient_builder_registry.cc:29 GetGradientForOp(...) gradient_builder != nullptr was false. The "
        "gradient builder has not been registered: CumSum for node /_original_module/CumSum\n"
    )
    assert said.startswith("Net cannot run in ONNX Runtime: ONNX Runtime has no gradient for the operator CumSum. ")


def test_an_input_type_that_onnx_has_not_is_named():
    said = message(
        "ORTModuleIOError: ORTModule does not support input type <class 'torch.Generator'> for input rng\nmore"
    )
    assert "an input has a type that ONNX cannot pass: <class 'torch.Generator'> for input rng. " in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[ONNXRuntimeError] : 1 : FAIL : This is an invalid model. Error: Duplicate definition of name (x).",
            "This is an invalid model. Error: Duplicate definition of name (x).",
        ),
        (
            "/onnxruntime_src/onnxruntime/core/session/inference_session.cc:17 void onnxruntime::A::B(const std::pair<"
            "int, int>&) [ONNXRuntimeError] : 10 : INVALID_GRAPH : Node (/Add) has input size 1 not in range [2, 2].",
            "Node (/Add) has input size 1 not in range [2, 2].",
        ),
        (
            "/onnxruntime_src/orttraining/core/x.cc:438 void onnxruntime::training::Builder::Find(int) "
            "node_found was false. A node is not found in the training graph.",
            "A node is not found in the training graph.",
        ),
        (
            "/onnxruntime_src/orttraining/core/y.cc:123 onnxruntime::Y::Y(Graph*, const std::function<void(int)>&) "
            "29: couldn't find the producer node (of a result)",
            "29: couldn't find the producer node (of a result).",
        ),
    ],
)
def test_what_ort_says_comes_without_its_signature(text, said):
    assert message(text).startswith(f"Net cannot run in ONNX Runtime: {said} Run the model in PyTorch")


def test_a_nodes_name_tells_the_module():
    said = message(
        "[ONNXRuntimeError] : 1 : FAIL : Type Error: Node (/_original_module/model/layers.0/self_attn/MatMul_3) has a "
        "type that does not fit"
    )
    assert "does not fit (in model.layers.0.self_attn). Run" in said
    assert "(in " not in message("Node (/_original_module/MatMul_3) is wrong")


class Inner(nn.Module):
    """Raises."""

    def forward(self, x):
        raise ValueError("no such thing")


def test_a_live_traceback_tells_module_and_line_where_the_text_has_none():
    net = Net()
    net.blocks = nn.ModuleList([nn.Identity(), Inner()])
    try:
        net.blocks[1](1)
    except ValueError as error:
        said = str(explain(error, net))
    assert "no such thing (in blocks.1, at " in said and "test_error_messages.py:" in said and " in forward). " in said


def test_a_traceback_is_found_behind_an_error_that_was_never_raised():
    net = Net()
    net.inner = Inner()
    try:
        try:
            net.inner(1)
        except ValueError:
            raise KeyError("wrapped") from RuntimeError("never raised")
    except KeyError as error:
        said = str(explain(error, net))
    assert "(in inner, at " in said


def test_gradients_inside_the_forward_and_hidden_results_have_words_of_their_own():
    said = message("element 0 of tensors does not require grad and does not have a grad_fn")
    assert "computes gradients inside its forward" in said and "torch.autograd.grad" in said
    said = message("/onnxruntime_src/a.cc:438 void B() found was false. YieldOp is not found in the training graph.")
    assert "returns no tensor that depends on its weights" in said and "return a tuple, list, dict or dataclass" in said


def test_anything_else_is_quoted_by_the_last_error_line_of_the_traceback():
    text = traceback(
        ("/home/me/model.py", 8, "forward"),
        (f"{SITE}/torch/nn/functional.py", 2, "linear"),
        error="ValueError: expected 3 heads\n(see the notes below)\nnote 1",
    )
    assert message(text).startswith(
        "Net cannot run in ONNX Runtime: ValueError: expected 3 heads (at /home/me/model.py:8 in forward). "
    )


def test_a_text_without_an_error_line_is_quoted_by_its_last_line_and_an_empty_one_by_its_type():
    assert ": second line. " in message("first line\nsecond line\n\n")
    assert ": KeyError. " in message(KeyError())


def test_every_message_offers_the_way_out():
    said = message("anything")
    assert said.endswith(
        'Run the model in PyTorch with "ort_zero": {"ortmodule": {"enabled": false}}, or let ort_zero do so by itself '
        'with {"ortmodule": {"fallback": "warn"}}'
    )


@pytest.mark.parametrize(
    "error",
    [
        ExportError("x"),
        GraphEditError("Exporting the operator 'a::b'"),
        RankError("rank 1: x", {1: "x"}),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
)
def test_our_own_errors_and_interrupts_pass_through(error):
    assert explain(error, Net()) is error

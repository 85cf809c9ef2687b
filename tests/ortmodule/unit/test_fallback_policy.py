"""What ORT's error messages teach about operators, without ORT."""

from __future__ import annotations

import pytest

from ort_zero.ortmodule.runtime.operators.fallback_policy import FallbackPolicy


class Node:
    """A traced operator with one output that requires grad or not."""

    def __init__(self, requires_grad: bool):
        self.outputs = [type("Value", (), {"requires_grad": requires_grad})()]


def policy(training: bool = True) -> FallbackPolicy:
    return FallbackPolicy(training, lambda name, function: None)


@pytest.mark.parametrize(
    ("message", "operator"),
    [
        ("[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : Could not find an implementation for Det(11) node 'x'", "Det"),
        ("Could not find an implementation for ConvTransposeGrad(1) node with name 'a'", "ConvTranspose"),
        ("Could not find an implementation for SoftmaxGrad_13(1) node with name 'a'", "Softmax"),
        ("gradient builder has not been registered: GridSample for node y", "GridSample"),
    ],
)
def test_a_missing_kernel_or_gradient_is_learned_once(message, operator):
    learned = policy()
    assert learned.after(Node(True), ["Add", operator]) is None or operator in ("Det", "GridSample")
    assert learned.learn(message)
    assert operator.removesuffix("Grad") in learned.after(Node(False), ["Add", operator])
    assert not learned.learn(message)


def test_other_messages_teach_nothing():
    assert not policy().learn("Duplicate definition of name (x_grad)")


def test_what_has_no_gradient_in_ort_is_avoided_only_where_a_gradient_is_wanted():
    assert policy().after(Node(True), ["CumSum"]) == "ONNX Runtime has no gradient for CumSum"
    assert policy().after(Node(False), ["CumSum"]) is None
    assert policy(training=False).after(Node(True), ["CumSum"]) is None

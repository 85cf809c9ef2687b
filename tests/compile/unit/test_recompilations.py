"""Dynamo's reasons for a new graph, in words."""

from __future__ import annotations

import pytest

from ort_zero.compat.dynamo_guards import way_out, words_of

VALUES = {"self.scale": "2.0", "mask": "a Tensor", "d": "a dict", "len(names)": "3"}

WORDS = {
    "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 6": "size 0 of x is 6, was 4",
    "0/1: tensor 'x' rank mismatch. expected 2, actual 3": "x has 3 dimensions, had 2",
    "0/0: tensor 'x' stride mismatch at index 0. expected 8, actual 1": "stride 0 of x is 1, was 8",
    "0/0: tensor 'x' dtype mismatch. expected Float, actual BFloat16": "x is BFloat16, was Float",
    "0/7: tensor 'self._modules['l']._parameters['weight']' requires_grad mismatch. expected requires_grad=1. Guard "
    "failed on a parameter": "self.l.weight requires no gradient, and did",
    "0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0": "x requires a gradient, and did not",
    "0/15: GLOBAL_STATE changed: grad_mode ": "torch's setting changed: grad_mode",
    "0/5: expected type of 'm' to be a tensor type, ' but found <class 'NoneType'>": "m is NoneType, was a tensor",
    '0/1: self.scale == 1.0       # y=y*self.scale  # odel.py:7 in forward\nUser stack trace:\n  File "/a/model.py", '
    "line 7, in forward": "self.scale is 2.0, was 1.0 (/a/model.py:7)",
    "0/4: mask is None    # if mask is not None:  # m.py:9 in forward": "mask is a Tensor, was None (m.py:9)",
    "0/6: ___check_type_id(d, 139751424626336), type=<class 'list'>  # x  # m.py:1 in f (HINT: type list)":
        "d is a dict, was list (m.py:1)",
    "0/0: not ___dict_contains('k', self.__dict__)     # return x * self.k  # m.py:1 in f":
        "self.k is set on the object, was the class's (m.py:1)",
    # an expression of Dynamo's own names, and a text that nobody has seen yet
    "0/0: ___key_to_id(d) == [1]  # x  # m.py:1 in f":
        "a value has changed for which the user's code has no name (m.py:1)",
    "0/2: tensor '___stack0' size mismatch at index 0. expected 4, actual 6":
        "a value has changed for which the user's code has no name",
    "0/0: something else\nwith details": "something else",
}  # fmt: skip


@pytest.mark.parametrize(("reason", "words"), WORDS.items(), ids=WORDS.values())  # an address differs by process
def test_words(reason, words):
    assert words_of(reason, VALUES.get) == words


def test_ways_out():
    assert "pad" in way_out("size 0 of x is 6, was 4")
    assert "evaluate" in way_out("x requires no gradient, and did")
    assert "buffer" in way_out("self.scale is 2.0, was 1.0 (m.py:7)")
    assert way_out("something else") == ""

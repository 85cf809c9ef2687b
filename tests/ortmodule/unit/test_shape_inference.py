"""Shapes of what a function returns, by symbols."""

from __future__ import annotations

import torch

from ort_zero.ortmodule.runtime.operators.shape_inference import ones_that_stay, output_shapes

F32 = torch.float32


def shapes(function, *given, dtypes=None):
    return output_shapes(lambda *tensors: [function(*tensors)], given, dtypes or [F32] * len(given))


def test_symbols_and_numbers_are_told_apart():
    assert shapes(lambda x: x.relu(), ["batch", 5, None]) == [["batch", 5, None]]
    assert shapes(lambda x: x.sum(1, keepdim=True), ["batch", "length"]) == [["batch", 1]]
    assert shapes(lambda x: x.transpose(0, 1), ["batch", "length"]) == [["length", "batch"]]
    assert shapes(lambda x: x.reshape(-1, 5), ["batch", "length", 5]) == [[None, 5]]


def test_symbols_that_have_to_be_equal():
    assert shapes(lambda a, b: a + b, ["batch", 3], ["rows", 3]) in ([["batch", 3]], [["rows", 3]])


def test_symbols_that_have_to_be_divisible():
    assert shapes(lambda x: x.reshape(x.shape[0], -1, 8), ["batch", "length"]) == [["batch", None, 8]]


def test_the_second_argument_is_broadcast():
    assert shapes(lambda a, b: a * b, ["batch", 7], [1, 7]) == [["batch", 7]]


def test_dtypes_count():
    assert shapes(lambda x, i: x[i], ["batch", 3], [4], dtypes=[F32, torch.int64]) == [[4, 3]]


def test_a_function_that_cannot_be_tried_has_no_shapes():
    def needs_data(x):
        return x[x > 0]

    assert shapes(needs_data, ["batch"]) is None
    assert shapes(lambda x: x.reshape(3, 5), ["batch", "length"]) is None


def test_a_function_without_symbols():
    assert shapes(lambda x: x.t(), [2, 3]) == [[3, 2]]


def ones(function, known, traced):
    return ones_that_stay(lambda *tensors: list(function(*tensors)), known, traced, [F32] * len(known))


def test_a_batch_of_one_is_no_axis_of_size_one():
    # the 5 is constant, which is not known, and the function wants it
    assert ones(lambda x: x.unbind(1), [[None, None, 6]], [[1, 5, 6]]) == [[None, None]] * 5


def test_what_keepdim_leaves_stays():
    found = ones(lambda x: (sum(x.unbind(1))[:, None].sum(-1, keepdim=True),), [[None, None, 6]], [[1, 5, 6]])
    assert found == [[None, 1, 1]]


def test_sizes_of_one_argument_that_another_one_knows():
    found = ones(lambda a, b: (a * b,), [[None, None, 6], [None, None, None]], [[1, 5, 6], [1, 5, 6]])
    assert found == [[None, None, None]]


def test_a_function_that_takes_no_sizes_at_all():
    def fails(x):
        raise ValueError

    assert ones(fails, [[None]], [[1]]) == []


def test_as_many_pieces_of_another_size():
    def split(x):
        return x.split(2, 1)

    assert ones(split, [[None, None, 6]], [[1, 1, 6]]) == [[None, None, None]]
    assert ones(split, [[None, None, 6]], [[2, 2, 6]]) == [[None, None, None]]
    assert ones(split, [[None, None, 6]], [[4, 3, 6]]) == [[None, None, None]] * 2
    assert ones(lambda x: x.split(1, 1), [[None, None, 6]], [[4, 3, 6]]) == [[None, 1, None]] * 3


def test_nothing_is_known_where_sizes_of_one_cannot_vary_together():
    convolution = torch.nn.functional.conv1d
    assert ones(
        lambda x, w: [convolution(x, w, groups=8)], [[None, 8, None], [8, None, None]], [[1, 8, 4], [8, 1, 1]]
    ) == [[None, None, None]]

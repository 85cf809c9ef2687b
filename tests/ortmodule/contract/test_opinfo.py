"""Every operator of torch's OpInfo table, by its first float32 sample: PyTorch's results and gradients, or words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from ort_zero.config import OrtModuleConfig
from ort_zero.errors import ExportError
from ort_zero.ortmodule.wrap import wrap_model

# importing the table forbids the process to change settings of torch, which other tests do
setattr(torch.backends, "__allow_nonbracketed_mutation_flag", True)
OPERATORS = {
    f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op
    for op in op_db
    if torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith("jiterator")  # CUDA alone
}
RANDOM = frozenset(
    "bernoulli cauchy empty empty_like empty_permuted empty_strided exponential geometric log_normal multinomial "
    "new_empty new_empty_strided nn.functional.multi_head_attention_forward nn.functional.rrelu normal "
    "normal.in_place normal.number_mean rand_like randint_like randn randn_like uniform".split()
)
"""Operators whose numbers come from another generator than torch's, or from memory that nobody has written."""
REFUSED = {
    "broadcast_shapes": "returns no tensor that depends on its weights",
    "fill": "We don't have an op for aten::full_like",
    "hash_tensor": "UInt64",
    "histogramdd": "incorrect number of outputs",
    **{
        f"nn.functional.linear_cross_entropy{variant}": "tuple index out of range"  # of a label without dimensions
        for variant in ("", ".chunked", ".chunked_none")
    },
    "randint": "invalid model",  # without any tensor among the arguments
    "sparse.mm.reduce": "sparse_csr tensor",
    "squeeze": "name those axes alone",
    "tensor_split": "tensor_split expected tensor_indices_or_sections",
    "to_sparse": "sparse tensor",
    "zero_": "couldn't find the consumer node",
}
"""Operators of which a graph is refused, and what the error says."""


class Call(nn.Module):
    """One call of an operator: its tensors are the arguments, and what is no tensor belongs to the module."""

    def __init__(self, op: Any, sample: Any):
        super().__init__()
        self.op = op
        self.output_of = sample.output_process_fn_grad
        leaves, self.structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[i] for i in self.places]

    def forward(self, *tensors):
        leaves = list(self.constants)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return self.output_of(self.op.op(first, *args, **kwargs))


def results_of(called: Any, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Return the tensors that a call returns, and the gradients of their sum."""
    inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    torch.manual_seed(0)
    outputs = [leaf for leaf in pytree.tree_leaves(called(*inputs)) if isinstance(leaf, torch.Tensor)]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    ends = [torch.view_as_real(out.resolve_conj()) if out.is_complex() else out for out in outputs if out.requires_grad]
    ends = [end for end in ends if end.numel()]
    gradients: tuple = (None,) * len(wanted)
    if ends and wanted:
        gradients = torch.autograd.grad([end.sum() for end in ends], wanted, allow_unused=True)
    return [out.detach() for out in outputs], list(gradients)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_pytorchs_results_and_gradients(name):
    op = OPERATORS[name]
    sample = next(iter(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)), None)
    assert sample is not None
    call = Call(op, sample)
    expected, expected_gradients = results_of(call, call.tensors)
    _, wrapped = wrap_model(call, OrtModuleConfig(log_level="ERROR", cache_dir=None), stage=0)
    try:
        found, gradients = results_of(wrapped, call.tensors)
    except ExportError as error:
        assert name in REFUSED and REFUSED[name] in str(error), str(error)
        return
    assert name not in REFUSED
    assert [(out.shape, out.dtype) for out in found] == [(out.shape, out.dtype) for out in expected]
    if name in RANDOM:
        return
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        if theirs is not None and ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, equal_nan=True)
        else:
            assert ours is None or not ours.any()

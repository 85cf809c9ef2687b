"""Group the operators of ONNX Runtime and of PyTorch by their work: a group is one row of the comparison."""

from __future__ import annotations

import functools
import re

OTHER = "other operators"
_VIEWS = (
    "Shape Reshape Squeeze Unsqueeze Flatten Size Range Constant view reshape _reshape_alias _unsafe_view transpose t "
    "permute expand slice select as_strided squeeze unsqueeze split split_with_sizes chunk unbind narrow detach "
    "detach_ empty empty_like empty_strided resize_ set_ arange view_as expand_as flatten alias lift_fresh"
)
_GROUPS = {
    "shapes and views": rf"^({_VIEWS.replace(' ', '|')})$",
    "attention": "(?i)attention",
    "loss": "(?i)loss",
    "softmax": "(?i)softmax|is_?nan",
    "normalization": "(?i)norm",
    "convolution": "(?i)conv",
    "pooling": "(?i)pool",
    "dropout": "(?i)dropout|bernoulli",
    "matrix products": r"(?i)gemm|matmul|^(add)?b?mm$|^baddbmm$|addmv|^mv$|^dot$|tensordot|linear",
    "activations": "(?i)relu|gelu|silu|elu|tanh|sigmoid|erf|hardswish|softplus|clamp_min|threshold",
    "embedding and gathering": "(?i)gather|scatter|embedding|index",
    "sums over axes": "Reduce|Arg|CumSum|^(sum|mean|var|max|min|amax|amin|cumsum|argmax)$",
    "element by element": r"(?i)^(add|sub|rsub|mul|div|neg|pow|r?sqrt|exp|log|sin|cos|abs|sign|reciprocal|(scaled)?sum|"
    r"clip|clamp|where|and|or|not|equal|(less|greater)(orequal)?|eq|ne|[lg][te]|min|max|minimum|maximum|addcmul|addcdiv|"
    r"lerp|tri[lu]+|masked_fill|inplaceaccumulatorv2|(logical|bitwise)_\w+)_?$",
    "copies, casts and zeros": "(?i)transpose|concat|^cat$|stack|split|slice|pad|expand|tile|repeat|cast|identity|zero|"
    "constant|ones|full|fill|resize|copy|clone|contiguous|^to$|select_backward|flip|roll",
}
"""A pattern for the names of operators, without their namespace, by the name of their group; the first one counts."""


@functools.cache
def group_of(operator: str) -> str:
    """Return the name of an operator's group; :data:`OTHER` for an operator without a group."""
    namespace, _, name = operator.rpartition("::")
    if namespace not in ("", "aten", "mkldnn", "mkl"):
        return OTHER
    for group, pattern in _GROUPS.items():
        if re.search(pattern, name):
            return group
    return OTHER

"""Small BERT, GPT-2 and convolutional models, their data, and faults to put into them."""

from __future__ import annotations

from unittest import mock

import tiny_models
import torch
from torch import nn
from torch.nn import functional as F

WORDS = 200


def _biased(model: nn.Module) -> nn.Module:
    """Give biases values, so that a dropped one is missed."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("bias"):
                value.copy_(0.02 * torch.randn(value.shape, generator=generator))
    return model


def bert(attention: str = "eager", dropout: float = 0.0) -> nn.Module:
    """Return a BERT of three layers."""
    torch.manual_seed(0)
    dropouts = dict(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return _biased(tiny_models.bert(words=WORDS, hidden=64, layers=3, attn_implementation=attention, **dropouts))


def gpt2(attention: str = "eager") -> nn.Module:
    """Return a GPT-2 of three layers."""
    torch.manual_seed(0)
    more = dict(attn_implementation=attention, use_cache=False, bos_token_id=None, eos_token_id=None)
    return _biased(tiny_models.gpt2(words=WORDS, hidden=64, layers=3, **more))


class Cnn(nn.Module):
    """Three blocks of convolution, batch normalization, ReLU and pooling."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(self._block(*sizes) for sizes in ((3, 16), (16, 32), (32, 32))))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 10)
        self.loss = nn.CrossEntropyLoss()

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)
        )

    def forward(self, x, labels):
        return self.loss(self.fc(self.pool(self.blocks(x)).flatten(1)), labels)


def cnn() -> nn.Module:
    """Return a convolutional net."""
    torch.manual_seed(0)
    return _biased(Cnn())


def text(step: int, rank: int) -> dict:
    """Return a batch of words, one sequence of which is padded."""
    words = torch.randint(0, WORDS, (4, 24), generator=torch.Generator().manual_seed(100 * step + rank))
    mask = torch.ones_like(words)
    mask[0, -5:] = 0
    return dict(input_ids=words, attention_mask=mask, labels=words.clone())


def pictures(step: int, rank: int) -> dict:
    """Return a batch of pictures."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return dict(
        x=torch.randn(8, 3, 16, 16, generator=generator), labels=torch.randint(0, 10, (8,), generator=generator)
    )


MODELS = {
    "bert": (bert, text),
    "bert_sdpa": (lambda: bert("sdpa"), text),
    "gpt2": (gpt2, text),
    "gpt2_sdpa": (lambda: gpt2("sdpa"), text),
    "cnn": (cnn, pictures),
}

# --- faults: each takes the module that is to be wrong ---------------------------------------------------------------


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 1.05 * gradient


def _changed(module: nn.Module, change) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: change(forward, *args, **kwargs)


def _on_output(change):
    def fault(module: nn.Module) -> None:
        def wrapped(forward, *args, **kwargs):
            result = forward(*args, **kwargs)
            return (change(result[0]), *result[1:]) if isinstance(result, tuple) else change(result)

        _changed(module, wrapped)

    return fault


def other_activation(module: nn.Module) -> None:
    """Compute the other GELU, or a leak in place of ReLU."""
    if isinstance(module, nn.ReLU):
        module.forward = lambda x: F.leaky_relu(x, 1e-3)
        return
    erf = not hasattr(module, "act") and "NewGELU" in type(module).__name__
    module.forward = lambda x: F.gelu(x, approximate="none" if erf else "tanh")


def scaled_softmax(module: nn.Module) -> None:
    """Scale attention's scores by a tenth more."""
    if hasattr(module, "scaling"):
        module.scaling *= 1.1
        return
    softmax, attention = F.softmax, F.scaled_dot_product_attention

    def change(forward, *args, **kwargs):  # transformers 4.44 has the scale in its code
        with (
            mock.patch.object(F, "softmax", lambda scores, *a, **k: softmax(1.1 * scores, *a, **k)),
            mock.patch.object(F, "scaled_dot_product_attention", lambda q, *a, **k: attention(1.1 * q, *a, **k)),
        ):
            return forward(*args, **kwargs)

    _changed(module, change)


def other_epsilon(module: nn.Module) -> None:
    """Use another epsilon in a normalization."""
    module.eps = 1e-12 if module.eps == 1e-5 else 1e-5


def transposed(module: nn.Module) -> None:
    """Use the weight transposed."""
    if isinstance(module, nn.Conv2d):
        module.forward = lambda x: F.conv2d(x, module.weight.transpose(2, 3), module.bias, padding=1)
    elif isinstance(module, nn.Linear):
        module.forward = lambda x: F.linear(x, module.weight.t(), module.bias)
    else:
        module.forward = lambda x: x @ module.weight.t() + module.bias


def dropped_bias(module: nn.Module) -> None:
    """Leave out the bias."""
    if isinstance(module, nn.Conv2d):
        module.forward = lambda x: F.conv2d(x, module.weight, None, padding=1)
    else:
        _changed(module, lambda forward, x: forward(x) - module.bias)


def wrong_mask(module: nn.Module) -> None:
    """Hide the last words of the second sequence."""

    def hide(mask):
        mask = mask.clone()
        mask[1, ..., -6:] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return mask

    def wrapped(forward, *args, **kwargs):
        args = [hide(x) if isinstance(x, torch.Tensor) and x.dim() == 4 else x for x in args]
        kwargs = {k: hide(x) if isinstance(x, torch.Tensor) and x.dim() == 4 else x for k, x in kwargs.items()}
        return forward(*args, **kwargs)

    _changed(module, wrapped)


def stale_row(module: nn.Module) -> None:
    """Use an old value of one row of an embedding."""
    word = int(text(0, 0)["input_ids"][1, 3])
    _changed(module, lambda forward, x: torch.where((x == word)[..., None], forward(x) + 0.01, forward(x)))


def off_by_one(module: nn.Module) -> None:
    """Look up the next position."""
    _changed(module, lambda forward, x: forward(x + 1))


rounded = _on_output(lambda x: x.bfloat16().float())


def _with_nan(x):
    return torch.where(torch.arange(x.shape[-1]) == 3, float("nan") * x, x)


not_a_number = _on_output(_with_nan)


def wrong_gradient(module: nn.Module) -> None:
    """Scale the gradient that goes on to what was before."""
    _changed(module, lambda forward, x, *args, **kwargs: forward(_Scaled.apply(x), *args, **kwargs))


_BERT, _GPT2 = "bert.encoder.layer.1", "transformer.h.1"
_OF_BERT = [
    (other_activation, f"{_BERT}.intermediate.intermediate_act_fn"),
    (scaled_softmax, f"{_BERT}.attention.self"),
    (other_epsilon, "bert.embeddings.LayerNorm"),
    (other_epsilon, f"{_BERT}.output.LayerNorm"),
    (transposed, f"{_BERT}.attention.self.key"),
    (dropped_bias, f"{_BERT}.output.dense"),
    (wrong_mask, f"{_BERT}.attention.self"),
    (stale_row, "bert.embeddings.word_embeddings"),
    (off_by_one, "bert.embeddings.position_embeddings"),
    (rounded, f"{_BERT}.attention.output.dense"),
    (not_a_number, f"{_BERT}.intermediate.dense"),
    (wrong_gradient, f"{_BERT}.intermediate.intermediate_act_fn"),
    (wrong_gradient, f"{_BERT}.output.LayerNorm"),
]
_OF_GPT2 = [
    (other_activation, f"{_GPT2}.mlp.act"), (scaled_softmax, f"{_GPT2}.attn"), (other_epsilon, f"{_GPT2}.ln_2"),
    (transposed, f"{_GPT2}.attn.c_proj"), (dropped_bias, f"{_GPT2}.mlp.c_fc"), (wrong_mask, f"{_GPT2}.attn"),
    (stale_row, "transformer.wte"), (off_by_one, "transformer.wpe"), (rounded, _GPT2), (rounded, f"{_GPT2}.mlp.c_proj"),
    (not_a_number, f"{_GPT2}.ln_1"), (wrong_gradient, f"{_GPT2}.mlp.act"), (wrong_gradient, f"{_GPT2}.attn.c_proj"),
    (wrong_gradient, "transformer.ln_f"),
]  # fmt: skip
_OF_CNN = [
    (other_activation, "blocks.1.2"), (other_epsilon, "blocks.1.1"), (transposed, "blocks.2.0"),
    (dropped_bias, "blocks.1.0"), (rounded, "blocks.2.1"), (rounded, "blocks.1"), (not_a_number, "blocks.0.0"),
    (wrong_gradient, "blocks.1.2"), (wrong_gradient, "blocks.1.0"), (wrong_gradient, "pool"),
]  # fmt: skip
FAULTS = [
    (model, fault, module)
    for models, faults in ((("bert", "bert_sdpa"), _OF_BERT), (("gpt2", "gpt2_sdpa"), _OF_GPT2), (("cnn",), _OF_CNN))
    for model in models
    for fault, module in faults
]
"""Model, fault, path of the module that gets it."""

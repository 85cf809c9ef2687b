"""Tell how torch multiplies float32 matrices on a GPU, by its switch of 2.9 or by its earlier switch."""

from __future__ import annotations

import torch


def computes_in_tf32() -> bool:
    """Return True if torch may round the factors of float32 products to TF32 on a GPU.

    A script that has set ``fp32_precision`` (torch 2.9) must not read ``allow_tf32``: torch raises an error.
    """
    products = torch.backends.cuda.matmul
    if hasattr(products, "fp32_precision"):
        return products.fp32_precision == "tf32"
    return products.allow_tf32

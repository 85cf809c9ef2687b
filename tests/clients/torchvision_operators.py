"""Lets torchvision be imported where its compiled part was made for another build of torch.

A package index may offer torchvision for CUDA only, and beside a torch for CPUs its compiled part cannot be loaded.
Its Python part then fails at two operators that it registers without looking whether they exist, and with it every
package that imports torchvision where it is installed, transformers among them. No program here uses them.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

if importlib.util.find_spec("torchvision") is not None:
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")

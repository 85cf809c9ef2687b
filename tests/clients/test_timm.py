"""timm: its most used families, in small sizes.

`drop_path` draws random numbers; at a rate that no draw reaches they change nothing, and the graph still holds them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import ZERO_2_AND_3, Result, Run
from small_data import images

PACKAGES = ("timm",)
pytestmark = pytest.mark.clients

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("resnet18", {"block_args": {}}),
    "vit": ("vit_tiny_patch16_224", VIT),
    "efficientnet": ("tinynet_e", {"drop_rate": 0.0}),
    "convnext": ("convnext_atto", {"depths": (1, 1, 2, 1), "dims": (8, 16, 32, 64)}),
    "swin": (
        "swin_tiny_patch4_window7_224",
        {"img_size": 32, "window_size": 4, "embed_dim": 16, "depths": (1, 2), "num_heads": (2, 4)},
    ),
    "mobilenetv3": ("mobilenetv3_small_050", {}),
    "deit": ("deit_tiny_distilled_patch16_224", VIT),
    "regnet": ("regnetx_002", {}),
    "eva": ("eva02_tiny_patch14_224", VIT),
    "beit": ("beit_base_patch16_224", {**VIT, "init_values": 0.1}),
    "mixer": ("mixer_s32_224", {"img_size": 64}),
    "densenet": ("densenet121", {"growth_rate": 8, "block_config": (2, 2)}),
}


def trained(run: Run, names: tuple[str, ...], **more: Any) -> Result:
    """Train a model of each family for four steps with label smoothing, then evaluate it."""
    import deepspeed
    import timm
    from timm.loss import LabelSmoothingCrossEntropy

    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    losses, engines, evaluated = [], [], []
    for name in names:
        torch.manual_seed(0)
        kind, arguments = FAMILIES[name]
        if "drop_path_rate" not in more and name not in ("mixer", "densenet"):
            arguments = {**arguments, "drop_path_rate": 0.0}
        model = timm.create_model(kind, pretrained=False, num_classes=4, **arguments, **more)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=run.deepspeed_config(4))
        criterion = LabelSmoothingCrossEntropy(0.1)
        # EfficientNet ends with few pixels, and statistics over these are no basis for a comparison
        rows = images(32, size=96 if name == "efficientnet" else arguments.get("img_size", 32))
        for step in range(4):
            mine = rows[8 * step + 4 * rank :][:4]
            outputs = engine(torch.stack([row["image"] for row in mine]))
            loss = criterion(outputs, torch.stack([row["label"] for row in mine]))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            evaluated.append(engine(torch.stack([row["image"] for row in rows[:4]])))
        engines.append(engine)
    return Result(losses, alive=engines, values={"evaluated": evaluated})


def resnet_and_vit(run: Run) -> Result:
    """ResNet and ViT"""
    return trained(run, ("resnet", "vit"))


def efficientnet_and_convnext(run: Run) -> Result:
    """EfficientNet and ConvNeXt"""
    return trained(run, ("efficientnet", "convnext"))


def swin_and_mobilenet(run: Run) -> Result:
    """Swin and MobileNetV3"""
    return trained(run, ("swin", "mobilenetv3"))


def deit_and_regnet(run: Run) -> Result:
    """DeiT with its distillation token, and RegNet"""
    return trained(run, ("deit", "regnet"))


def beit_and_eva(run: Run) -> Result:
    """BEiT and EVA-02"""
    return trained(run, ("beit", "eva"))


def mixer_and_densenet(run: Run) -> Result:
    """MLP-Mixer and DenseNet"""
    return trained(run, ("mixer", "densenet"))


def stochastic_depth(run: Run) -> Result:
    """ViT, ConvNeXt and Swin with `drop_path_rate` 1e-9"""
    return trained(run, ("vit", "convnext", "swin"), drop_path_rate=1e-9)


@ZERO_2_AND_3
@pytest.mark.parametrize(
    "program",
    [
        resnet_and_vit,
        efficientnet_and_convnext,
        swin_and_mobilenet,
        deit_and_regnet,
        beit_and_eva,
        mixer_and_densenet,
        stochastic_depth,
    ],
    ids=lambda program: program.__name__,
)
def test_families(client, program, stage):
    client.compare(program, stage)

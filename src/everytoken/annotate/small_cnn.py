"""The network that `fit` trains by default: a small ResNet whose score maps have 8x8 cells or more.

timm's ResNet with three stages of one block (48, 96 and 192 channels) and a stem that fits the image: the first 8x8
map is reached with a stride of 4 at 32 pixels, 8 at 64 and 16 at 128 and above. The last stage keeps the resolution of
the second and sees further by dilation, except above 96 pixels, where it halves once more.
About 0.7 M parameters; 0.06 G multiply-adds at 32 and 64 pixels, 0.13 G at 128, 0.4 G at 224.
"""

from __future__ import annotations

from timm.models.resnet import BasicBlock, ResNet
from torch import nn

WIDTHS = (48, 96, 192)


def small_cnn(num_classes: int, side: int, drop: float = 0.1) -> ResNet:
    """A small ResNet for square images of about `side` pixels."""
    large = side > 96
    model = ResNet(
        BasicBlock,
        layers=(1, 1, 1),
        channels=WIDTHS,
        num_classes=num_classes,
        output_stride=16 if large else 8,
        drop_rate=drop,
        avg_down=large,
    )
    stem = nn.Conv2d(3, 64, 3, stride=1 if side <= 48 else 2, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1 = stem
    model.layer4 = nn.Identity()  # timm's ResNet runs four stages
    return model

"""The network that `fit` trains by default: a small ResNet whose score maps have 8x8 cells or more.

timm's ResNet with three stages of one block (48, 96 and 192 channels) and a stem that fits the image: the first 8x8
map is reached with a stride of 4 at 32 pixels, 8 at 64 and 16 at 128 and above. The last stage keeps the resolution of
the second and sees further by dilation, except above 96 pixels, where it halves once more.

Differently from a usual ResNet, every step down has an even kernel (2x2 or 4x4), whose outputs lie in the middle of the
pixels that they replace. Outputs of 3x3 steps with padding on all sides lie half a step left and above, and with two of
them a cell would speak about a place that is 0.4 cells away from its own.
About 0.8 M parameters; 0.06 G multiply-adds at 32 and 64 pixels, 0.15 G at 128, 0.45 G at 224.
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
        avg_down=True,
    )
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False) if side <= 48 else _half(3, 64)
    model.maxpool = nn.MaxPool2d(2)
    model.layer2[0].conv1 = _half(WIDTHS[0], WIDTHS[1])
    if large:
        model.layer3[0].conv1 = _half(WIDTHS[1], WIDTHS[2])
    else:
        model.layer3[0].downsample[0] = nn.Identity()  # timm takes means of 2x2 there, though nothing gets smaller
    for conv in (model.conv1, model.layer2[0].conv1, model.layer3[0].conv1):
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    model.layer4 = nn.Identity()  # timm's ResNet runs four stages
    return model


def _half(channels: int, out: int) -> nn.Conv2d:
    """A convolution that halves the resolution and keeps things in their place."""
    return nn.Conv2d(channels, out, 4, stride=2, padding=1, bias=False)

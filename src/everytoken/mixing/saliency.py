"""Where an image is interesting, without a network: contrast between a place and its surroundings.

Method: fine-grained static saliency (Montabone and Soto), which SaliencyMix uses: the grey value of a pixel minus the
mean of a window around it, both signs counted, summed over windows of six sizes. Here as average pooling on the
device, for a batch at once. Windows are those published, for images of about 224 pixels; they shrink with the image.
Cost: six pooled copies of one channel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_WINDOWS = (12, 24, 48, 28, 56, 112)  # half sides at 224 pixels


def contrast_saliency(images: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H, W], not negative, largest where the image stands out from its surroundings."""
    grey = images.float().mean(1, keepdim=True)
    height, width = grey.shape[-2:]
    out = torch.zeros_like(grey)
    for half in _WINDOWS:
        rows, columns = max(1, round(half * height / 224)), max(1, round(half * width / 224))
        kernel = (2 * rows + 1, 2 * columns + 1)
        around = F.avg_pool2d(grey, kernel, stride=1, padding=(rows, columns), count_include_pad=False)
        out += (grey - around).abs()
    return out[:, 0]

"""Where the object is, from image labels alone: a mask and a box from what a classifier says about every cell.

The evidence for a class at a cell is its logit there minus the mean over all classes, since a classifier's logits mean
nothing but relative to each other. Classes that the image may also be, such as other breeds of dog, are counted by the
square of their probability. Cells are those of the token head or, without one, of the classifier applied at
every cell (`TokenModel.class_and_cell_logits`). The network looks at the whole image, squashed to its input; networks
that take any size look at it twice as large, which halves their cells. The cells are then enlarged along the edges of
the image by a guided filter (He, Sun and Tang 2010: within each window, the map is a linear function of the colours),
scaled to 0..1, and cut at one threshold; the box is that of the part with the strongest cell.

benchmarks/locate.py measures it; docs/predict.md has the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.models.token_model import TokenModel, probe
from everytoken_lab.classes import shown_name
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.models.onnx import OnnxModel
from everytoken_lab.models.open import OpenModel

ALIKE = 5  # classes that are counted, at most
SIDE = 128  # pixels of a heat map
RADIUS = 16  # half a window of the guided filter in pixels
SMOOTHNESS = 1e-3  # the variance of colours that is noise
THRESHOLD = 0.45  # of the heat, which is scaled to 0..1


@dataclass(frozen=True)
class Location:
    """Where an object is; peak and box are in fractions of the image."""

    heat: NDArray[np.float16]  # [h, w] over the whole image, 0..1: how much speaks for the class there
    peak: tuple[float, float]  # (x, y) of the strongest cell
    box: tuple[float, float, float, float]  # left, top, right, bottom
    size: tuple[int, int]  # width and height of the upright image in pixels

    @property
    def pixels(self) -> tuple[float, float, float, float]:
        """The box in pixels of the upright image."""
        (width, height), (left, top, right, bottom) = self.size, self.box
        return round(left * width, 1), round(top * height, 1), round(right * width, 1), round(bottom * height, 1)

    def mask(self, size: tuple[int, int] | None = None) -> NDArray[np.bool_]:
        """bool [height, width] at the image's size, or at another (width, height)."""
        heat = Image.fromarray(self.heat.astype(np.float32))
        return np.asarray(heat.resize(size or self.size, Image.Resampling.BILINEAR)) >= THRESHOLD


@dataclass(frozen=True)
class CellClasses:
    """The best class of every cell of images, and its probability; both [B, h, w]."""

    top: NDArray[np.int64]
    confidence: NDArray[np.float32]
    names: list[str]  # of all classes, for people
    source: str  # "token head"; of a model without one "class head", which was not trained to be asked at every cell


@torch.no_grad()
def cell_classes(opened: OpenModel, images: Tensor) -> CellClasses:
    """What a model says about every cell of images [B, 3, H, W]."""
    model, classes = opened.model, opened.token_classes.or_imagenet()
    logits = model.class_and_cell_logits(images)[1].float()
    confidence, top = logits.softmax(-1).max(-1)
    names = [shown_name(name) for name in classes.names] or [f"class {i}" for i in range(logits.shape[-1])]
    source = "token head" if model.uses_own_head or model.token_head is not None else "class head"
    return CellClasses(top.cpu().numpy(), confidence.cpu().numpy(), names, source)


class Locator:
    """Locates objects with any classifier that has a token view; `view`: how it sees images, whole and squashed."""

    def __init__(self, opened: OpenModel) -> None:
        self.opened = opened
        view = eval_view(opened.info)
        height, width = (2 * side // 32 * 32 for side in view.size)
        size = (height, width) if _takes(opened.model, (height, width)) else view.size
        self.view: EvalTransform = replace(view, img_size=size, crop_pct=1.0, crop_mode="squash")

    @torch.no_grad()
    def heat(self, images: Tensor, classes: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Evidence for each image's class: coarse [B, h, w], and along the edges of the image [B, SIDE, SIDE] in 0..1.

        Args:
            images: [B, 3, H, W], as `view` shows them, normalised.
            classes: int64 [B, k], the likeliest outputs of the class head. probabilities: theirs, [B, k].
        """
        _, cells = self.opened.model.class_and_cell_logits(images)
        cells = cells.float()
        if self.opened.token_classes != self.opened.classes:  # tokens that learnt other classes are asked for these
            probabilities, classes = cells.mean((1, 2)).softmax(-1).topk(min(ALIKE, cells.shape[-1]))
        weights = probabilities**2 / (probabilities**2).sum(-1, keepdim=True)
        chosen = cells.gather(-1, classes[:, None, None].expand(*cells.shape[:3], -1))
        evidence = (chosen * weights[:, None, None]).sum(-1) - cells.mean(-1)
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.view.mean, self.view.std))
        colours = F.interpolate(images * std + mean, (SIDE, SIDE), mode="bilinear", antialias=True)
        smooth = F.interpolate(scaled(evidence)[:, None], (SIDE, SIDE), mode="bilinear")
        return evidence, scaled(guided_filter(smooth, colours, RADIUS, SMOOTHNESS)[:, 0])

    def locate(
        self, images: Tensor, classes: Tensor, probabilities: Tensor, sizes: list[tuple[int, int]]
    ) -> list[Location]:
        """Where the objects are; `sizes`: (width, height) of the upright images in pixels. See `heat`."""
        evidence, heat = self.heat(images, classes, probabilities)
        locations = []
        for coarse, fine, size in zip(evidence.cpu(), heat.cpu(), sizes, strict=True):
            rows, columns = coarse.shape
            strongest = int(coarse.argmax())
            peak = ((strongest % columns + 0.5) / columns, (strongest // columns + 0.5) / rows)
            values = fine.numpy().astype(np.float16)
            locations.append(Location(values, peak, box_of(values >= THRESHOLD, peak), size))
        return locations


def _takes(model: TokenModel, size: tuple[int, int]) -> bool:
    """Whether a network can look at images of another (height, width)."""
    if isinstance(model, OnnxModel):
        return model.size == size
    try:
        probe(model, size)
    except (AssertionError, RuntimeError, ValueError, EverytokenError):  # timm's ways to refuse
        return False
    return True


def scaled(values: Tensor) -> Tensor:
    """[B, h, w], each from 0 to 1."""
    values = values - values.amin((1, 2), keepdim=True)
    return values / values.amax((1, 2), keepdim=True).clamp_min(1e-6)


def guided_filter(values: Tensor, colours: Tensor, radius: int, smoothness: float) -> Tensor:
    """`values` [B, 1, H, W], smoothed where the `colours` [B, 3, H, W] (0..1) are smooth, and cut where they change."""

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(F.pad(x, (radius,) * 4, mode="replicate"), 2 * radius + 1, 1)

    centre, average = mean(colours), mean(values)
    covariance = mean(colours * values) - centre * average  # [B, 3, H, W]
    pairs = [(i, j) for i in range(3) for j in range(i, 3)]
    first, second = (torch.tensor(numbers, device=colours.device) for numbers in zip(*pairs, strict=True))
    moments = mean(colours[:, first] * colours[:, second]) - centre[:, first] * centre[:, second]  # [B, 6, H, W]
    rr, rg, rb, gg, gb, bb = moments.unbind(1)
    rr, gg, bb = rr + smoothness, gg + smoothness, bb + smoothness
    # the inverse of a symmetric 3 x 3 matrix by its cofactors: far faster than a solver for each pixel
    cofactors = [
        gg * bb - gb * gb,
        rb * gb - rg * bb,
        rg * gb - rb * gg,
        rr * bb - rb * rb,
        rb * rg - rr * gb,
        rr * gg - rg * rg,
    ]
    determinant = rr * cofactors[0] + rg * cofactors[1] + rb * cofactors[2]
    rows = ((0, 1, 2), (1, 3, 4), (2, 4, 5))
    slope = torch.stack([sum(cofactors[k] * covariance[:, j] for j, k in enumerate(row)) for row in rows], 1)  # type: ignore[misc]
    slope = slope / determinant[:, None]
    offset = average - (slope * centre).sum(1, keepdim=True)
    return (mean(slope) * colours).sum(1, keepdim=True) + mean(offset)


def box_of(mask: NDArray[np.bool_], peak: tuple[float, float]) -> tuple[float, float, float, float]:
    """The box, in fractions, of the connected part of a mask that is nearest to a point; all of it if it is empty."""
    if not mask.any():
        return 0.0, 0.0, 1.0, 1.0
    height, width = mask.shape
    rows, columns = np.nonzero(mask)
    nearest = np.hypot((columns + 0.5) / width - peak[0], (rows + 0.5) / height - peak[1]).argmin()
    parts, _ = ndimage.label(mask, np.ones((3, 3)))
    rows, columns = np.nonzero(parts == parts[rows[nearest], columns[nearest]])
    left, right = columns.min() / width, (columns.max() + 1) / width
    return float(left), float(rows.min() / height), float(right), float((rows.max() + 1) / height)

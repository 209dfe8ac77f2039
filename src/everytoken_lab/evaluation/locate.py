"""Where the object is, from a classifier: a mask and a box, without any labels but those of whole images.

What tells classes apart is seldom the whole object, so the mask does not come from one class. It starts where the
logits of a cell differ most among all classes, with a weak preference for the centre. A linear function (ridge
regression) of the tokens of the last stage but one, which are finer, is fitted to this guess for each image, and twice
more to what it then takes for the object (by Otsu's threshold), as GrabCut does with colours. A guided filter (He, Sun
and Tang 2010: within each window, the map is a linear function of the colours) brings it to the edges of the image,
where it is cut at one threshold. Plain transformers start from the centre alone, and the tokens are their last ones.

The likeliest classes only decide which parts of a mask are the object: those with the most evidence, logits at a cell
minus the mean over all classes. Networks that take any size look at the whole image, squashed to 320 pixels.

benchmarks/locate.py measures it; docs/predict.md has the numbers.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

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
SEEN = 320  # pixels a side that a network looks at; twice what it was trained with, if that is less
GRID = 32  # cells a side on which the object is told from the rest
CENTRE = 0.4  # of the side: the standard deviation of the preference for the centre
RIDGE = 0.1  # of the variance of the tokens
ROUNDS = 3  # of the fit
SIDE = 128  # pixels of a heat map
RADIUS = 8  # half a window of the guided filter in pixels
SMOOTHNESS = 1e-3  # the variance of colours that is noise
THRESHOLD = 0.55  # of the heat, which is scaled to 0..1
MOST = 0.9  # of the image: what covers more is no object in it
PART = 0.25  # of the evidence of the main part, which another part of the object has at least


@dataclass(frozen=True)
class Location:
    """Where an object is; the box is in fractions of the image."""

    heat: NDArray[np.float16]  # [h, w] over the whole image, 0..1: how much speaks for an object there
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


def run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Numbers of 0s, 1s, 0s, ... of a flat mask."""
    padded = np.concatenate([[False], mask, [not mask[-1]]])
    lengths: list[int] = np.diff(np.flatnonzero(padded[1:] != padded[:-1]), prepend=0).tolist()
    return lengths


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
        height, width = (min(2 * side, max(SEEN, side)) // 32 * 32 for side in view.size)
        size = (height, width) if _takes(opened.model, (height, width)) else view.size
        self.view: EvalTransform = replace(view, img_size=size, crop_pct=1.0, crop_mode="squash")

    def _look(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One pass: logits of the cells [B, h, w, C], a first guess where an object is [B, h, w], tokens [B, h, w, D].

        The logits stand for the tokens of networks whose stages cannot be looked into, such as ONNX files.
        """
        model = self.opened.model
        stages = [info["module"] for info in getattr(model.backbone, "feature_info", None) or ()]
        plain = bool(stages) and model.family.layout == "tokens"
        last = stages[-1 if plain else -2] if len(stages) > 1 else None
        outputs: list[Any] = []
        stage = dict(model.backbone.named_modules()).get(last) if last else None
        with ExitStack() as hooks:
            if stage is not None:
                hooks.enter_context(stage.register_forward_hook(lambda *call: outputs.append(call[-1])))
            cells = model.class_and_cell_logits(images)[1].float()
        if not outputs or not isinstance(outputs[0], Tensor):
            return cells, cells.std(-1, correction=0), cells
        tokens = outputs[0].float()
        if plain:
            count = cells.shape[1] * cells.shape[2]
            tokens = tokens.flatten(1, -2)[:, -count:].unflatten(1, cells.shape[1:3])
            return cells, torch.ones_like(cells[..., 0]), tokens
        tokens = tokens.permute(0, 2, 3, 1) if model.family.layout == "nchw" else tokens
        return cells, cells.std(-1, correction=0), tokens

    @torch.no_grad()
    def heat(self, images: Tensor, classes: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Evidence for each image's class [B, h, w], and the map of its objects [B, SIDE, SIDE] in 0..1.

        Args:
            images: [B, 3, H, W], as `view` shows them, normalised.
            classes: int64 [B, k], the likeliest outputs of the class head. probabilities: theirs, [B, k].
        """
        cells, guess, tokens = self._look(images)
        if self.opened.token_classes != self.opened.classes:  # tokens that learnt other classes are asked for these
            probabilities, classes = cells.mean((1, 2)).softmax(-1).topk(min(ALIKE, cells.shape[-1]))
        weights = probabilities**2 / (probabilities**2).sum(-1, keepdim=True)
        chosen = cells.gather(-1, classes[:, None, None].expand(*cells.shape[:3], -1))
        evidence = (chosen * weights[:, None, None]).sum(-1) - cells.mean(-1)
        mean, std = (images.new_tensor(values)[:, None, None] for values in (self.view.mean, self.view.std))
        colours = F.interpolate(images * std + mean, (SIDE, SIDE), mode="bilinear", antialias=True)
        smooth = F.interpolate(object_map(guess, tokens)[:, None], (SIDE, SIDE), mode="bicubic")
        return evidence, scaled(guided_filter(smooth, colours, RADIUS, SMOOTHNESS)[:, 0])

    def locate(
        self, images: Tensor, classes: Tensor, probabilities: Tensor, sizes: list[tuple[int, int]]
    ) -> list[Location | None]:
        """Where the objects are, None where none is seen; `sizes`: (width, height) of the upright images in pixels."""
        evidence, heat = self.heat(images, classes, probabilities)
        fine = F.interpolate(evidence[:, None], (SIDE, SIDE), mode="bilinear")[:, 0]
        locations: list[Location | None] = []
        for speaks, values, size in zip(fine.cpu().numpy(), heat.cpu().numpy(), sizes, strict=True):
            mask = values >= THRESHOLD
            if not 0 < mask.mean() <= MOST or speaks[mask].mean() <= speaks[~mask].mean():
                locations.append(None)
                continue
            kept = main_parts(mask, speaks)
            values[mask & ~kept] = 0
            locations.append(Location(values.astype(np.float16), box_of(kept), size))
        return locations


def _takes(model: TokenModel, size: tuple[int, int]) -> bool:
    """Whether a network can look at images of another (height, width)."""
    if isinstance(model, OnnxModel):
        return model.size == size
    try:
        probe(model, size)
    except (AssertionError, IndexError, RuntimeError, ValueError, EverytokenError):  # timm's ways to refuse
        return False
    return True


def scaled(values: Tensor) -> Tensor:
    """[B, h, w], each from 0 to 1; near 0 where it hardly varies, as in an image of one colour."""
    values = values - values.amin((1, 2), keepdim=True)
    return values / values.amax((1, 2), keepdim=True).clamp_min(1e-3)


def object_map(start: Tensor, tokens: Tensor) -> Tensor:
    """How much speaks for an object, [B, GRID, GRID] in 0..1, by tokens [B, h, w, D] and a first guess [B, h, w]."""
    x = F.interpolate(tokens.permute(0, 3, 1, 2), (GRID, GRID), mode="bilinear").flatten(2)
    x = x - x.mean(-1, keepdim=True)
    products = x @ x.mT
    noise = RIDGE * products.diagonal(dim1=1, dim2=2).sum(-1).clamp_min(1e-6)
    factor = torch.linalg.cholesky(products + torch.diag_embed(noise[:, None].expand(-1, x.shape[1])))
    from_centre = (torch.arange(GRID, device=x.device) + 0.5) / GRID - 0.5
    bell = (-0.5 * (from_centre / CENTRE) ** 2).exp()
    target = F.interpolate(start[:, None], (GRID, GRID), mode="bilinear")[:, 0] * bell * bell[:, None]
    for _ in range(ROUNDS):
        y = target.flatten(1)
        slope = torch.cholesky_solve(x @ (y - y.mean(1, keepdim=True))[..., None], factor)
        out = scaled((slope.mT @ x).unflatten(-1, (GRID, GRID))[:, 0])
        target = (out > otsu(out)).float()
    return out


def otsu(values: Tensor) -> Tensor:
    """[B, h, w] -> [B, 1, 1]: the value above which there is the upper one of the two groups that differ most."""
    ordered = values.flatten(1).sort(1).values
    sums, count = ordered.cumsum(1), torch.arange(1, ordered.shape[1], device=values.device)
    others = ordered.shape[1] - count
    gap = (sums[:, -1:] - sums[:, :-1]) / others - sums[:, :-1] / count
    return ordered.gather(1, (count * others * gap**2).argmax(1, keepdim=True))[..., None]


def guided_filter(values: Tensor, colours: Tensor, radius: int, smoothness: float) -> Tensor:
    """`values` [B, 1, H, W], smoothed where the `colours` [B, 3, H, W] (0..1) are smooth, and cut where they change."""

    def mean(x: Tensor) -> Tensor:
        side = 2 * radius + 1
        return F.avg_pool2d(F.avg_pool2d(F.pad(x, (radius,) * 4, mode="replicate"), (side, 1), 1), (1, side), 1)

    centre, average = mean(colours), mean(values)
    covariance = mean(colours * values) - centre * average  # [B, 3, H, W]
    moments = mean((colours[:, :, None] * colours[:, None]).flatten(1, 2)).unflatten(1, (3, 3))
    noise = smoothness * torch.eye(3, device=colours.device)
    spread = (moments - centre[:, :, None] * centre[:, None]).movedim((1, 2), (-2, -1)) + noise  # [B, H, W, 3, 3]
    slope = torch.linalg.solve(spread, covariance.movedim(1, -1)).movedim(-1, 1)
    return (mean(slope) * colours).sum(1, keepdim=True) + mean(average - (slope * centre).sum(1, keepdim=True))


def main_parts(mask: NDArray[np.bool_], evidence: NDArray[np.float32]) -> NDArray[np.bool_]:
    """The connected parts of a mask with the most evidence above its mean; both [h, w]."""
    parts, count = ndimage.label(mask, np.ones((3, 3)))
    sums = ndimage.sum(np.maximum(evidence - evidence.mean(), 0), parts, range(1, count + 1))
    return np.isin(parts, 1 + np.flatnonzero(sums >= PART * sums.max()))


def box_of(mask: NDArray[np.bool_]) -> tuple[float, float, float, float]:
    """The box around a mask, which must not be empty, in fractions."""
    (height, width), (rows, columns) = mask.shape, np.nonzero(mask)
    left, right = columns.min() / width, (columns.max() + 1) / width
    return float(left), float(rows.min() / height), float(right), float((rows.max() + 1) / height)

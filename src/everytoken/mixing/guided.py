"""Mixing that looks at the images: what is taken from the partner depends on where something is to be seen.

- SaliencyMix: a box around the most salient pixel of the partner; λ as in CutMix.
- Attentive-CutMix: the six most attended cells of the partner's 7x7 map, at their own places.
- TokenMix: blocks of patches; the label counts what each image shows of its own importance, not area.
- SMMix, the mixing part: the square of patches that is most important in the partner covers the square that is least
  important in the own image (its extra losses are not here).
What is important comes as a guide: "saliency" (`saliency.contrast_saliency`), "attention" (a network's own class, cell
by cell; `train.guide`) or "gradient". The networks are the teacher if there is one, otherwise the student.
Every image has its own mask here, so token outputs are not put back: token targets are mixed instead.
Cost: the guide; all else are a few small operations on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.mixing.mix import Guide, GuideKind, Mix, Mixer, Mode, Scene
from everytoken.mixing.patches import BlockPatches


@dataclass(frozen=True)
class GuidedMixer(Mixer):
    """A mixer that needs to see the images. Subclasses provide `guided`."""

    mode: Mode = "elem"

    guide: ClassVar[GuideKind] = "attention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode != "elem":
            raise EverytokenError(
                f"{type(self).__name__} makes a mask for every image, so its mode is 'elem', not '{self.mode}'."
            )

    def draw(
        self,
        batch_size: int,
        image_size: tuple[int, int],
        grid: tuple[int, int],
        rng: np.random.Generator,
        device: torch.device | str | None = None,
        guide: Guide | None = None,
    ) -> Mix | None:
        """As `Mixer.draw`; `guide` is asked for the importance of each place."""
        active = rng.random(batch_size) < self.prob if self.prob < 1 else np.ones(batch_size, dtype=bool)
        if not active.any():
            return None
        if guide is None:
            raise EverytokenError(
                f"{type(self).__name__} looks at the images: give draw(..., guide=) a function from "
                f"'{self.guide}' to the importance of each place [B, h, w]."
            )
        importance = guide(self.guide)
        if importance.dim() != 3 or importance.shape[0] != batch_size:
            raise EverytokenError(
                f"the guide of {type(self).__name__} must be [{batch_size}, h, w], got {list(importance.shape)}."
            )
        partner = torch.arange(batch_size - 1, -1, -1, device=device)
        mix = self.guided(importance.detach().float(), partner, Scene(image_size, grid, rng, device))
        if active.all():
            return mix
        on = torch.from_numpy(active).to(mix.mask.device)
        moved = mix.moves
        if moved is not None:
            moved = torch.where(
                on[:, None, None, None], moved, identity_moves(moved.shape[2], moved.shape[3], on.device)
            )
        return replace(
            mix,
            mask=torch.where(on[:, None, None], mix.mask, 1.0),
            ratio=torch.where(on, mix.ratio, 1.0),
            moves=moved,
        )

    def guided(self, importance: Tensor, partner: Tensor, scene: Scene) -> Mix:
        """The mix of a whole batch."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to mix")

    def _mix(self, partner: Tensor, mask: Tensor, ratio: Tensor | None = None, moves: Tensor | None = None) -> Mix:
        ratio = mask.mean((1, 2)) if ratio is None else ratio
        return Mix(partner, mask, ratio, "pixels", symmetric=False, soft=self.soft, moves=moves)

    def _lam(self, count: int, rng: np.random.Generator, device: torch.device) -> Tensor:
        return torch.from_numpy(rng.beta(self.alpha, self.alpha, size=count)).float().to(device)


@dataclass(frozen=True)
class SaliencyMix(GuidedMixer):
    """A box around the most salient pixel of the partner."""

    guide: ClassVar[GuideKind] = "saliency"

    def guided(self, importance: Tensor, partner: Tensor, scene: Scene) -> Mix:
        """[B, H, W] masks on the pixel grid; boxes as `boxes.boxes_at`, on the device."""
        lam = self._lam(len(partner), scene.rng, importance.device)
        peak = to_pixels(importance, scene.image_size)[partner].flatten(1).argmax(1)
        inside = []
        width = scene.image_size[1]
        for side, centre in zip(scene.image_size, (peak // width, peak % width), strict=True):
            half = (side * (1 - lam).sqrt()).long() // 2
            at = torch.arange(side, device=peak.device)
            inside.append((at >= (centre - half)[:, None]) & (at < (centre + half)[:, None]))
        return self._mix(partner, (~(inside[0][:, :, None] & inside[1][:, None, :])).float())


@dataclass(frozen=True)
class AttentiveCutMix(GuidedMixer):
    """The most attended cells of the partner, at their own places.

    Args:
        cells: how many.
        side: cells in a row and in a column of the map.
    """

    cells: int = 6
    side: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.cells < self.side**2:
            raise EverytokenError(f"AttentiveCutMix: cells must be in 1..{self.side**2 - 1}, got {self.cells}.")

    def guided(self, importance: Tensor, partner: Tensor, scene: Scene) -> Mix:
        """[B, H, W] masks on the pixel grid."""
        coarse = resize(importance, (self.side, self.side))[partner].flatten(1)
        own = torch.ones_like(coarse).scatter_(1, coarse.topk(self.cells).indices, 0.0)
        return self._mix(partner, to_pixels(own.view(-1, self.side, self.side), scene.image_size))


@dataclass(frozen=True)
class TokenMix(GuidedMixer):
    """Blocks of patches; the label follows importance.

    Args:
        smallest: patches in the smallest block.
        aspect: narrowest proportions of a block.
    """

    smallest: int = 14
    aspect: float = 0.3

    def guided(self, importance: Tensor, partner: Tensor, scene: Scene) -> Mix:
        """[B, H, W] masks on the pixel grid; the ratio weighs them by importance."""
        blocks = BlockPatches(self.alpha, mode="elem", smallest=self.smallest, aspect=self.aspect)
        mask = blocks.masks(np.ones(len(partner), dtype=bool), replace(scene, device=partner.device))
        weight = resize(importance, scene.grid).flatten(1)
        weight = (weight + 1e-12) / (weight + 1e-12).sum(1, keepdim=True)
        shown = resize(mask, scene.grid).flatten(1)
        own, other = (shown * weight).sum(1), ((1 - shown) * weight[partner]).sum(1)
        return self._mix(partner, mask, own / (own + other).clamp(min=1e-12))


@dataclass(frozen=True)
class SMMix(GuidedMixer):
    """The partner's most important square over the own image's least important one.

    Args:
        smallest, largest: side of the square, as a part of the grid's; drawn uniformly.
    """

    smallest: float = 0.25
    largest: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.smallest <= self.largest <= 1:
            raise EverytokenError(
                f"SMMix: 0 < smallest <= largest <= 1 is needed, got {self.smallest} and {self.largest}."
            )

    def guided(self, importance: Tensor, partner: Tensor, scene: Scene) -> Mix:
        """One size for the batch; the partner's patches are moved to where they go."""
        part = scene.rng.uniform(self.smallest, self.largest)
        h, w = scene.grid
        rows, columns = max(1, round(part * h)), max(1, round(part * w))
        sums = F.avg_pool2d(resize(importance, scene.grid)[:, None], (rows, columns), stride=1)[:, 0]
        wide = sums.shape[2]
        best, least = sums[partner].flatten(1).argmax(1), sums.flatten(1).argmin(1)
        i = torch.arange(h, device=partner.device)[None, :, None] - (least // wide)[:, None, None]
        j = torch.arange(w, device=partner.device)[None, None, :] - (least % wide)[:, None, None]
        inside = (i >= 0) & (i < rows) & (j >= 0) & (j < columns)
        source = ((best // wide)[:, None, None] + i) * w + (best % wide)[:, None, None] + j
        moves = identity_moves(h, w, partner.device).repeat(len(partner), 1, 1, 1)
        moves[:, 1] = torch.where(inside, source, moves[:, 1])
        return self._mix(partner, to_pixels((~inside).float(), scene.image_size), moves=moves)


def identity_moves(h: int, w: int, device: torch.device | str | None) -> Tensor:
    """[1, 2, h, w]: every patch of both images stays where it is; see `Mix.moves`."""
    return torch.arange(h * w, device=device).view(1, 1, h, w).expand(1, 2, h, w)


def to_pixels(cells: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Values of cells [B, h, w] at every pixel [B, H, W], nearest."""
    h, w = cells.shape[1:]
    rows = torch.arange(image_size[0], device=cells.device) * h // image_size[0]
    columns = torch.arange(image_size[1], device=cells.device) * w // image_size[1]
    return cells[:, rows][:, :, columns]


def resize(cells: Tensor, grid: tuple[int, int]) -> Tensor:
    """Importance [B, H, W] on another grid [B, h, w]: averaged where it becomes coarser, interpolated where finer."""
    if tuple(cells.shape[1:]) == grid:
        return cells
    if cells.shape[1] >= grid[0] and cells.shape[2] >= grid[1]:
        return F.adaptive_avg_pool2d(cells[:, None], grid)[:, 0]
    return F.interpolate(cells[:, None], grid, mode="bilinear", align_corners=False)[:, 0]

"""A mix: which image each pixel or token of a batch comes from; how it is drawn, carried out, and undone.

Equation (CutMix, MixToken, MixUp alike): x̂_b = M_b ⊙ x_b + (1 - M_b) ⊙ x_(partner b); the class label gets mean(M_b) of
its own image and the rest of the partner (All Tokens Matter, eq. 5-7). Un-mixing uses that partners share one mask:
token (b, i) of the mixed batch shows image b where the mask is 1 and its partner elsewhere, so swapping the same places
once more puts every token back to its own image.
Differently from the released codes: the mask is a tensor, not four Python integers, so compiled models do not recompile
for every box; no global random state; any batch size, odd and 1 included (the middle image is its own partner).
Everything is `where` or `lerp` on tensors; inputs are not modified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everytoken.errors import EverytokenError
from everytoken.functional import CompactTarget, blend
from everytoken.keyed import StepKey

Level = Literal["pixels", "tokens"]
Layout = Literal["NHWC", "NCHW", "NLC"]
Size = tuple[int, int]
Rng = np.random.Generator
Device = torch.device | str | None
GuideKind = Literal["saliency", "attention", "gradient"]
Guide = Callable[[GuideKind], Tensor]
"""A kind -> importance [B, h, w], not negative, on any grid, of the images before they are mixed."""
Mode = Literal["batch", "pair", "elem"]


@dataclass(frozen=True)
class Mix:
    """How the images of a batch are mixed. What a mixer returns beside the mixed images.

    Attributes:
        partner: [B] int64, the other image of each image.
        mask: [B or 1, h, w] float32 on the pixel or token grid (h = w = 1 where it is the same everywhere):
            1 = own image, 0 = partner, between = partly.
        ratio: [B] float32, the own image's fraction of the label: the mean of the mask, unless the method weighs it.
        level: "pixels" (mixed before the network) or "tokens" (after patch embedding, before positions).
        symmetric: an image and its partner are each other's partners and share one mask.
        soft: the mask has values between 0 and 1.
        moves: [B, 2, h, w] int64 or None, for pixels: which patch (row-major number) of the own image and of the
            partner is shown at each place of a grid, where patches do not stay where they were.
        tokens: how the tokens of these mixed pixels are mixed once more, with the same partners (`Compose`); the ratio
            is that of both together. None: they are not.

    Example: the labels' part of CutMix, `mix.ratio * H(labels) + (1 - mix.ratio) * H(labels[mix.partner])`.
    """

    partner: Tensor
    mask: Tensor
    ratio: Tensor
    level: Level
    symmetric: bool = True
    soft: bool = False
    moves: Tensor | None = None
    tokens: Mix | None = None

    @classmethod
    def from_box(cls, box: Tensor | Sequence[int], partner: Tensor, size: Size) -> Mix:
        """A CutMix that somebody else carried out.

        Args:
            box: (x0, y0, x1, y1) in pixels, half-open, which the partner's pixels fill; or [B, 4], a box per image.
            partner: int64 [B], whose pixels they are: `images.flip(0)` is `torch.arange(B).flip(0)`.
            size: (height, width) of the images.
        """
        corners = torch.as_tensor(box).view(-1, 4)[:, [1, 0, 3, 2]]
        return cls.from_mask(box_masks(corners, size, partner.device), partner)

    @classmethod
    def from_mask(cls, mask: Tensor, partner: Tensor) -> Mix:
        """Pixels that somebody else mixed: mask · own + (1 - mask) · partner's.

        Args:
            mask: [B, H, W], [1, H, W] or [H, W], bool or from 0 to 1; MixUp's is [B, 1, 1].
            partner: int64 [B].
        """
        mask = (mask if mask.dim() == 3 else mask[None]).float()
        if mask.dim() != 3 or len(mask) not in (1, len(partner)):
            raise ValueError(f"a mask {list(mask.shape)} does not fit {len(partner)} images: [B, H, W] or [H, W]")
        return cls(partner, mask, mask.mean((1, 2)).expand(len(partner)), "pixels", symmetric=False, soft=True)

    def __len__(self) -> int:
        return self.partner.shape[0]

    @property
    def unmixes(self) -> bool:
        """Token outputs can be put back to their own images (`unmix_tokens`), so token targets stay as they are.

        Otherwise an output token keeps the image it shows, and its target is mixed (`mix_token_target`).
        """
        return self.level == "tokens" and self.symmetric and not self.soft

    @property
    def of_tokens(self) -> Mix | None:
        """What happens after the patch embedding: this mix, the one that follows its pixels, or nothing."""
        return self if self.level == "tokens" else self.tokens

    @property
    def shown(self) -> Mix | None:
        """What a view's tokens show: those that can be put back to their own images have been; None: nothing mixed."""
        if self.of_tokens is None or not self.of_tokens.unmixes:
            return self
        return None if self.level == "tokens" else replace(self, tokens=None)

    def at(self, grid: Size) -> Tensor:
        """The own image's part on another grid, [B or 1, h, w]: averaged over each coarser cell, repeated in finer
        ones."""
        if self.tokens is not None:
            own, places = replace(self, tokens=None).at(grid).expand(len(self), *grid), self.tokens.at(grid)
            return places * own + (1 - places) * (1 - own[self.partner])
        n, h, w = self.mask.shape
        H, W = grid
        if (h, w) == (H, W):
            return self.mask
        if h % H == 0 and w % W == 0:
            return self.mask.view(n, H, h // H, W, w // W).mean((2, 4))
        if H % h == 0 and W % w == 0:
            return self.mask.repeat_interleave(H // h, 1).repeat_interleave(W // w, 2)
        return F.adaptive_avg_pool2d(self.mask[:, None], grid)[:, 0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Mix:
        """The same mix on another device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {k: v.to(device, non_blocking=non_blocking) for k, v in parts.items() if hasattr(v, "to")}
        return replace(self, **moved)


class Mixer:
    """What mixes a batch: `images, mix = mixer(images)`. Subclasses provide `draw`.

    Attributes:
        needs_grid: it draws on the network's token grid.
    """

    needs_grid: bool = True

    def __call__(
        self,
        images: Tensor,
        key: StepKey | None = None,
        grid: Size | None = None,
        guide: Guide | None = None,
    ) -> tuple[Tensor, Mix]:
        """(images, mix): images [B, C, H, W] mixed, or as they were where the model mixes tokens, `model(images, mix)`.

        Args:
            images: [B, C, H, W].
            key: what repeats the draw; None: torch's generator is asked for a seed.
            grid: (h, w) of the network's tokens, `view.grid.shape[1:3]`; only mixers that draw on it need it
                (`needs_grid`).
            guide: what the images show where, for mixers that look at them: `guide_for(model, images, labels)`.
        """
        size = (images.shape[-2], images.shape[-1])
        rng = np.random.default_rng(int(torch.randint(2**62, ()))) if key is None else key.generator("mix")
        if grid is None and self.needs_grid:
            raise ValueError(f"{type(self).__name__} needs the token grid: mixer(images, grid=view.grid.shape[1:3])")
        mix = self.draw(len(images), size, grid or size, rng, images.device, guide)
        if mix is None:
            return images, unmixed(len(images), images.device)
        return (apply_to_pixels(images, mix) if mix.level == "pixels" else images), mix

    def draw(
        self, batch_size: int, image_size: Size, grid: Size, rng: Rng, device: Device = None, guide: Guide | None = None
    ) -> Mix | None:
        """A mix for one batch, or None when this batch is left alone.

        Args:
            batch_size: B.
            image_size: (height, width) in pixels of the network's input.
            grid: (h, w) of the network's output tokens.
            rng: where all randomness comes from.
            device: where the mask is made; a few numbers per image travel there.
            guide: what the images show where; only mixers that look at them ask (`guided`).
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to draw")


@dataclass
class MaskMixer(Mixer):
    """Draws one mask per batch, pair or image. Subclasses say how; see `MixToken`, `CutMix`, `MixUp`.

    Args:
        alpha: λ ~ Beta(alpha, alpha), the part that stays, before the box is cut off at the border.
        prob: how often a batch (or pair, or image) is mixed at all.
        mode: "batch" draws once for all, "pair" once for each two partners, "elem" for each image by itself.
    """

    alpha: float = 1.0
    prob: float = 1.0
    mode: Mode = "batch"

    level: ClassVar[Level] = "pixels"
    soft: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check(self.alpha > 0, "alpha must be above 0")
        self.check(0 <= self.prob <= 1, "prob must be in [0, 1]")
        self.check(self.mode in get_args(Mode), "mode must be 'batch', 'pair' or 'elem'")

    def check(self, ok: bool, rule: str) -> None:
        """Raise unless a setting keeps its rule."""
        if not ok:
            raise EverytokenError(f"{rule}, got {self}.")

    def draw(
        self, batch_size: int, image_size: Size, grid: Size, rng: Rng, device: Device = None, guide: Guide | None = None
    ) -> Mix | None:
        """As `Mixer.draw`."""
        count = {"batch": 1, "pair": (batch_size + 1) // 2, "elem": batch_size}[self.mode]
        active = rng.random(count) < self.prob if self.prob < 1 else np.ones(count, dtype=bool)
        if not active.any():
            return None
        mask = self.masks(active, image_size, grid, rng, device)
        if self.mode == "pair":
            first = np.minimum(np.arange(batch_size), np.arange(batch_size)[::-1])
            mask = mask[torch.from_numpy(first).to(mask.device, non_blocking=True)]
        return Mix(
            partner=torch.arange(batch_size - 1, -1, -1, device=device),
            mask=mask,
            ratio=mask.mean((1, 2)).expand(batch_size),
            level=self.level,
            symmetric=self.mode != "elem",
            soft=self.soft,
        )

    def masks(self, active: np.ndarray, image_size: Size, grid: Size, rng: Rng, device: Device) -> Tensor:
        """[n, h, w] masks, all 1 where `active` [n] is False. What a subclass provides."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to draw masks")


def unmixed(batch_size: int, device: Device = None) -> Mix:
    """The mix that changes nothing: every image is wholly its own."""
    ones = torch.ones(batch_size, device=device)
    return Mix(torch.arange(batch_size, device=device), ones[:1].view(1, 1, 1), ones, "pixels")


def apply_to_pixels(images: Tensor, mix: Mix) -> Tensor:
    """Mixed images [B, C, H, W]; uint8 stays uint8 under hard masks and becomes float32 under soft ones."""
    _check(images, mix, "pixels")
    h, w = mix.mask.shape[1:]
    if (h, w) not in ((1, 1), tuple(images.shape[-2:])):
        raise ValueError(f"a mix drawn for (height, width) {(h, w)} does not fit images {list(images.shape)}")
    own, other = _moved(images, mix, (images.shape[-2], images.shape[-1]), 2)
    return _combine(own, other, mix.mask[:, None], mix.soft)


def apply_to_tokens(tokens: Tensor, mix: Mix, layout: Layout = "NHWC") -> Tensor:
    """Mixed tokens, in the layout they came in.

    Args:
        tokens: [B, h, w, D] ("NHWC"), [B, D, h, w] ("NCHW"), or [B, h·w, D] ("NLC", on the mask's own grid). The grid
            may be finer than the mask's, as after the patch embedding of hierarchical backbones.
        mix: at the level of tokens.
    """
    _check(tokens, mix, "tokens")
    return _combine(tokens, tokens[mix.partner], _mask_for(tokens, mix, layout), mix.soft)


def unmix_tokens(tokens: Tensor, mix: Mix, layout: Layout = "NHWC") -> Tensor:
    """Put output tokens back to their own images, so that token i of image b meets image b's own label.

    Only where that is possible (`mix.unmixes`); under "elem" masks tokens are returned as they are, and the objective
    mixes the targets instead.
    """
    return apply_to_tokens(tokens, mix, layout) if mix.unmixes else tokens


def mix_image_target(target: CompactTarget, mix: Mix) -> CompactTarget:
    """The class token's target [B]: ratio · own + (1-ratio) · partner."""
    return blend(target, mix.ratio, target[mix.partner], 1 - mix.ratio)


def mix_token_target(target: CompactTarget, mix: Mix) -> CompactTarget:
    """The token targets [B, h, w] of a mixed image: each place gets the label of what it shows.

    A token that shows two images gets r · own + (1-r) · partner with r its own part of the area. For a view's tokens,
    give `mix.shown`: tokens that have been un-mixed keep their targets.
    """
    own = mix.at((target.shape[1], target.shape[2])).expand(target.shape)
    first, second = placed_token_targets(target, mix)
    return blend(first, own, second, 1 - own)


def placed_token_targets(target: CompactTarget, mix: Mix) -> tuple[CompactTarget, CompactTarget]:
    """The token targets [B, h, w] of the own image and of the partner, where the mix shows their patches."""
    first, second = target, target[mix.partner]
    if mix.moves is None:
        return first, second
    mass, background, weight = (placed(t, mix) for t in (target.mass, target.background, target.weight))
    return (
        replace(first, mass=mass[0], background=background[0], weight=weight[0]),
        replace(second, mass=mass[1], background=background[1], weight=weight[1]),
    )


def placed(x: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
    """Values [B, h, w, ...] of tokens, of the own image and of the partner, where the mix shows their patches."""
    return _moved(x, mix, (x.shape[1], x.shape[2]), 1)


def _moved(x: Tensor, mix: Mix, size: Size, dim: int) -> tuple[Tensor, Tensor]:
    """Own and partner's values, each patch where `mix.moves` puts it; `dim` is the first of x's two of size (H, W)."""
    if mix.moves is None:
        return x, x[mix.partner]
    (H, W), (h, w) = size, mix.moves.shape[-2:]
    if H % h or W % w:
        raise EverytokenError(f"a mix that moves {h}x{w} patches does not fit a grid of {H}x{W}; it must divide it.")
    tall, wide = H // h, W // w
    patch = mix.moves.repeat_interleave(tall, 2).repeat_interleave(wide, 3)  # [B, 2, H, W]
    inner = torch.arange(H, device=x.device)[:, None] % tall, torch.arange(W, device=x.device) % wide
    index = ((patch // w * tall + inner[0]) * W + patch % w * wide + inner[1]).flatten(2)
    flat = x.flatten(dim, dim + 1)
    out = []
    for source, place in ((flat, index[:, 0]), (flat[mix.partner], index[:, 1])):
        shape = [1] * flat.dim()
        shape[0], shape[dim] = place.shape
        out.append(source.gather(dim, place.view(shape).expand_as(source)).view_as(x))
    return out[0], out[1]


def _combine(own: Tensor, other: Tensor, mask: Tensor, soft: bool) -> Tensor:
    if not soft:
        return torch.where(mask >= 0.5, own, other)
    if not own.is_floating_point():
        own, other = own.float(), other.float()
    return torch.lerp(other, own, mask.to(own.dtype))


def _mask_for(tokens: Tensor, mix: Mix, layout: Layout) -> Tensor:
    n, h, w = mix.mask.shape
    if layout == "NLC":
        if tokens.shape[1] != h * w:
            raise ValueError(f"{tokens.shape[1]} tokens do not lie on the mix's grid of {h}x{w}")
        return mix.mask.view(n, h * w, 1)
    grid = (tokens.shape[2], tokens.shape[3]) if layout == "NCHW" else (tokens.shape[1], tokens.shape[2])
    if grid[0] % h or grid[1] % w:
        raise EverytokenError(f"a mix on {h}x{w} cells does not fit {grid[0]}x{grid[1]} tokens; it must divide them.")
    mask = mix.at(grid)
    return mask[:, None] if layout == "NCHW" else mask[..., None]


def _check(x: Tensor, mix: Mix, level: str) -> None:
    if mix.level != level or x.shape[0] != len(mix):
        raise ValueError(f"this mix is for the {mix.level} of {len(mix)} images, not for the {level} of {x.shape[0]}")


# Boxes, as CutMix and MixToken draw them. As released: λ ~ Beta(α, α), then a centre row, then a centre column, both
# uniform; cut = int(side · sqrt(1-λ)) per axis; the box is centre ∓ cut // 2, half-open, clipped. So odd sides lose
# one, edges cut off, and on a 14x14 grid 2.1 % of the boxes are empty and the mean box covers 27 %.


def draw_boxes(count: int, size: Size, alpha: float, rng: Rng) -> np.ndarray:
    """[count, 4] int64 boxes (row 0, column 0, row 1, column 1), half-open, on a grid of size (h, w)."""
    lam = rng.beta(alpha, alpha, size=count)
    centre = np.stack([rng.integers(0, side, size=count) for side in size], axis=1)
    return boxes_at(lam, centre, size)


def boxes_at(lam: np.ndarray, centre: np.ndarray, size: Size) -> np.ndarray:
    """[n, 4] boxes for given λ [n] and centres [n, 2] (row, column)."""
    limit = np.asarray(size)
    half = (limit * np.sqrt(1 - lam)[:, None]).astype(np.int64) // 2
    return np.concatenate([np.clip(centre - half, 0, limit), np.clip(centre + half, 0, limit)], axis=1)


def box_masks(boxes: np.ndarray | Tensor, size: Size, device: Device) -> Tensor:
    """[n, h, w] float32: 0 inside the box, 1 outside. Made on the device from four numbers per box."""
    row0, column0, row1, column1 = torch.as_tensor(boxes).to(device, non_blocking=True)[:, :, None].unbind(1)
    rows, columns = torch.arange(size[0], device=device), torch.arange(size[1], device=device)
    inside_rows = (rows >= row0) & (rows < row1)
    inside_columns = (columns >= column0) & (columns < column1)
    return (~(inside_rows[:, :, None] & inside_columns[:, None, :])).float()

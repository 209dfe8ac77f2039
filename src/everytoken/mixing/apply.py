"""Carrying out a mix: on pixels, on tokens, on targets, and undoing it on output tokens.

Paper: All Tokens Matter, eq. 5-7. Un-mixing uses that partners share one mask: token (b, i) of the mixed batch shows
image b where the mask is 1 and its partner elsewhere, so swapping the same places once more puts every token back to
its own image. Everything is `where` or `lerp` on tensors: no Python numbers, safe to compile, inputs are not modified.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.functional import CompactTarget, blend
from everytoken.mixing.mix import Mix

Layout = Literal["NHWC", "NCHW", "NLC"]


def apply_to_pixels(images: Tensor, mix: Mix) -> Tensor:
    """Mixed images [B, C, H, W]; uint8 stays uint8 under hard masks and becomes float32 under soft ones."""
    _check(images, mix, "pixels")
    h, w = mix.mask.shape[1:]
    if (h, w) not in ((1, 1), tuple(images.shape[-2:])):
        raise EverytokenError(
            f"this mix was drawn for images of {h}x{w} pixels (height x width), these are "
            f"{images.shape[-2]}x{images.shape[-1]}."
        )
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

    A token that shows two images gets r · own + (1-r) · partner with r its own part of the area. Not for tokens that
    have been un-mixed (`mix.unmixes`): those keep their targets.
    """
    own = mix.at((target.shape[1], target.shape[2])).expand(target.shape)
    first, second = placed_token_targets(target, mix)
    return blend(first, own, second, 1 - own)


def placed_token_targets(target: CompactTarget, mix: Mix) -> tuple[CompactTarget, CompactTarget]:
    """The token targets [B, h, w] of the own image and of the partner, where the mix shows their patches."""
    first, second = target, target[mix.partner]
    if mix.moves is None:
        return first, second
    grid = (target.shape[1], target.shape[2])
    mass, background, weight = (_moved(t, mix, grid, 1) for t in (target.mass, target.background, target.weight))
    return (
        replace(first, mass=mass[0], background=background[0], weight=weight[0]),
        replace(second, mass=mass[1], background=background[1], weight=weight[1]),
    )


def _moved(x: Tensor, mix: Mix, size: tuple[int, int], dim: int) -> tuple[Tensor, Tensor]:
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
            raise EverytokenError(f"{tokens.shape[1]} tokens do not lie on the mix's grid of {h}x{w}.")
        return mix.mask.view(n, h * w, 1)
    grid = (tokens.shape[2], tokens.shape[3]) if layout == "NCHW" else (tokens.shape[1], tokens.shape[2])
    if grid[0] % h or grid[1] % w:
        raise EverytokenError(
            f"a mix drawn on a grid of {h}x{w} does not fit {grid[0]}x{grid[1]} tokens: some token would belong to two "
            "images. Draw it on the grid of the backbone's last tokens."
        )
    mask = mix.at(grid)
    return mask[:, None] if layout == "NCHW" else mask[..., None]


def _check(x: Tensor, mix: Mix, level: str) -> None:
    if mix.level != level:
        raise EverytokenError(f"this mix is for {mix.level}, not for {level}.")
    if x.shape[0] != len(mix):
        raise EverytokenError(f"this mix is for a batch of {len(mix)}, got {x.shape[0]}.")

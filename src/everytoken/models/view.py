"""The token view: one small interface through which every objective sees any backbone.

`TokenModel(backbone)` wraps a timm model without changing it and answers a batch of images with a `TokenView`: class
logits, the token grid in image order, prefix tokens and, with a token head, logits for every token. The backbone's
state dict stays that of the plain timm model, so weights trained here load in timm.

Cost: nothing beyond the backbone and the token head (about 1 % of a ViT's multiply-adds at 1000 classes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.mixing import Mix, apply_to_tokens, unmix_tokens
from everytoken.models.align import Aligner, Alignment, Shares
from everytoken.models.families import Family, Layout, UnsupportedModelError, family_of


@dataclass(frozen=True)
class TokenView:
    """What a backbone shows for a batch.

    Attributes:
        logits: [B, K] of the class token (or of the pooled grid).
        grid: [B, h, w, D] tokens in image order (row 0 is the top), after the backbone's last norm.
        prefix: [B, P, D] class, distillation and register tokens, or None.
        token_logits: [B, h, w, C] from the token head, or None without one.
        distill_logits: [B, K] of the distillation token while it is trained, or None.
        shares: which part of class token and tokens belongs to their own image, after `align` and with a mix; or None.
    """

    logits: Tensor
    grid: Tensor
    prefix: Tensor | None = None
    token_logits: Tensor | None = None
    distill_logits: Tensor | None = None
    shares: Shares | None = None


class TokenModel(nn.Module):
    """A timm backbone, seen token by token.

    Args:
        backbone: any timm model of a supported family (`everytoken models`).
        token_classes: outputs of the token head. None: no token head. Backbones that bring one (`aux_head` of LV-ViT
            and VOLO) use it when it has that many outputs.
    """

    def __init__(self, backbone: nn.Module, token_classes: int | None = None) -> None:
        super().__init__()
        self.family: Family = family_of(backbone)
        self.backbone = backbone
        self.token_head: nn.Linear | None = None
        self._own_head = False
        if token_classes:
            self.add_token_head(token_classes)
        self.aligner: Aligner | None = None
        self._slot = _MixSlot()
        if self.family.embed is not None:
            embed = backbone.get_submodule(self.family.embed)
            embed.register_forward_hook(_MixHook(self._slot, self.family.embed_layout))

    def add_token_head(self, classes: int) -> None:
        """Give every token a classifier with `classes` outputs, the backbone's own if it fits."""
        own = getattr(self.backbone, "aux_head", None)
        self._own_head = isinstance(own, nn.Linear) and own.out_features == classes
        if not self._own_head:
            like = next(self.backbone.parameters())
            self.token_head = nn.Linear(self.num_features, classes, device=like.device, dtype=like.dtype)
            nn.init.trunc_normal_(self.token_head.weight, std=0.02)
            nn.init.zeros_(self.token_head.bias)

    def align(self, options: Alignment | None = None) -> None:
        """From now on follow the shares of mixed images through the backbone (TL-Align), see `TokenView.shares`."""
        if self.aligner is not None:
            self.aligner.remove()
        self.aligner = Aligner(self.backbone, options)

    @property
    def num_features(self) -> int:
        """Channels D of a token."""
        return int(self.backbone.num_features)  # type: ignore[arg-type]

    @property
    def uses_own_head(self) -> bool:
        """Whether token logits come from a head that the backbone brought along."""
        return self._own_head

    @property
    def can_mix_tokens(self) -> bool:
        """Whether tokens can be mixed between patch embedding and position embedding (MixToken)."""
        return self.family.embed is not None

    def forward(self, images: Tensor, mix: Mix | None = None) -> TokenView:
        """Images [B, C, H, W] -> TokenView.

        A `mix` of tokens is carried out after the patch embedding, and undone on the grid (where it can be), so that
        every token stands for its own image again. A mix of pixels has been carried out by the caller.
        """
        token_mix = mix if mix is not None and mix.level == "tokens" else None
        if token_mix is not None and not self.can_mix_tokens:
            raise EverytokenError(
                f"MixToken needs the patch embedding of {type(self.backbone).__name__}, which cannot be reached or "
                "overlaps its neighbours; use CutMix instead, which mixes pixels and works on every backbone"
            )
        self._slot.mix = token_mix
        shares = None
        forward: Any = self.backbone.forward_features
        try:
            if self.aligner is None or mix is None:
                features = forward(images)
            else:
                features, shares = self.aligner.run(forward, images, mix)
        finally:  # after an error that the caller survives, the next batch must not be mixed
            self._slot.mix = None
        grid, prefix = self.split(features, (images.shape[-2], images.shape[-1]))
        logits, distill = self._class_logits(features)
        if token_mix is not None:
            grid = unmix_tokens(grid, token_mix)
            if shares is not None and token_mix.unmixes:
                shares = shares.unmixed(token_mix.at((grid.shape[1], grid.shape[2])), token_mix.partner)
        return TokenView(logits, grid, prefix, self.token_logits(grid), distill, shares)

    def token_logits(self, grid: Tensor) -> Tensor | None:
        """[B, h, w, D] -> [B, h, w, C], or None without a token head."""
        head = self.backbone.aux_head if self._own_head else self.token_head
        return None if head is None else head(grid)  # type: ignore[operator]

    def split(self, features: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Backbone features -> (grid [B, h, w, D], prefix [B, P, D] or None); `size` is the image's (height, width)."""
        if not isinstance(features, Tensor):
            raise UnsupportedModelError(
                f"{type(self.backbone).__name__}.forward_features returns a {type(features).__name__}, not one tensor"
            )
        if self.family.layout == "tokens":
            prefix_count = self._prefix_count()
            prefix = features[:, :prefix_count] if prefix_count else None
            tokens = _norm_of_pooled(self.backbone, features[:, prefix_count:])
            h, w = grid_shape(tokens.shape[1], size)
            return tokens.reshape(tokens.shape[0], h, w, tokens.shape[2]), prefix
        features = _norm_of_pooled(self.backbone, features)
        return (features.permute(0, 2, 3, 1) if self.family.layout == "nchw" else features), None

    def cell_logits(self, images: Tensor) -> Tensor:
        """The backbone's own classifier at every cell: images [B, C, H, W] -> [B, h, w, K].

        Each cell is handed to the backbone's head as if it were an image of one cell, so norms, hidden layers and
        biases of the head are applied as they would be. Where pooling is a plain mean and the head is linear, the
        mean over the cells equals the model's logits. For models with a class token, the class head reads the patch
        tokens.
        """
        return self._cells(self.backbone.forward_features(images), (images.shape[-2], images.shape[-1]))  # type: ignore[operator]

    def class_and_cell_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits [B, K] and logits [B, h, w, C] of every cell, the token head's or `cell_logits`; one pass."""
        size = (images.shape[-2], images.shape[-1])
        features = self.backbone.forward_features(images)  # type: ignore[operator]
        tokens = self.token_logits(self.split(features, size)[0])
        return self._class_logits(features)[0], self._cells(features, size) if tokens is None else tokens

    def _cells(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        if self.family.layout == "tokens":
            count = self._prefix_count()
            tokens = features[:, count:]
            b, n, d = tokens.shape
            cells = tokens.reshape(b * n, 1, d).expand(-1, count + 1, -1)
            h, w = grid_shape(n, size)
        elif self.family.layout == "nchw":
            b, d, h, w = features.shape
            cells = features.permute(0, 2, 3, 1).reshape(b * h * w, d, 1, 1)
        else:
            b, h, w, d = features.shape
            cells = features.reshape(b * h * w, 1, 1, d)
        logits, _ = self._class_logits(cells)
        return logits.reshape(b, h, w, -1)

    def _class_logits(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        model: Any = self.backbone
        if self.family.title == "VOLO" and (self.training or features.shape[1] == 2):
            # VOLO's head adds half of the strongest token logits, which is meant for evaluation of whole images
            return model.head(model.forward_head(features, pre_logits=True)), None
        out = model.forward_head(features)
        return out if isinstance(out, tuple) else (out, None)

    def _prefix_count(self) -> int:
        if self.family.prefix is not None:
            return self.family.prefix
        return int(self.backbone.num_prefix_tokens)  # type: ignore[arg-type]


class _MixSlot:
    """Holds the mix of the forward pass that is under way."""

    def __init__(self) -> None:
        self.mix: Mix | None = None


class _MixHook:
    """Mixes what a patch embedding returns. Copies of the backbone alone copy an empty slot, so they mix nothing."""

    def __init__(self, slot: _MixSlot, layout: Layout) -> None:
        self.slot = slot
        self.layout = layout

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if self.slot.mix is None:
            return None
        size = (args[0].shape[-2], args[0].shape[-1])
        if output.ndim == 3:  # [B, N, D]
            h, w = grid_shape(output.shape[1], size)
            mixed = apply_to_tokens(output.reshape(output.shape[0], h, w, -1), self.slot.mix)
            return mixed.reshape(output.shape)
        return apply_to_tokens(output, self.slot.mix, "NCHW" if self.layout == "nchw" else "NHWC")


def grid_shape(count: int, size: tuple[int, int]) -> tuple[int, int]:
    """The grid (h, w) of `count` tokens whose proportions are nearest to an image of (height, width)."""
    height, width = size
    best = min(
        (h for h in range(1, count + 1) if count % h == 0),
        key=lambda h: abs(h * h * width - count * height) / h,
    )
    return best, count // best


def _norm_of_pooled(model: nn.Module, features: Tensor) -> Tensor:
    """Apply, to every cell, the norm that some backbones keep for after pooling (ConvNeXt, ViT with `fc_norm`)."""
    norm = getattr(model, "fc_norm", None)
    if norm is None:
        norm = getattr(getattr(model, "head", None), "norm", None)
    if norm is None or isinstance(norm, nn.Identity):
        return features
    return norm(features)


@torch.no_grad()
def probe(model: TokenModel, size: tuple[int, int], channels: int = 3) -> tuple[int, int]:
    """The token grid (h, w) for images of (height, width), found by one forward pass of zeros."""
    was = model.training
    model.eval()
    like = next(model.parameters())
    view = model(torch.zeros(1, channels, *size, device=like.device, dtype=like.dtype))
    model.train(was)
    return view.grid.shape[1], view.grid.shape[2]

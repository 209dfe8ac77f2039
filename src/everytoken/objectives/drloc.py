"""`drloc`: every pair of tokens is a small question: how far apart are you?

Paper: "Efficient Training of Visual Transformers with Small Datasets" (NeurIPS 2021) and its supplement; the equations
are in `everytoken.functional.drloc`. It needs no labels and no annotator, and helps most where data is scarce.
Loss: λ · mean over m = 64 pairs per image of |distance - MLP(token a, token b)|, distances as fractions of the grid.
λ is 0.1, ours; the paper's are weaker or stronger by model and were used with distances that are not divided.

Variants: `l1` (the method), `signed` (equation 3), `ce` (5), `reg` (6), `all` (7: every block, with an MLP each). The
paper finds `l1` best and `all` worse than nothing. Grids larger than 7x7 are averaged to 7x7, as the paper does.

What we do differently: any backbone with a token grid, rectangular grids, keyed randomness on the device, nothing in
evaluation. The grid is that of the token view, after the final norm. `released=True` does as the authors' code:
- offsets are not divided by the grid's size, signed ones are shifted to start at 0;
- `ce` and `reg`: k classes without direction (2k - 1 with), k = 14 but for Swin, and one more linear layer, without an
  activation after it; `reg` weighs log σ² by α, not log σ;
- pooling by 3x3 windows with stride 2, and none for ViT; Swin and ViT are read before the final norm; `all` reads what
  the next stage's merging makes of each stage;
- λ grows from 0 over `warmup`, then falls to 0 at the end of the training;
- the MLP starts as torch's linear layers do, but for Swin and T2T-ViT, where the deviation is 0.02 as here.

Cost: 1.2 % of a Swin-T training step's multiply-adds and 0.8 % of a DeiT-S's at 224; +1.1 M and +0.7 M parameters,
which are not part of the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import drloc as fn
from everytoken.models import TokenModel, TokenView
from everytoken.models.token_model import LayerTaps
from everytoken.objectives.base import Objective, check_choice, draws, need

Variant = Literal["l1", "signed", "ce", "reg", "all"]
Levels = Literal["last", "final", "blocks", "stages", "merged"]

# Ours, for distances divided by the grid's size; docs/drloc.md says how it was chosen.
LAMBDA = 0.1
# The paper's, by the title of the family. The released code has the same numbers for distances that are not divided.
PAPER_LAMBDA: dict[str, float] = {
    "Swin": 0.5,
    "Swin V2": 0.5,
    "T2T-ViT": 0.1,
    "CvT": 0.1,
    "ViT, DeiT, DINOv2, SigLIP": 0.01,
    "DeiT, DeiT-III": 0.01,
    "ViT with relative positions": 0.01,
    "BEiT": 0.01,
    "EVA": 0.01,
}
SWIN = ("Swin", "Swin V2")
VIT = ("ViT, DeiT, DINOv2, SigLIP", "DeiT, DeiT-III")


class DrlocHead(nn.Module):
    """The localization MLP: pairs of tokens -> distances, or class logits per axis.

    Args:
        dim: channels d of a token.
        classes: None: 2 numbers per pair (three layers 2d-512-512-2, ReLU). (rows, columns): logits of that many
            classes per axis.
        hidden: width of the hidden layers; the paper finds 512 best of 256, 512, 1024.
        extra: with classes, one more linear layer before the two branches, as released.
        std: of the weights at the start (truncated normal, biases 0); None: as torch's linear layers start.

    The keys are the released ones: `layers.{0,2,4}`, and with classes `unshared.{0,1}`.
    """

    def __init__(
        self,
        dim: int,
        classes: tuple[int, int] | None = None,
        hidden: int = 512,
        extra: bool = False,
        std: float | None = 0.02,
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.unshared: nn.ModuleList | None = None
        if classes is None:
            self.layers.append(nn.Linear(hidden, 2))
        else:
            if extra:
                self.layers.append(nn.Linear(hidden, hidden))
            self.unshared = nn.ModuleList([nn.Linear(hidden, count) for count in classes])
        if std is not None:
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=std)
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, pairs: fn.Pairs | None) -> Any:
        """Tokens [B, N, d], positions [B, m] twice (None: all pairs) -> [B, m, 2] or two tensors [B, m, classes]."""
        first: Any = self.layers[0]
        hidden = fn.pair_hidden(tokens, pairs, first.weight, first.bias)
        for layer in islice(self.layers, 1, None):
            hidden = layer(hidden)
        return hidden if self.unshared is None else tuple(branch(hidden) for branch in self.unshared)


class Drloc(Objective):
    """Dense relative localization on the token grid [B, h, w, D].

    Args:
        model: the TokenModel that is trained: its token width, its family, and layers to read. Or `dim`.
        weight: λ. None: 0.1, or with `released` the paper's. "paper": the paper's for this family (PAPER_LAMBDA), and
            0.1 for families that are not in the paper.
        variant: "l1", "signed", "ce", "reg" or "all".
        pairs: m per image, or "all" for every ordered pair.
        pool: average larger grids to this size, (rows, columns) or one number; None: never; "auto": 7, but not for
            grids between the layers.
        levels: "last", the grid of the token view, or grids from inside the backbone: "final" (before the last norm),
            "blocks", "stages" or "merged" (released multi-scale), see `everytoken.models.token_model.LayerTaps`.
            None: "last", and "blocks" for the variant "all".
        signed: targets tell directions; None: as the variant has it.
        skip_crossing: on mixed images, leave out pairs whose ends come from different images.
        alpha: weight of log σ in `reg`.
        hidden: width of the MLP.
        released: as the authors' code, see the head of this file; the batch's key must say how far the training is.
        warmup: with `released`, the fraction of the training in which λ grows; 20 of 300 epochs.
        dim: instead of `model`: the channels D of token grids [B, h, w, D] that any network makes.

    Example:
        model = TokenModel(timm.create_model("vit_base_patch16_224"))
        step = TokenStep(model, {"hard": HardLabels(), "drloc": Drloc(model)})
        optimizer = torch.optim.AdamW(step.parameters())        # with the MLP; so does DistributedDataParallel(step)
        step(Batch(images, labels))["loss"].backward()

        Drloc(dim=768)(tokens[:, 1:].unflatten(1, (14, 14)))["loss"].backward()   # tokens [B, 1 + 196, 768]
    """

    name = "drloc"
    multi_label = True
    built_from = frozenset({"model", "dim"})

    def __init__(
        self,
        model: TokenModel | None = None,
        weight: float | Literal["paper"] | None = None,
        variant: Variant = "l1",
        pairs: int | Literal["all"] = 64,
        pool: int | tuple[int, int] | Literal["auto"] | None = "auto",
        levels: Levels | None = None,
        signed: bool | None = None,
        skip_crossing: bool = False,
        alpha: float = 0.001,
        hidden: int = 512,
        released: bool = False,
        warmup: float = 20 / 300,
        *,
        dim: int | None = None,
    ) -> None:
        if (model is None) == (dim is None):
            raise ValueError("drloc takes a TokenModel, Drloc(model), or the channels of a grid, Drloc(dim=384)")
        if model is None and (released or weight == "paper" or variant == "all" or levels not in ("last", None)):
            raise ValueError("drloc: released, weight='paper', variant='all' and levels need a network: Drloc(model)")
        family = "" if model is None else model.family.title
        if weight is None:
            weight = "paper" if released else LAMBDA
        if isinstance(weight, str):
            check_choice(self.name, "weight", weight, ("paper",))
            weight = PAPER_LAMBDA.get(family, LAMBDA)
        super().__init__(weight)
        self.family = family
        check_choice(self.name, "variant", variant, get_args(Variant))
        if levels is None:
            levels = ("merged" if released else "blocks") if variant == "all" else "last"
            if released and levels == "last" and family in SWIN + VIT:
                levels = "final"
        check_choice(self.name, "levels", levels, get_args(Levels))
        if pairs != "all" and not (isinstance(pairs, int) and pairs > 0):
            raise EverytokenError(f"drloc: pairs is a number above 0 or 'all', not {pairs!r}.")
        if not 0 <= warmup < 1:
            raise EverytokenError(f"drloc: warmup must be in [0, 1), got {warmup}.")
        if pool == "auto":
            pool = 7 if levels in ("last", "final") and not (released and family in VIT) else None
        self.pool = (pool, pool) if isinstance(pool, int) else None if pool is None else (pool[0], pool[1])
        self.variant, self.pairs, self.levels, self.skip_crossing = variant, pairs, levels, skip_crossing
        self.alpha, self.hidden, self.released, self.warmup = alpha, hidden, released, warmup
        self.signed = (variant == "signed" or (variant in ("ce", "reg") and not released)) if signed is None else signed
        self.requires = frozenset({"progress"} if released else ())
        self.taps = None if model is None or levels == "last" else LayerTaps(model, levels)
        device = None if model is None else next(model.parameters()).device
        widths = [dim or model.num_features] if self.taps is None else self.taps.dims  # type: ignore[union-attr]
        self.width = widths[-1]
        self.heads = nn.ModuleList(self._head(width).to(device) for width in widths)

    def extra_repr(self) -> str:
        """λ, and what it weighs."""
        distances = "as counted" if self.released else "divided by the grid's size"
        classes = self.variant in ("ce", "reg")
        return f"weight={self.weight:g}, variant={self.variant!r}" + ("" if classes else f", distances {distances}")

    def _head(self, dim: int) -> DrlocHead:
        classes = None
        if self.variant in ("ce", "reg"):
            rows, columns = (fn.class_count(side, self.signed, self.released) for side in self._sides())
            classes = (rows, columns)
        std = None if self.released and self.family not in (*SWIN, "T2T-ViT") else 0.02
        return DrlocHead(dim, classes, self.hidden, extra=self.released, std=std)

    def _sides(self) -> tuple[int, int]:
        """The k that classes are counted for, along rows and columns."""
        if self.released and self.family not in SWIN:
            return 14, 14
        if self.pool is None:
            raise EverytokenError(f"drloc: {self.variant!r} must know the grid to count its classes; set pool.")
        return self.pool

    def terms(self, view: TokenView, batch: Batch) -> dict[str, Tensor]:
        """{variant: loss}, summed over levels; nothing in evaluation."""
        if not self.training:
            return {}
        grids, masks = self._grids(view, batch)
        # a level of one token has no distances; it is left out as long as there is another
        levels = [i for i, grid in enumerate(grids) if grid.shape[1] * grid.shape[2] > 1] or [*range(len(grids))]
        pooled = {i: self._pooled(grids[i]) for i in levels}
        pairs = self._draw(batch, pooled)
        losses = [self._loss(pooled[i], pairs[i], masks[i], i) for i in levels]
        # adds 0 * parameters so that DDP sees every gradient
        losses += [p.sum() * 0 for i, head in enumerate(self.heads) if i not in levels for p in head.parameters()]
        total = torch.stack(losses).sum()
        if self.released:
            key = need(batch.key, "drloc", "the progress of the training: Batch(key=StepKey(epoch=..., epochs=...))")
            total = total * fn.ramp(key.progress, self.warmup)
        return {self.variant: total}

    def _grids(self, view: TokenView, batch: Batch) -> tuple[list[Tensor], list[Tensor | None]]:
        """Grids, and for each the mask of own tokens (None: pairs cannot cross, or may)."""
        mix = batch.mix if self.skip_crossing else None
        if self.taps is None:
            grids = [view.grid]
            if view.grid.shape[-1] != self.width:
                raise ValueError(f"drloc is for tokens of {self.width} channels, got {list(view.grid.shape)}")
            mix = None if mix is None else mix.shown  # the view has put tokens back to their images
        else:
            grids = self.taps.grids((batch.images.shape[-2], batch.images.shape[-1]))
        return grids, [None if mix is None else mix.at((g.shape[1], g.shape[2])) for g in grids]

    def _pooled(self, grid: Tensor) -> Tensor:
        pooled = grid
        if self.pool is not None:
            pooled = fn.pool_grid(grid, self.pool, "released" if self.released else "mean")
        if pooled.shape[1:3] == (1, 1):
            raise EverytokenError(
                f"drloc: the grid of {grid.shape[1]}x{grid.shape[2]} tokens is pooled to 1x1, which has no distances. "
                "Set pool, take larger images (img_size) or, in a backbone with stages, levels='stages'."
            )
        return pooled

    @torch.compiler.disable  # generators cannot be traced: in a compiled step, all draws are one break
    def _draw(self, batch: Batch, grids: Mapping[int, Tensor]) -> dict[int, fn.Pairs]:
        return {i: self._pairs(grid, draws(batch, f"drloc/{i}", grid.device)) for i, grid in grids.items()}

    def _pairs(self, grid: Tensor, generator: torch.Generator) -> fn.Pairs:
        size = (grid.shape[1], grid.shape[2])
        if self.pairs == "all":
            return fn.all_pairs(size, grid.device)
        return fn.random_pairs(grid.shape[0], int(self.pairs), size, generator)

    def _loss(self, grid: Tensor, positions: fn.Pairs, mask: Tensor | None, level: int) -> Tensor:
        b, size = grid.shape[0], (grid.shape[1], grid.shape[2])
        answer = self.heads[level](grid.flatten(1, 2), None if self.pairs == "all" else positions)
        weight = None
        if mask is not None:
            if mask.shape[1:] != size:
                mask = fn.pool_grid(mask.unsqueeze(-1), size, "mean").squeeze(-1)
            weight = fn.same_image(mask.expand(b, *size), positions)
        offset = fn.offsets(positions, size)
        if self.variant in ("ce", "reg"):
            sides = self._sides()
            if size[0] > sides[0] or size[1] > sides[1]:
                raise EverytokenError(f"drloc: the grid is {size}, but classes were counted for {sides}; set pool.")
            classes = fn.offset_classes(offset, size, sides, self.signed, self.released)
            if self.variant == "ce":
                return fn.drloc_ce(answer, classes, weight)
            return fn.drloc_reg(answer, classes, weight, self.alpha, "variance" if self.released else "sigma")
        return fn.drloc_l1(answer, fn.offset_targets(offset, size, self.signed, self.released), weight)

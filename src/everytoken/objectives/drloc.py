"""`drloc`: every pair of tokens is a small question: how far apart are you?

Paper: "Efficient Training of Visual Transformers with Small Datasets" (NeurIPS 2021) and its supplement; the equations
are in `everytoken.functional.drloc`. It needs no labels and no annotator, and helps most where data is scarce.
Loss: λ · mean over m = 64 pairs per image of |distance - MLP(token a, token b)|, distances as parts of the grid.

Variants: `l1` (the method), `signed` (equation 3), `ce` (5), `reg` (6), `all` (7: every block, with an MLP each). The
paper finds `l1` best and `all` worse than nothing. Grids larger than 7x7 are averaged to 7x7, as the paper does.

What we do differently: any backbone with a token grid, rectangular grids, keyed randomness on the device, nothing in
evaluation. The grid is that of the token view, after the final norm (`levels="final"` is before it, as the released
Swin and ViT have it; its T2T-ViT is after). What the released code does otherwise can be asked for by part: RELEASED.

Cost: 1.2 % of a Swin-T training step's multiply-adds and 0.8 % of a DeiT-S's at 224; +1.1 M and +0.7 M parameters,
which are not part of the backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError, did_you_mean
from everytoken.functional import drloc as fn
from everytoken.objectives.base import Objective, View, draws

if TYPE_CHECKING:
    from everytoken.models import TokenModel

Variant = Literal["l1", "signed", "ce", "reg", "all"]
Levels = Literal["last", "final", "blocks", "stages", "merged"]

# λ by the title of the family. Swin, T2T-ViT, CvT and ViT-B are the paper's; the paper and its code do not tell that of
# ResNet-50, so it and all others get 0.1, that of the paper's other models with convolutions. LV-ViT, too: 0.01 did
# nothing there (docs/results.md).
LAMBDA: dict[str, float] = {
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
LAMBDA_OTHERS = 0.1

# Parts in which the authors' released code departs from the paper.
RELEASED: dict[str, str] = {
    "offsets": "offsets are not divided by the grid's size, signed ones are shifted to start at 0",
    "classes": "k classes without direction (2k - 1 with), not 2k + 1",
    "head": "ce and reg have one more linear layer, without activation after it",
    "variance": "reg weighs log σ² by α, not log σ",
    "pooling": "3x3 windows with stride 2, not 2x2 means",
    "schedule": "λ grows from 0 over `warmup`, then falls to 0 at the end",
    "init": "the MLP starts as torch's linear layers do (but for Swin and T2T-ViT), not with a deviation of 0.02",
}
# Families whose released models initialise the MLP along with everything else, with a deviation of 0.02.
INIT_BY_MODEL = frozenset({"Swin", "Swin V2", "T2T-ViT"})


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


@dataclass(frozen=True)
class Drloc(Objective):
    """Dense relative localization.

    Args:
        weight: λ; None: that of the family (LAMBDA).
        dim: channels of a token; needed unless `attach` is called.
        family: title of the backbone's family, for λ and the released initialisation; `attach` finds it out.
        variant: "l1", "signed", "ce", "reg" or "all".
        pairs: m per image, or "all" for every ordered pair.
        pool: average larger grids to this size, (rows, columns) or one number; None: never; "auto": 7, but not for
            levels between the layers.
        levels: "last", the grid of the token view; or grids from inside the backbone, which need `attach`: "final",
            "blocks", "stages" or "merged" (released multi-scale), see `everytoken.models.token_model.LayerTaps`.
        skip_crossing: on mixed images, leave out pairs whose ends come from different images.
        alpha: weight of log σ in `reg`.
        norm: L1 norm instead of the mean over the two axes, twice the loss.
        sides: with `ce` and `reg`, the k that classes are counted for; None: the pooled grid. (Released: 14 for
            T2T-ViT, CvT and ViT, though the grid is 7.)
        direction: with `ce` and `reg`, classes tell directions; None: as the paper (yes) or, with released classes, no.
        hidden: width of the MLP.
        warmup: part of the training in which the released schedule lets λ grow; 20 of 300 epochs.
        released: parts of the released code's behaviour (RELEASED), or "all".
    """

    weight: float = None  # type: ignore[assignment]  # set in __post_init__
    dim: int = 0
    family: str = ""
    variant: Variant = "l1"
    pairs: int | Literal["all"] = 64
    pool: int | tuple[int, int] | Literal["auto"] | None = "auto"
    levels: Levels = "last"
    skip_crossing: bool = False
    alpha: float = 0.001
    norm: bool = False
    sides: int | None = None
    direction: bool | None = None
    hidden: int = 512
    warmup: float = 20 / 300
    released: Sequence[str] | str = ()

    name: ClassVar[str] = "drloc"

    def __post_init__(self) -> None:
        _check("variant", self.variant, get_args(Variant))
        _check("levels", self.levels, get_args(Levels))
        if self.pairs != "all" and not (isinstance(self.pairs, int) and self.pairs > 0):
            raise EverytokenError(f"drloc: pairs is a number above 0 or 'all', not {self.pairs!r}.")
        if not 0 <= self.warmup < 1:
            raise EverytokenError(f"drloc: warmup is a part of the training, from 0 to below 1, not {self.warmup}.")
        parts = (
            RELEASED
            if self.released == "all"
            else (self.released,)
            if isinstance(self.released, str)
            else self.released
        )
        for part in parts:
            _check("part of the released behaviour", part, RELEASED)
        self._set("released", tuple(parts))
        if self.variant == "all" and self.levels == "last":
            self._set("levels", "blocks")
        pool = (7 if self.levels in ("last", "final") else None) if self.pool == "auto" else self.pool
        self._set("pool", (pool, pool) if isinstance(pool, int) else None if pool is None else (pool[0], pool[1]))
        self._set("given", (self.weight, self.family))
        self._know_family(self.family)
        self._set("heads", nn.ModuleList())
        self._set("taps", None)
        if self.levels == "last" and self.dim:
            self.heads.append(self._head(self.dim))

    if TYPE_CHECKING:
        heads: ClassVar[nn.ModuleList]  # one DrlocHead per level; an attribute of each object, not a setting
        taps: ClassVar[Any]
        given: ClassVar[tuple[float | None, str]]  # λ and family as they were asked for

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _know_family(self, title: str) -> None:
        self._set("family", title)
        if self.given[0] is None:
            self._set("weight", LAMBDA.get(title, LAMBDA_OTHERS))

    def attach(self, model: TokenModel) -> None:
        """Learn token width and family (λ) from a model, and tap its layers if `levels` asks for grids inside."""
        from everytoken.models.token_model import LayerTaps

        self._know_family(self.given[1] or model.family.title)
        if self.levels == "last":
            dims = [model.num_features]
        else:
            self._set("taps", LayerTaps(model, self.levels))
            dims = self.taps.dims
        like = next(model.parameters())
        del self.heads[:]
        self.heads.extend(self._head(dim).to(like.device) for dim in dims)

    def modules(self) -> nn.Module:
        """The MLPs."""
        return self.heads

    @property
    def needs(self) -> frozenset[str]:
        """The progress of the training, with the released schedule."""
        return frozenset({"progress"} if "schedule" in self.released else ())

    @property
    def signed(self) -> bool:
        """Whether targets tell directions."""
        if self.variant in ("ce", "reg"):
            return "classes" not in self.released if self.direction is None else self.direction
        return self.variant == "signed"

    def _head(self, dim: int) -> DrlocHead:
        classes = None
        if self.variant in ("ce", "reg"):
            rows, columns = self._sides()
            released = "classes" in self.released
            classes = (fn.class_count(rows, self.signed, released), fn.class_count(columns, self.signed, released))
        std = None if "init" in self.released and self.family not in INIT_BY_MODEL else 0.02
        return DrlocHead(dim, classes, self.hidden, extra="head" in self.released, std=std)

    def _sides(self) -> tuple[int, int]:
        if self.sides is not None:
            return self.sides, self.sides
        if not isinstance(self.pool, tuple):
            raise EverytokenError(
                f"drloc: {self.variant!r} must know the grid to count its classes; set pool, or sides to its side."
            )
        return self.pool

    def __call__(self, view: View, batch: Batch) -> dict[str, Tensor]:
        """{variant: loss}, summed over levels; nothing in evaluation."""
        if not self.heads:
            raise EverytokenError("drloc does not know its backbone: give dim, or call attach(TokenModel(backbone)).")
        if not self.heads.training:
            return {}
        grids, masks = self._grids(view, batch)
        # a level of one token has no distances; it is left out as long as there is another
        told = [i for i, grid in enumerate(grids) if grid.shape[1] * grid.shape[2] > 1] or range(len(grids))
        losses = [self.loss(grids[i], draws(batch, f"drloc/{i}", grids[i].device), masks[i], level=i) for i in told]
        # its MLP takes part with nothing, as distributed training waits for every parameter
        losses += [p.sum() * 0 for i, head in enumerate(self.heads) if i not in told for p in head.parameters()]
        total = torch.stack(losses).sum()
        factor = fn.ramp(batch.key.progress if batch.key else 0.0, self.warmup) if "schedule" in self.released else 1.0
        return {self.variant: total * factor}

    def _grids(self, view: View, batch: Batch) -> tuple[list[Tensor], list[Tensor | None]]:
        """Grids, and for each the mask of own tokens (None: pairs cannot cross, or may)."""
        if self.taps is None and self.levels != "last":
            raise EverytokenError(f"drloc with levels={self.levels!r} must be attached: attach(TokenModel(backbone)).")
        mix = batch.mix if self.skip_crossing else None
        if self.taps is None:
            grids = [view.grid]
            mix = None if mix is not None and mix.unmixes else mix  # the view has put tokens back to their images
        else:
            grids = self.taps.grids((batch.images.shape[-2], batch.images.shape[-1]))
        return grids, [None if mix is None else mix.at((g.shape[1], g.shape[2])) for g in grids]

    def loss(self, grid: Tensor, generator: torch.Generator, mask: Tensor | None = None, level: int = 0) -> Tensor:
        """The loss of one grid, without λ and schedule.

        Args:
            grid: tokens [B, h, w, d].
            generator: for the pairs, on the grid's device.
            mask: [B or 1, h, w], 1 = own image: leave out pairs that cross.
            level: which MLP.
        """
        given = (grid.shape[1], grid.shape[2])
        if isinstance(self.pool, tuple):
            grid = fn.pool_grid(grid, self.pool, "released" if "pooling" in self.released else "mean")
        b, size = grid.shape[0], (grid.shape[1], grid.shape[2])
        if size == (1, 1):
            raise EverytokenError(_one_token(given))
        every = self.pairs == "all"
        positions = fn.all_pairs(size, grid.device) if every else fn.random_pairs(b, int(self.pairs), size, generator)
        answer = self.heads[level](grid.flatten(1, 2), None if every else positions)
        weight = None
        if mask is not None:
            if mask.shape[1:] != size:
                mask = fn.pool_grid(mask.unsqueeze(-1), size, "mean").squeeze(-1)
            weight = fn.same_image(mask.expand(b, *size), positions)
        offset = fn.offsets(positions, size)
        if self.variant in ("ce", "reg"):
            sides = self._sides()
            if size[0] > sides[0] or size[1] > sides[1]:
                raise EverytokenError(
                    f"drloc: the grid is {size}, but classes were counted for {sides}; set pool or sides."
                )
            classes = fn.offset_classes(offset, size, sides, self.signed, "classes" in self.released)
            if self.variant == "ce":
                return fn.drloc_ce(answer, classes, weight)
            log: Literal["sigma", "variance"] = "variance" if "variance" in self.released else "sigma"
            return fn.drloc_reg(answer, classes, weight, self.alpha, log)
        target = fn.offset_targets(offset, size, self.signed, "offsets" in self.released)
        return fn.drloc_l1(answer, target, weight, self.norm)


def _one_token(given: tuple[int, int]) -> str:
    if given != (1, 1):
        return (
            f"drloc: pool averages the grid of {given[0]}x{given[1]} tokens to 1x1, which has no distances; set pool."
        )
    return (
        "drloc: the token grid is 1x1, so there are no distances to learn. Take larger images (--img-size), a backbone "
        "with finer tokens, or, in a backbone with stages, levels='stages', which has the larger grids before."
    )


def _check(what: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise EverytokenError(f"drloc: {what} {value!r} is not known.{did_you_mean(str(value), allowed)}")

"""Compact targets: what a token or an image should answer, without a K-wide tensor.

Papers: All Tokens Matter, 3.2 and 4.1 (labels are the softmax of averaged scores); ReLabel (the crop's average is the
image's label). Equation: t = Σ_u mass_u · onehot(class_u) + background · 1, over K classes. With vocabulary scores v,
m = max(v, 0) and Z = Σ_u e^(v_u-m) + (K-U) e^(-m), the softmax in which absent classes score 0 is
background = e^(-m) / Z and mass_u = e^(v_u-m) / Z - background. Mixing, smoothing and blending with the truth are
linear, so they stay in this form, exactly; a class may then occur twice in the list.
Differently from the released code: targets sum to 1 after smoothing (with `released=True` to 1 + s/K),
nothing is modified in place, and any batch size works.
Cost: U + 2 numbers per token instead of K: 24 KB instead of 784 KB for 14x14 tokens, U = 30, K = 1000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everytoken.errors import EverytokenError

_LOWEST = -1e30  # a score that no softmax sees; finite, so that a row of nothing else stays finite


@dataclass(frozen=True)
class CompactTarget:
    """The distribution t = Σ_u mass[u] · onehot(classes[u]) + background over K classes, per image or token.

    Attributes:
        classes: [B, U] int64, one vocabulary per image; entries that fill up short rows have mass 0 and class 0.
        mass: [B, ..., U] float32. May be negative, when an annotated class scores below the absent ones.
        background: [B, ...] float32, what every one of the K classes gets.
        weight: [B, ...] float32 in 0..1, how much of this place has a label; 0 = none.
        num_classes: K.

    The middle dimensions are () for an image-level target and (h, w) for tokens.
    """

    classes: Tensor
    mass: Tensor
    background: Tensor
    weight: Tensor
    num_classes: int

    @classmethod
    def from_dense(cls, probabilities: Tensor, weight: Tensor | None = None) -> CompactTarget:
        """Any soft targets, for instance a segmentation's.

        Args:
            probabilities: [B, ..., K] floats, 0 or more, which should sum to 1 over K. Values are checked on the CPU
                only: elsewhere that would wait for the device.
            weight: [B, ...], how much each place counts; None: 1.

        Example: `CompactTarget.from_dense(logits.softmax(-1)).dense()` is `logits.softmax(-1)`.
        """
        if probabilities.dim() < 2 or not probabilities.is_floating_point():
            kind = f"{probabilities.dtype} {list(probabilities.shape)}"
            raise ValueError(f"dense targets are floats [B, ..., K], got {kind}")
        looked_at = probabilities.device.type == "cpu" and not torch.compiler.is_compiling()
        if looked_at and not bool(((probabilities >= 0) & probabilities.isfinite()).all()):
            raise ValueError("dense targets are probabilities, and some of these are below 0 or not finite")
        if weight is not None and weight.shape != probabilities.shape[:-1]:
            raise ValueError(f"weights {list(weight.shape)} do not fit targets {list(probabilities.shape)}")
        mass = probabilities.detach().to(torch.promote_types(probabilities.dtype, torch.float32))
        background, K = torch.zeros_like(mass[..., 0]), mass.shape[-1]
        weight = torch.ones_like(background) if weight is None else weight.to(mass.dtype)
        return cls(torch.arange(K, device=mass.device).expand(len(mass), K), mass, background, weight, K)

    def __len__(self) -> int:
        return self.classes.shape[0]

    @property
    def shape(self) -> torch.Size:
        """[B, ...]: the shape without the class dimension."""
        return self.background.shape

    def apply(self, change: Callable[[Tensor], Tensor]) -> CompactTarget:
        """The same target with every tensor changed in one way."""
        return CompactTarget(
            change(self.classes), change(self.mass), change(self.background), change(self.weight), self.num_classes
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CompactTarget:
        """The same target on another device."""
        return self.apply(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> CompactTarget:
        """The same target in page-locked memory; torch's DataLoader calls this."""
        return self.apply(lambda t: t.pin_memory())

    def __getitem__(self, rows: Tensor | slice) -> CompactTarget:
        """Targets of some images of the batch: a slice, or an index or bool tensor over B."""
        return self.apply(lambda t: t[rows])

    def flip(self, dim: int) -> CompactTarget:
        """Mirror a token target: dim 1 swaps top and bottom, dim 2 left and right."""
        if not 1 <= dim < self.background.dim():
            raise ValueError(f"cannot flip dimension {dim} of a target of shape {list(self.shape)}")
        return replace(
            self, mass=self.mass.flip(dim), background=self.background.flip(dim), weight=self.weight.flip(dim)
        )

    def smooth(self, smoothing: float, released: bool = False) -> CompactTarget:
        """Label smoothing: (1-s)·t + s/K. With `released`, the released t·(1-s+s/K) + s/K, which sums to 1 + s/K."""
        on, off = smoothing_factors(smoothing, self.num_classes, released)
        return replace(self, mass=self.mass * on, background=self.background * on + off)

    def dense(self) -> Tensor:
        """[B, ..., K]: the same as an ordinary tensor. For tests, pictures and small K."""
        out = self.background[..., None].expand(*self.shape, self.num_classes).clone()
        return out.scatter_add_(-1, self._spread_classes(), self.mass)

    def top_class(self) -> Tensor:
        """[B, ...] int64: the most likely class; -1 where no class of the vocabulary is above the background."""
        B, U = self.classes.shape
        if U == 0:
            return torch.full(self.shape, -1, device=self.mass.device)
        # A class may be listed twice (after blending): each entry speaks for the sum of its class.
        same = (self.classes[:, :, None] == self.classes[:, None, :]).to(self.mass.dtype)
        with torch.autocast(same.device.type, enabled=False):
            best, place = torch.bmm(self.mass.reshape(B, -1, U), same).max(-1)
        return torch.where(best > 0, self.classes.gather(1, place), -1).view(self.shape)

    def most_confident(self, fraction: float) -> Tensor:
        """[B, ...] of 0 and 1: round(fraction · tokens) of each image's tokens, at least one, whose label is the
        surest, by the probability of its most likely class. Tokens without a label come last."""
        if not 0 < fraction <= 1:
            raise EverytokenError(f"the fraction of tokens to select must be in (0, 1], got {fraction}.")
        sure = torch.where(self.weight > 0, self.mass.amax(-1) + self.background, -1.0).flatten(1)
        place = sure.argsort(dim=1, descending=True, stable=True).argsort(1)
        return (place < max(1, round(fraction * sure.shape[1]))).to(self.weight.dtype).view(self.shape)

    def _spread_classes(self) -> Tensor:
        """classes as [B, ..., U], a view."""
        middle = (1,) * (self.mass.dim() - 2)
        return self.classes.view(len(self), *middle, -1).expand(self.mass.shape)


def from_scores(
    logits: Tensor,
    classes: Tensor,
    num_classes: int,
    weight: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    smoothing: float = 0.0,
    released: bool = False,
) -> CompactTarget:
    """Softmax over all K classes, of which those outside the vocabulary score 0 (paper and released code).

    Args:
        logits: [B, ..., U] averaged scores of the vocabulary's classes.
        classes: [B, U] their numbers, distinct in a row; below 0 = no class (filling), ignored.
        num_classes: K.
        weight: [B, ...], from `sample_maps`; None = 1 everywhere.
        temperature: scores are divided by it.
        top_k: None is the papers' definition. n keeps only the n best vocabulary classes of each place and shares
            all mass among them, background 0; n >= U is a softmax over the vocabulary.
        smoothing, released: as in `CompactTarget.smooth`.
    """
    if logits.shape[0] != classes.shape[0] or logits.shape[-1] != classes.shape[1]:
        raise ValueError(f"logits {list(logits.shape)} do not fit a vocabulary of shape {list(classes.shape)}")
    if temperature <= 0:
        raise EverytokenError(f"the temperature must be above 0, got {temperature}.")
    if top_k is not None and top_k < 1:
        raise EverytokenError(f"top_k must be at least 1, got {top_k}.")
    on, off = smoothing_factors(smoothing, num_classes, released)
    B, U = classes.shape
    middle = (1,) * (logits.dim() - 2)
    is_named = (classes >= 0).view(B, *middle, U).float()
    named = is_named.sum(-1)  # [B, ...]
    scores = logits.float() if temperature == 1 else logits.float() / temperature
    scores = scores + (is_named - 1) * -_LOWEST  # addition broadcasts faster than masked_fill
    absent = num_classes - named
    if top_k is not None:
        absent = torch.zeros_like(absent)
        if top_k < U:
            scores.masked_fill_(scores < scores.topk(top_k, dim=-1).values[..., -1:], _LOWEST)
    # Softmax over the vocabulary, then the part of it among all classes: absent ones have e^0 each. A softmax is one
    # pass over memory, and its largest entry gives the logarithm of the sum.
    mass = scores.softmax(-1)
    log_sum = scores.amax(-1) - mass.amax(-1).log()
    log_absent = absent.log()
    background = torch.where(absent > 0, torch.sigmoid(log_absent - log_sum) / absent.clamp(min=1), 0) * on
    mass.mul_(torch.sigmoid(log_sum - log_absent)[..., None] * on).sub_(background[..., None]).mul_(is_named)
    if weight is None:
        weight = torch.ones_like(background)
    if top_k is not None:  # where no class is left, there is nothing to share the mass
        weight = weight * (named > 0)
    return CompactTarget(classes.clamp(min=0), mass, background + off, weight.float(), num_classes)


def smoothing_factors(smoothing: float, num_classes: int, released: bool = False) -> tuple[float, float]:
    """(on, off) with which t becomes on · t + off."""
    if not 0 <= smoothing < 1:
        raise EverytokenError(f"label smoothing must be in [0, 1), got {smoothing}.")
    off = smoothing / num_classes
    return (1 - smoothing + off if released else 1 - smoothing), off


def from_labels(labels: Tensor, num_classes: int, smoothing: float = 0.0) -> CompactTarget:
    """One class per image, or several, as an image-level target.

    Args:
        labels: [B] int64; below 0 = no label, weight 0. Or [B, K], 1 for each class of an image: the target then has 1
            for each of them and is meant for `compact_binary_cross_entropy`.
        num_classes: K.
        smoothing: s; the class gets 1 - s + s/K, every other one s/K.
    """
    if labels.dim() == 2:
        every = torch.arange(num_classes, device=labels.device).expand(len(labels), -1)
        ones = torch.ones(len(labels), device=labels.device)
        target = CompactTarget(every, labels.float(), torch.zeros_like(ones), ones, num_classes)
        return target.smooth(smoothing) if smoothing else target
    has_label = (labels >= 0).float()
    classes, background = labels.clamp(min=0)[:, None], torch.zeros_like(has_label)
    target = CompactTarget(classes, has_label[:, None], background, has_label, num_classes)
    return target.smooth(smoothing) if smoothing else target


def blend(a: CompactTarget, ra: Tensor | float, b: CompactTarget, rb: Tensor | float) -> CompactTarget:
    """The mixture ra·a + rb·b of two targets of one shape, where ra + rb = 1.

    Args:
        a, b: targets of one shape [B, ...] and one K.
        ra, rb: numbers, or tensors that broadcast to [B, ...] (a [B] tensor counts per image).

    Where one side has no full label, its part counts as much less: the result is the average over what is labelled,
    (ra·wa·a + rb·wb·b) / (ra·wa + rb·wb), and its weight is ra·wa + rb·wb.
    """
    if a.num_classes != b.num_classes or a.shape != b.shape:
        raise ValueError(f"cannot blend targets {list(a.shape)}, {a.num_classes} and {list(b.shape)}, {b.num_classes}")
    part_a, part_b = _ratio(ra, a) * a.weight, _ratio(rb, b) * b.weight
    weight = part_a + part_b
    total = torch.where(weight > 0, weight, 1)
    part_a, part_b = part_a / total, part_b / total
    return CompactTarget(
        torch.cat((a.classes, b.classes), dim=1),
        torch.cat((a.mass * part_a[..., None], b.mass * part_b[..., None]), dim=-1),
        a.background * part_a + b.background * part_b,
        weight,
        a.num_classes,
    )


def mix_with_truth(
    target: CompactTarget, labels: Tensor, rho: float | None = None, smoothing: float = 0.0
) -> CompactTarget:
    """ρ · machine label + (1-ρ) · true label, for image-level targets.

    Args:
        target: image-level target, shape [B].
        labels: [B] int64 true classes.
        rho: a constant, or None for the released `--ground-truth` option: 0.5 where the machine's best class is the
            true one, 0.9 where it is not (its own comment says the opposite).
        smoothing: of the true label; the machine's is smoothed, or not, before.

    An image with a true label counts fully, however little of it the machine labelled; with no map at all the truth
    stands alone.
    """
    if target.background.dim() != 1:
        raise ValueError(f"the truth is known per image, but this target has shape {list(target.shape)}")
    ratio: Tensor | float = rho if rho is not None else torch.where(target.top_class() == labels, 0.5, 0.9)
    truth = from_labels(labels, target.num_classes, smoothing)
    mixed = blend(target, ratio, truth, 1 - ratio)
    return replace(mixed, weight=torch.where(labels >= 0, 1.0, target.weight))


def map_classes(logits: Tensor, classes: Tensor, mapping: Tensor) -> tuple[Tensor, Tensor]:
    """Say annotator scores in the dataset's classes: a subset, a renumbering, or groups of classes.

    Args:
        logits: [B, ..., U] averaged scores.
        classes: [B, U] annotator classes, below 0 = none.
        mapping: [K annotator] int64, the dataset's class for each annotator class, -1 = drop.

    Returns:
        (logits, classes) of the same shapes for `from_scores`. Where several annotator classes are one class of the
        dataset, it scores as the best of them; dropped and merged entries have class -1.
    """
    named = torch.where(classes >= 0, mapping[classes.clamp(min=0)], -1)
    # first[b, u]: where the class of entry u stands first in the row
    first = (named[:, :, None] == named[:, None, :]).int().argmax(-1)
    place = first.view(len(classes), *(1,) * (logits.dim() - 2), -1).expand(logits.shape)
    best = torch.full_like(logits, -torch.inf).scatter_reduce_(-1, place, logits, "amax")
    kept = first == torch.arange(classes.shape[1], device=classes.device)
    best = torch.where(kept.view(len(classes), *(1,) * (logits.dim() - 2), -1), best, 0)
    return best, torch.where(kept, named, -1)


def _ratio(ratio: Tensor | float, target: CompactTarget) -> Tensor:
    ratio = torch.as_tensor(ratio, dtype=target.weight.dtype, device=target.weight.device)
    if ratio.dim() == 1 and target.weight.dim() > 1:
        ratio = ratio.view(-1, *(1,) * (target.weight.dim() - 1))
    return ratio.expand(target.weight.shape)

"""What tests of alignment share: a mixed batch, and the paper's algorithm with K-wide labels, one place at a time."""

from collections.abc import Callable, Iterable
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.functional.shares import aligned_cross_entropy
from everytoken.models.align import Aligner, Alignment, Shares


def batch(size: int | tuple[int, int] = 64, count: int = 2, level: str = "pixels") -> tuple[Tensor, SimpleNamespace]:
    """(images, mix): boxes that cut through patches, another one in each image. Image i is of class i."""
    h, w = (size, size) if isinstance(size, int) else size
    images = torch.randn(count, 3, h, w, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(count, h, w)
    for i in range(count):
        mask[i, (5 + 3 * i) * h // 64 : 40 * h // 64, 10 * w // 64 : (50 - 5 * i) * w // 64] = 0
    partner = torch.arange(count).flip(0)
    return images, SimpleNamespace(mask=mask, ratio=mask.mean((1, 2)), partner=partner, level=level)


def unmixed(ratio: Tensor) -> SimpleNamespace:
    """MixUp, or with ones nothing: the same everywhere."""
    return SimpleNamespace(mask=ratio.view(-1, 1, 1), ratio=ratio)


def wide(shares: Tensor, mix: SimpleNamespace, classes: int) -> Tensor:
    """The K-wide labels [B, ..., K] of shares [B, ...]."""
    own = F.one_hot(torch.arange(len(shares)), classes).float()
    own, partner = (labels.view(-1, *[1] * (shares.dim() - 1), classes) for labels in (own, own[mix.partner]))
    return shares[..., None] * own + (1 - shares[..., None]) * partner


def tokens_of(shares: Shares) -> Tensor:
    """Shares [B, P + N] of all tokens."""
    grid = shares.grid.flatten(1)
    return grid if shares.prefix is None else torch.cat((shares.prefix, grid), 1)


def patches(mix: SimpleNamespace, side: int) -> Tensor:
    """[B, h, w]: the part of each patch of side x side pixels that is the own image's."""
    b, h, w = mix.mask.shape
    return mix.mask.view(b, h // side, side, w // side, side).mean((2, 4))


def watched(model: nn.Module, images: Tensor, mix, **options) -> tuple[Shares, Tensor]:
    """(shares, logits) of a pass, with the options of `Alignment`."""
    aligner = Aligner(model, Alignment(**options))
    with aligner.watch(mix) as seen:
        logits = model(images)
    aligner.remove()
    return seen.shares, logits


def kernel_of(conv: nn.Conv2d) -> Tensor:
    """[k, k]: the size of a kernel's weights, each output's normalised, their mean."""
    each = conv.weight.detach().abs().sum(1)
    return (each / each.sum((1, 2), keepdim=True)).mean(0)


def under(y: Tensor, kernel: Tensor, stride: int, padding: int, dilation: int = 1, ceil: bool = False) -> Tensor:
    """Norm(T(kernel))·Y of labels [B, h, w, K]: at each place the weighted mean of those that are in the map."""
    reach, more = dilation * (len(kernel) - 1), (stride - 1) * ceil
    around = (padding, padding + more) * 2
    there = F.pad(torch.ones(y.shape[1:3]), around)
    y = F.pad(y, (0, 0, *around))
    rows, columns = ((side - reach - 1) // stride + 1 for side in y.shape[1:3])
    new = torch.zeros(len(y), rows, columns, y.shape[3])
    for i, j in product(range(rows), range(columns)):
        top, left = i * stride, j * stride
        window = slice(top, top + reach + 1, dilation), slice(left, left + reach + 1, dilation)
        weight = kernel * there[window]
        new[:, i, j] = (weight[..., None] * y[:, *window]).sum((1, 2)) / weight.sum()
    return new


def convolved(y: Tensor, conv: nn.Conv2d) -> Tensor:
    """Labels [B, h, w, K] after a convolution; one that cuts patches is a plain mean."""
    (k, _), (s, _), (p, _), (d, _) = conv.kernel_size, conv.stride, conv.padding, conv.dilation
    return under(y, torch.ones(k, k) if k == s and not p else kernel_of(conv), s, p, d)


def inputs_of(modules: Iterable[nn.Module], run: Callable[[], object]) -> dict[nn.Module, tuple]:
    """What each of some modules was given when `run` was called."""
    seen: dict[nn.Module, tuple] = {}
    hooks = [module.register_forward_pre_hook(lambda m, args: seen.__setitem__(m, args)) for module in modules]
    run()
    for hook in hooks:
        hook.remove()
    return seen


def explicit(model: nn.Module, fused: bool = False) -> nn.Module:
    """Attention as matrix products, or fused."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


def assert_gradients(
    model: nn.Module, images: Tensor, logits: Tensor, mix, share: Tensor, target: Tensor, zero: float | None = 1e-8
) -> None:
    """The gradients of the aligned loss are those of the plain model with a K-wide target.

    Each is compared, up to `zero`; or, with None, all at once: those before a norm are zeros with rounding errors.
    """
    labels = torch.arange(len(images))
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = aligned_cross_entropy(logits, labels, labels[mix.partner], share)
    got = torch.autograd.grad(loss, parameters, allow_unused=True)
    exact = torch.autograd.grad(F.cross_entropy(explicit(model)(images), target), parameters, allow_unused=True)
    assert [g is None for g in got] == [g is None for g in exact]
    got, exact = ([g.flatten() for g in gradients if g is not None] for gradients in (got, exact))
    if zero is None:
        got, exact, zero = [torch.cat(got)], [torch.cat(exact)], 0.0
    for a, b in zip(got, exact, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + zero

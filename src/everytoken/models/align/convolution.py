"""Convolution and pooling: ConvNeXt, ResNet and other CNNs, and the stem of LV-ViT.

Paper: TL-Align, appendix A, Table 9: Y <- Norm(T(K))·Y for a convolution with kernel K, the mean for aggregation; left
as future work there. Shares start on the pixel grid and become coarser with the features.
Our reading: weights count by size, as in equation (2); each output channel is normalised by itself and then averaged,
as heads are; a kernel at the border is normalised over the places inside. A convolution that does not overlap (kernel =
stride) is concatenation of its cells followed by channel mixing, so it is aggregation: the mean. Pooling is the mean,
max pooling too, whose winner cannot be known for all channels at once. 1x1 convolution, norms, activations and gates
from globally pooled features (squeeze and excitation) leave the map alone.
Cost: a one-channel convolution per convolution, and reading its weights once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.functional.shares import convolved_shares, kernel_of
from everytoken.models.align.tape import Hook, Site, Tape


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def convolved_by(layer: nn.Module, shares: Tensor, out: tuple[int, int] | None = None, same: bool = False) -> Tensor:
    """What a convolution or pooling layer makes of a map of shares, [B, h, w] -> [B, h', w'].

    Args:
        out: (h', w') if the layer may round up; None: as a convolution, rounded down.
        same: the layer pads both sides to keep size / stride.
    """
    module: Any = layer
    kernel = _pair(module.kernel_size)
    stride = _pair(module.stride or kernel)
    dilation = _pair(getattr(module, "dilation", 1))
    if kernel == (1, 1) and stride == (1, 1):
        return shares
    front = None if same or isinstance(module.padding, str) else _pair(module.padding)
    size = (shares.shape[1], shares.shape[2])
    if out is None:
        if front is None:
            out = (-(-size[0] // stride[0]), -(-size[1] // stride[1]))
        else:
            reach = [size[i] + 2 * front[i] - dilation[i] * (kernel[i] - 1) - 1 for i in (0, 1)]
            out = (reach[0] // stride[0] + 1, reach[1] // stride[1] + 1)
    padding = _sides(front, size, out, kernel, stride, dilation)
    weight = getattr(module, "weight", None)
    if weight is None or (kernel == stride and not any(padding)):
        places = torch.full(kernel, 1 / (kernel[0] * kernel[1]), device=shares.device)
    else:
        places = kernel_of(weight)
    return convolved_shares(shares, places, stride, padding, dilation)


def _sides(
    front: tuple[int, int] | None,
    size: tuple[int, int],
    out: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    dilation: tuple[int, int],
) -> tuple[int, int, int, int]:
    """(left, right, top, bottom) so that the output has the layer's size, rounded down or up."""
    sides = []
    for axis in (1, 0):
        whole = (out[axis] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
        missing = max(0, whole - size[axis])
        first = missing // 2 if front is None else front[axis]
        sides += [first, max(0, whole - size[axis] - first)]
    return sides[0], sides[1], sides[2], sides[3]


class Convolve(Hook):
    """A convolution or pooling layer over [B, C, h, w] has run; `same`: it pads both sides to keep size / stride."""

    def __init__(self, tape: Tape, same: bool = False) -> None:
        super().__init__(tape)
        self.same = same

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.tape.shares = convolved_by(module, shares, (output.shape[-2], output.shape[-1]), self.same)


def convolution(module: nn.Module, site: Site, name: str) -> None:
    """Rule for one convolution or pooling layer."""
    site.after(module, Convolve(site.tape))


def convolution_same(module: nn.Module, site: Site, name: str) -> None:
    """Rule for timm's layers that pad while they run, as TensorFlow does."""
    site.after(module, Convolve(site.tape, same=True))


class Push(Hook):
    """A residual block begins: remember its input."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.tape.stack.append(shares)


class Swap(Hook):
    """The shortcut begins or ends: exchange the branch's shares with the remembered ones."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        other = self.tape.stack.pop()
        self.tape.stack.append(shares)
        self.tape.shares = other


class Pop(Hook):
    """A residual block has ended: average branch and shortcut."""

    def act(self, shares: Tensor, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.tape.keep(self.tape.combine(shares, self.tape.stack.pop()))


def residual(shortcut: str | None = None, only_if: str | None = None) -> Callable[[nn.Module, Site, str], None]:
    """Rule for a block branch(x) + shortcut(x).

    Args:
        shortcut: name of the module on the shortcut; where it is None the shortcut is the input itself.
        only_if: name of a flag of the block that says whether there is a shortcut at all.
    """

    def rule(module: nn.Module, site: Site, name: str) -> None:
        if only_if is not None and not getattr(module, only_if):
            site.children(module, name)
            return
        site.doublings += 1
        site.before(module, Push(site.tape))
        way = getattr(module, shortcut, None) if shortcut else None
        site.children(module, name, skip=frozenset([shortcut] if shortcut else []))
        if isinstance(way, nn.Module) and not isinstance(way, nn.Identity):
            site.before(way, Swap(site.tape))
            site.descend(way, f"{name}.{shortcut}")
            site.after(way, Swap(site.tape))
        site.after(module, Pop(site.tape))

    return rule

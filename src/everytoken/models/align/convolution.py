"""Fixed weights: convolution and pooling (CNNs, the stem of LV-ViT), learned matrices over tokens (MLP-Mixer, ResMLP).

Paper: TL-Align, appendix A, Table 9: Y <- Norm(T(K))·Y for a convolution with kernel K, Y <- Norm(W)·Y for a learned
matrix W, the mean for aggregation; left as future work there. Shares of a CNN start on the pixels and become coarser
with the features.

How we read it is in docs/alignment.md. 1x1 convolution, norms, activations and gates from globally pooled features
(squeeze and excitation) leave the map alone; Mixer's two layers are two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from everytoken.functional.shares import convolved_shares, kernel_of, row_normalised
from everytoken.models.align.state import ShareState

if TYPE_CHECKING:
    from everytoken.models.align.rules import HookBuilder

Args = tuple[Any, ...]


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
    if out is None and front is not None:
        padding = (front[1], front[1], front[0], front[0])
    else:
        out = out or (-(-size[0] // stride[0]), -(-size[1] // stride[1]))
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


def convolution(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for one convolution or pooling layer."""
    builder.after(module, _convolve, same=False)


def convolution_same(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for timm's layers that pad while they run, as TensorFlow does."""
    builder.after(module, _convolve, same=True)


def _convolve(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, same: bool) -> None:
    """A convolution or pooling layer over [B, C, h, w] has run."""
    state.shares = convolved_by(layer, shares, (output.shape[-2], output.shape[-1]), same)


def residual(shortcut: str | None = None, only_if: str | None = None) -> Callable[[nn.Module, HookBuilder, str], None]:
    """Rule for a block branch(x) + shortcut(x).

    Args:
        shortcut: name of the module on the shortcut; where it is None the shortcut is the input itself.
        only_if: name of an attribute of the block that says whether there is a shortcut at all.
    """

    def rule(module: nn.Module, builder: HookBuilder, name: str) -> None:
        if only_if is not None and not getattr(module, only_if):
            builder.attach_children(module, name)
            return
        builder.doublings += 1
        builder.before(module, _enter_residual)
        builder.attach_children(module, name, skip=frozenset([shortcut] if shortcut else []))
        path = getattr(module, shortcut, None) if shortcut else None
        if isinstance(path, nn.Module) and not isinstance(path, nn.Identity):
            builder.before(path, _switch_path)
            builder.attach(path, f"{name}.{shortcut}")
            builder.after(path, _switch_path)
        builder.after(module, _leave_residual)

    return rule


def _enter_residual(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    state.residuals.append(shares)


def _switch_path(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    """The shortcut begins or ends: exchange the branch's shares with the remembered ones."""
    state.shares = state.residuals.pop()
    state.residuals.append(shares)


def _leave_residual(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    """A residual block has ended: average branch and shortcut."""
    state.keep(state.combine(shares, state.residuals.pop()))


def mixer_block(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for a block with a token MLP `mlp_tokens` or a single layer `linear_tokens`."""
    branch: Any = module.mlp_tokens if hasattr(module, "mlp_tokens") else module.linear_tokens
    if builder.next_layer():
        builder.after(branch, _mix_tokens)


def _mix_tokens(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    """A residual branch of linear layers over the token dimension has run."""
    mixed = shares
    for linear in [layer] if isinstance(layer, nn.Linear) else [layer.fc1, layer.fc2]:
        mixed = mixed @ row_normalised(linear.weight).t()
    state.keep(state.combine(mixed, shares))

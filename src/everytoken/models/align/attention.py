"""Attention in all its forms: over all tokens, over convolved tokens, in windows, and inside a patch embedding.

Paper: TL-Align, equations (6) to (11), section 3.3 and appendix A; how we read it, layer by layer: docs/alignment.md.
While a known attention layer runs, its attention is observed in one of two ways: fused, the call of
`scaled_dot_product_attention` (or of `nn.MultiheadAttention`'s function) is answered by `fused.attend`
(`InterceptAttention`); explicit, the matrix leaves a softmax, or passes through `attn_drop`, before dropout; the last
one counts. Position biases, rotary positions, query norms and gates are thus the layer's own business. A layer in
which neither is observed is an error.

r̂ = mean over heads of A·r, then the residual connection. What differs is which shares A mixes: those of all tokens; of
the tokens after the convolution that makes the values (CvT, MViTv2); of the places of a window, cut as the block cuts
its tokens (Swin), or as overlapping windows (VOLO). Places that only pad a map belong to no image: what remains is
normalised to sum to 1, as Norm does to the K-wide labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from everytoken.functional.shares import convolved_shares, merged_shares, mixed_by_matrix
from everytoken.models.align.convolution import convolved_by
from everytoken.models.align.fused import attend
from everytoken.models.align.state import Pair, ShareState, normalised
from everytoken.models.families import UnsupportedModelError
from everytoken.models.t2t_vit import Split, TokenPerformer, performer

if TYPE_CHECKING:
    from everytoken.models.align.rules import HookBuilder

Args = tuple[Any, ...]


class InterceptAttention(TorchFunctionMode):
    """Answers attention functions inside known attention layers; everything else passes."""

    def __init__(self, state: ShareState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Args = (), kwargs: Any = None
    ) -> Any:
        state, kwargs = self.state, kwargs or {}
        if func in (F.scaled_dot_product_attention, F.multi_head_attention_forward) and state.shares is not None:
            if not state.in_attention:
                raise UnsupportedModelError("attention outside of the layers known to everytoken.models.align.RULES")
            if state.keys is not None:
                way = attend if func is F.scaled_dot_product_attention else _multi_head
                out, state.mixed = way(state.keys, state.checkpointing, *args, **kwargs)
                return out if way is attend else (out, None)
        out = func(*args, **kwargs)
        if func in (F.softmax, Tensor.softmax) and state.keys is not None:
            state.matrix = out.detach()
        return out


def _multi_head(
    values: Tensor,
    again: bool,
    tokens: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    weight: Tensor,
    bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero: bool,
    dropout: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """`F.multi_head_attention_forward` for tokens [N, B, D] that attend to themselves, by `attend`."""
    if not (tokens is key is value) or more.get("attn_mask") is not None or bias_k is not None or add_zero:
        raise UnsupportedModelError("alignment knows nn.MultiheadAttention of tokens to themselves, without a mask")
    qkv = F.linear(tokens, weight, bias).unflatten(-1, (3, heads, -1))
    q, k, v = qkv.permute(2, 1, 3, 0, 4)
    out, mixed = attend(values, again, q, k, v, dropout_p=dropout if training else 0.0)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), out_weight, out_bias), mixed


def _enter(state: ShareState, keys: Tensor | None) -> None:
    state.in_attention, state.mixed, state.matrix, state.keys = True, None, None, keys


def _leave(state: ShareState) -> None:
    state.in_attention, state.matrix, state.keys = False, None, None


def _mixed_by(state: ShareState, module: nn.Module, stochastic: bool = True) -> Tensor:
    """Shares [B', M] that the attention layer has made of the keys; its matrix is `stochastic` if rows sum to 1."""
    if state.matrix is not None and state.keys is not None:
        return normalised(mixed_by_matrix(state.matrix, state.keys, stochastic).float())
    if state.mixed is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} ({type(module).__module__}) ran, but its attention was not observed: it neither "
            "calls scaled_dot_product_attention nor softmax, nor passes its matrix to attn_drop"
        )
    return normalised(state.mixed)


def _observe_matrix(module: nn.Module, builder: HookBuilder) -> None:
    """Observe the matrix of an attention layer that makes one."""
    drop = getattr(module, "attn_drop", None)
    if isinstance(drop, nn.Module):
        builder.before(drop, _matrix)


def _matrix(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    """The attention matrix [B', heads, M, N] on its way into `attn_drop`."""
    state.matrix = args[0].detach()


# ---- attention over all tokens


def self_attention(module: nn.Module, builder: HookBuilder, name: str, stochastic: bool = True) -> None:
    """Rule for attention over [B, N, D] or [B, h, w, D] that updates the first of these tokens, usually all."""
    counts = builder.next_layer()
    builder.before(module, _enter_sequence, counts=counts)
    _observe_matrix(module, builder)
    builder.after(module, _leave_sequence, counts=counts, stochastic=stochastic)


def talking_heads(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for attention whose heads are mixed after the softmax."""
    self_attention(module, builder, name, stochastic=False)


def _enter_sequence(
    state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, counts: bool, values: Any = None
) -> None:
    """Attention over tokens begins, whose values the layer `values(layer)` convolves, if there is one.

    Tokens in front of the known ones carry the mix ratio (equation 5), or no share where only patches count.
    """
    count = math.prod(args[0].shape[1:-1])
    more = count - shares.shape[1]
    if more < 0:
        name = type(layer).__name__
        raise UnsupportedModelError(f"{name} has {count} tokens where {shares.shape[1]} were embedded: patch dropping?")
    if more > 0:
        assert state.ratio is not None
        state.shares = shares = torch.cat((state.ratio[:, None].expand(-1, more), shares), dim=1)
    if not counts:
        _enter(state, None)
        return
    prefix = 0 if state.grid is None else count - math.prod(state.grid)
    shares = shares if values is None else _convolved_grid(state, shares, values(layer))
    keys = shares[..., None]
    if state.patches_only and prefix:
        is_patch = torch.ones_like(shares)
        is_patch[:, :prefix] = 0
        keys = torch.stack((shares * is_patch, is_patch), dim=-1)
    _enter(state, keys)


def _leave_sequence(
    state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, counts: bool, stochastic: bool = True
) -> None:
    """Attention has ended: residual average for the tokens that it has updated."""
    if counts:
        mixed = _mixed_by(state, layer, stochastic)
        updated = state.combine(mixed, shares[:, : mixed.shape[1]])
        state.keep(torch.cat((updated, shares[:, mixed.shape[1] :]), dim=1))
    _leave(state)


def attention_of(attention: str) -> Callable[[nn.Module, HookBuilder, str], None]:
    """Rule for a block that mixes tokens in this layer only."""

    def rule(module: nn.Module, builder: HookBuilder, name: str) -> None:
        self_attention(module.get_submodule(attention), builder, f"{name}.{attention}")

    return rule


def attention_pool(module: nn.Module, builder: HookBuilder) -> None:
    """Rule for timm's `AttentionPoolLatent`: learned queries attend to the tokens, or to the last ones of them."""
    builder.before(module, _enter_pool)
    builder.after(module, _leave_pool)


def _enter_pool(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    _enter(state, shares[:, -args[0].shape[1] :, None])


def _leave_pool(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    """Queries stand for no image, so there is no residual."""
    mixed = _mixed_by(state, layer)
    state.pooled = mixed[:, 0] if layer.pool == "token" else mixed.mean(1)
    _leave(state)


# ---- attention over convolved tokens


def conv_attention(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for attention with convolutional projections and `prefix` tokens that pass by them."""
    counts = builder.next_layer()
    builder.before(module, _enter_sequence, counts=counts, values=attrgetter("value_conv.conv"))
    builder.after(module, _leave_sequence, counts=counts)


def _convolved_grid(state: ShareState, shares: Tensor, layer: nn.Module | None) -> Tensor:
    """Shares [B, prefix + h·w] after a convolution or pooling layer that prefix tokens pass by, if there is one."""
    if layer is None:
        return shares
    assert state.grid is not None
    prefix, grid = shares.tensor_split([shares.shape[1] - math.prod(state.grid)], dim=1)
    return torch.cat((prefix, convolved_by(layer, grid.unflatten(1, state.grid)).flatten(1)), dim=1)


def pooling_block(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for MViTv2's block: queries, keys and values are pooled by convolutions, the shortcut is pooled, too."""
    block: Any = module
    counts = builder.next_layer()
    builder.doublings += counts and block.attn.residual_pooling
    builder.before(block, _enter_sequence, counts=counts, values=attrgetter("attn.pool_v"))
    builder.after(block, _leave_pooled, counts=counts)


def _leave_pooled(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, counts: bool) -> None:
    """The block has ended: one residual connection with the pooled queries, one with the pooled shortcut."""
    shortcut = _convolved_grid(state, shares, layer.shortcut_pool_attn)
    if counts:
        mixed = _mixed_by(state, layer)
        if layer.attn.residual_pooling:
            mixed = state.combine(mixed, _convolved_grid(state, shares, layer.attn.pool_q))
        state.keep(state.combine(mixed, shortcut))
    else:
        state.shares = shortcut
    state.grid = tuple(output[1])
    _leave(state)


def stage_embedding(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for the convolution `proj` that a stage of tokens begins with."""
    builder.after(module, _embed_stage)


def _embed_stage(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    """A stage has embedded the map of pixels [B, h, w], or the grid [B, h·w] of the stage before."""
    shares = convolved_by(layer.proj, shares if state.grid is None else shares.unflatten(1, state.grid))
    state.shares = shares
    if state.grid is not None:
        state.grid = (shares.shape[1], shares.shape[2])
        state.shares = shares.flatten(1)


def channel_attention(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for attention between channels, which mixes no tokens."""
    builder.before(module, _enter_sequence, counts=False)
    builder.after(module, _leave_sequence, counts=False)


def local_interaction(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for XCiT's `LPI`, two convolutions over the tokens on a residual branch."""
    if builder.next_layer():
        builder.after(module, _convolve_tokens)


def _convolve_tokens(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    mixed = _convolved_grid(state, _convolved_grid(state, shares, layer.conv1), layer.conv2)
    state.keep(state.combine(mixed, shares))


# ---- attention in windows


def outlook_attention(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for VOLO's attention in overlapping windows, which makes an answer for every place of every window."""
    layer: Any = module
    if builder.next_layer():
        builder.before(layer.attn_drop, _mix_outlook, split=(layer.kernel_size, layer.stride, layer.padding))


def _mix_outlook(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, split: Split) -> None:
    """The matrices [B, heads, windows, places, places] are made: cut, mix, and add up what lies on one place."""
    assert state.grid is not None
    kernel, stride, padding = split
    values = torch.stack((shares, torch.ones_like(shares)), dim=1).unflatten(2, state.grid)
    windows = F.unfold(values, kernel, 1, padding, stride).unflatten(1, (2, -1))
    mixed = torch.einsum("bnij,bcjn->bcin", args[0].detach().float().mean(1), windows).flatten(1, 2)
    mixed = F.fold(mixed, state.grid, kernel, 1, padding, stride).flatten(2).transpose(1, 2)
    state.keep(state.combine(normalised(mixed), shares))


def window_block(
    attention: str = "attn", sizes: Callable[[Any, Pair], tuple[Pair, Pair]] | None = None
) -> Callable[[nn.Module, HookBuilder, str], None]:
    """Rule for a block with window attention over [B·windows, n, D], or one that cuts a map by itself.

    Args:
        attention: name of its attention layer.
        sizes: (block, size of the map) -> (window, shift) of a block that pads the map before it shifts it. None: the
            block's `window_size` and `shift_size`; it shifts first, as timm does.
    """

    def rule(module: nn.Module, builder: HookBuilder, name: str) -> None:
        layer = module.get_submodule(attention)
        counts = builder.next_layer()
        builder.before(module, _remember_window, sizes=sizes)
        builder.before(layer, _enter_windows, counts=counts)
        _observe_matrix(layer, builder)
        builder.after(layer, _leave_windows, counts=counts)

    return rule


def torchvision_window(block: Any, size: Pair) -> tuple[Pair, Pair]:
    """An axis along which one window covers the map is not shifted."""
    window, shift = block.attn.window_size, block.attn.shift_size
    shift = [0 if window[i] >= size[i] else shift[i] for i in (0, 1)]
    return (window[0], window[1]), (shift[0], shift[1])


def huggingface_window(block: Any, size: Pair) -> tuple[Pair, Pair]:
    """A map that is no larger than a window is cut into windows of its shorter side, without a shift."""
    window, shift = (block.window_size, block.shift_size) if min(size) > block.window_size else (min(size), 0)
    return (window, window), (shift, shift)


def _remember_window(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, sizes: Any) -> None:
    size = (shares.shape[1], shares.shape[2])
    window, shift = (layer.window_size, layer.shift_size) if sizes is None else sizes(layer, size)
    state.window = (tuple(window), tuple(shift), sizes is not None)


def _enter_windows(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, counts: bool) -> None:
    """Window attention begins: cut the map as the block has cut the tokens."""
    if not counts:
        _enter(state, None)
        return
    assert state.window is not None
    window = state.window[0]
    keys = to_windows(shares, *state.window)[..., None]
    if shares.shape[1] % window[0] or shares.shape[2] % window[1]:
        inside = to_windows(torch.ones_like(shares), *state.window)[..., None]
        keys = torch.cat((keys, inside), dim=-1)
    _enter(state, keys)


def _leave_windows(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, counts: bool) -> None:
    """Window attention has ended: put the map together, residual average."""
    if counts:
        assert state.window is not None
        mixed = from_windows(_mixed_by(state, layer), *state.window, (shares.shape[1], shares.shape[2]))
        state.keep(state.combine(mixed, shares))
    _leave(state)


def to_windows(shares: Tensor, window: Pair, shift: Pair, pad_first: bool = False) -> Tensor:
    """[B, h, w] -> [B·windows, window area]; cells that pad the map hold 0."""
    b, h, w = shares.shape
    pad = (0, -w % window[1], 0, -h % window[0])
    if pad_first:
        shares = F.pad(shares, pad)
    if any(shift):
        shares = torch.roll(shares, (-shift[0], -shift[1]), (1, 2))
    if not pad_first and any(pad):
        shares = F.pad(shares, pad)
    rows, columns = shares.shape[1] // window[0], shares.shape[2] // window[1]
    windows = shares.view(b, rows, window[0], columns, window[1]).transpose(2, 3)
    return windows.reshape(b * rows * columns, window[0] * window[1])


def from_windows(windows: Tensor, window: Pair, shift: Pair, pad_first: bool, size: Pair) -> Tensor:
    """The reverse of `to_windows`: [B·windows, window area] -> [B, h, w]."""
    rows, columns = -(-size[0] // window[0]), -(-size[1] // window[1])
    windows = windows.view(-1, rows, columns, window[0], window[1]).transpose(2, 3)
    shares = windows.reshape(-1, rows * window[0], columns * window[1])
    shares = shares if pad_first else shares[:, : size[0], : size[1]]
    shares = torch.roll(shares, shift, (1, 2)) if any(shift) else shares
    return shares[:, : size[0], : size[1]]


def patch_merging(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for the concatenation of 2x2 neighbours."""
    builder.after(module, _merge)


def _merge(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    state.shares = merged_shares(shares)


# ---- attention inside a patch embedding


def tokens_to_token(module: nn.Module, builder: HookBuilder, name: str) -> None:
    """Rule for `TokensToToken`, from a map of shares on pixels to one on tokens."""
    embedding: Any = module
    counts = builder.layers is None
    for i, split in enumerate(embedding.splits[:-1], start=1):
        layer = getattr(embedding, f"attention{i}")
        builder.before(layer, _soft_split, split=split)
        if not isinstance(layer, TokenPerformer):
            builder.before(layer.attn, _enter_map, counts=counts)
            builder.after(layer.attn, _leave_map, counts=counts)
        elif counts:
            builder.after(layer.kqv, _remember_projection)
            builder.after(layer, _leave_performer)
        builder.doublings += 2 if counts else 0
    builder.after(embedding, _soft_split, split=embedding.splits[-1])


def _soft_split(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, split: Split) -> None:
    """The map was cut into overlapping windows (kernel, stride, padding)."""
    kernel, stride, padding = split
    even = torch.full((kernel, kernel), 1 / kernel**2, device=shares.device)
    state.shares = convolved_shares(shares, even, (stride, stride), (padding,) * 4)


def _enter_map(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, counts: bool) -> None:
    """Attention over a whole map begins."""
    _enter(state, shares.flatten(1)[..., None] if counts else None)


def _leave_map(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any, counts: bool) -> None:
    if counts:
        state.shares = state.combine(_mixed_by(state, layer).view_as(shares), shares)
    _leave(state)


def _remember_projection(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    """A performer has made its keys, queries and values."""
    state.projected = output


def _leave_performer(state: ShareState, shares: Tensor, layer: Any, args: Args, output: Any) -> None:
    """A performer over a whole map has ended: mix the shares by the same kernel."""
    assert isinstance(layer, TokenPerformer)
    assert state.projected is not None
    k, q, _ = state.projected.split(layer.width, dim=-1)
    mixed = performer(q, k, shares.flatten(1)[..., None], layer.w, eps=0.0)
    state.shares = state.combine(mixed.view_as(shares), shares)
    state.projected = None

"""Shares through fused attention: A·r without the attention matrix.

`attend` does what `scaled_dot_product_attention` does and also returns the mean over heads of A·r (equation 9 of
TL-Align), A being the softmax before dropout. Two ways, same numbers: on the CPU without mask and dropout r is one more
column of V in the forward kernel (`_Widened`); elsewhere a second call without gradient has a V that holds only r. What
they cost, and why each is taken where it is: docs/alignment.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(
    values: Tensor,
    again: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention and what it makes of `values`.

    Args:
        values: [B, N, C] float32 in 0..1, one row per key; no gradient.
        again: never widen.
        others: as in `scaled_dot_product_attention`.

    Returns:
        (the attention's output [B, heads, M, D], the mean over heads of A·values [B, M, C] float32).
    """
    # centred: half precision then resolves small differences better; rows of A sum to 1
    columns = (values - 0.5).detach()
    plain = attn_mask is None and dropout_p == 0 and not is_causal and not enable_gqa and not again
    plain = plain and query.dtype != torch.bfloat16  # the kernel's backward is slow in bfloat16: the caller chooses
    if plain and query.device.type == "cpu" and query.dtype == key.dtype == value.dtype and query.dim() == 4:
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        out, mixed = _Widened.apply(query, key, value, columns, factor)
        return out, mixed + 0.5
    how: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    if enable_gqa:
        how["enable_gqa"] = True
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **how)
    with torch.no_grad():
        count = columns.shape[-1]
        width = second_width(query, count)
        wide = query.new_zeros(*key.shape[:-1], width)
        wide[..., :count] = columns[:, None].to(wide.dtype)
        bias = None if attn_mask is None else attn_mask.detach()
        mixed = F.scaled_dot_product_attention(query.detach(), key.detach(), wide, attn_mask=bias, **how)
        return out, mixed[..., :count].float().mean(1) + 0.5


def second_width(query: Tensor, count: int) -> int:
    """Columns of V in the second call: what the kernels ask for, as wide as Q (CPU), a multiple of 8 (CUDA)."""
    return max(query.shape[-1], count) if query.device.type == "cpu" else -(-count // 8) * 8


class _Widened(torch.autograd.Function):
    """The CPU's flash kernel with more columns in V, whose backward is that of the plain call."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, columns: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        width, more = query.shape[-1], columns.shape[-1]
        wide = F.pad(value, (0, more))
        wide[..., width:] = columns[:, None].to(wide.dtype)
        out, lse = _FLASH(F.pad(query, (0, more)), F.pad(key, (0, more)), wide, 0.0, False, scale=scale)
        mixed = out[..., width:].float().mean(1)
        # Packed as the next layer wants it, [B, M, heads, D]: what is saved here and there is then one tensor.
        out = out.transpose(1, 2)[..., :width].contiguous().transpose(1, 2)
        # What the plain call saves, in its order: a checkpointed block that is run again without shares then fits.
        ctx.save_for_backward(key, query, value, lse, out)
        ctx.scale = scale
        ctx.mark_non_differentiable(mixed)
        return out, mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        key, query, value, lse, out = ctx.saved_tensors
        grads = _FLASH_BACKWARD(grad, query, key, value, out, lse, 0.0, False, scale=ctx.scale)
        return *grads, None, None

"""Relevance by propagation through layers, for "lrp" of `saliency`: where the papers' own pictures come from.

Paper: Chefer, Gur and Wolf, "Transformer Interpretability Beyond Attention Visualization" (2021, arXiv 2012.09838),
which the supplement of All Tokens Matter cites for its Figures 1 and 2. A relevance of 1 starts at the class's logit
and goes back through every layer; in each block, the attention matrix gets the relevance R_A, and the block's step is
the mean over heads of (∇A ⊙ R_A)⁺, where the later, simpler rule ("attention") has A itself for R_A.

- linear layer, y = W·x: R_x = x⁺ ⊙ W⁺ᵀs + x⁻ ⊙ W⁻ᵀs with s = R_y / (W⁺x⁺ + W⁻x⁻); biases do not take part.
- product of two (A·V, Q·Kᵀ): each factor gets half of factor ⊙ ∂(product)·s with s = R / product.
- sum of two (residual): R ⊙ part / sum, then each part scaled so that the two keep the total, by the size of theirs.
- norms, activations, softmax and scaling by constants: R passes.

What we do differently: totals of residual connections are those of one image, not of the batch, and LV-ViT's residual
branches may be divided by any constant. It is for ViT, DeiT and LV-ViT with a class token, one linear head and
pre-norm blocks. Cost: as "attention", with about three more passes' worth of matrix products for each class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.models.families import UnsupportedModelError


@dataclass
class BlockRecord:
    """What went through one block: inputs of its linear layers and norms by name, its input and output."""

    block: Any
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


@contextmanager
def record_blocks(backbone: nn.Module, wanted: bool = True) -> Iterator[list[BlockRecord]]:
    """Run the backbone inside, once; what went through its blocks is then in what this yields, if it is `wanted`."""
    records: list[BlockRecord] = []
    handles = []

    def watch(record: BlockRecord, name: str, module: nn.Module) -> None:
        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            record.inputs[name], record.outputs[name] = args[0].detach(), output.detach()

        handles.append(module.register_forward_hook(keep))

    for block in check(backbone) if wanted else ():
        record = BlockRecord(block)
        records.append(record)
        modules = {"block": block, "norm2": block.norm2, "qkv": block.attn.qkv, "proj": block.attn.proj}
        for name, module in {**modules, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}.items():
            watch(record, name, module)
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def check(backbone: nn.Module) -> list[Any]:
    """The blocks, or an error that says why relevance cannot be propagated."""
    model: Any = backbone
    blocks = list(getattr(backbone, "blocks", ()))
    plain = isinstance(backbone, VisionTransformer) and isinstance(model.head, nn.Linear)
    plain = plain and model.global_pool == "token" and not hasattr(backbone, "head_dist")
    plain = plain and isinstance(model.fc_norm, nn.Identity) and not getattr(model, "attn_pool", None)
    for block in blocks if plain else ():
        attn = getattr(block, "attn", None)
        plain = plain and isinstance(block, Block) and not getattr(block, "post_norm", False)
        plain = plain and isinstance(getattr(attn, "q_norm", None), nn.Identity) and hasattr(attn, "qkv")
        plain = plain and isinstance(getattr(attn, "norm", nn.Identity()), nn.Identity)
        plain = plain and isinstance(getattr(block.mlp, "norm", nn.Identity()), nn.Identity)
    if not plain or not blocks:
        raise UnsupportedModelError(
            f"relevance is propagated through ViT, DeiT and LV-ViT with a class token and pre-norm blocks, not through "
            f"this {type(backbone).__name__}. Use method='attention' or 'cam'."
        )
    return blocks


def attention_relevance(
    backbone: nn.Module, records: list[BlockRecord], matrices: list[Tensor], classes: Tensor
) -> list[Tensor]:
    """R_A of every block, [B, heads, N, N], for one class of each image.

    Args:
        records, matrices: of one pass (`record_blocks`, `record_attention`).
        classes: [B] int64.
    """
    model: Any = backbone
    last = records[-1].outputs["block"]
    features = model.norm(last)[:, 0]
    start = F.one_hot(classes, model.num_classes).to(features.dtype)
    relevance = torch.zeros_like(last)
    relevance[:, 0] = through_linear(start, features, model.head)
    result = []
    for record, matrix in zip(reversed(records), reversed(matrices), strict=True):
        before, middle, after = record.inputs["block"], record.inputs["norm2"], record.outputs["block"]
        skipped, branch = through_sum(relevance, middle, after - middle)
        branch = through_linear(branch, record.inputs["fc2"], record.block.mlp.fc2)
        relevance = skipped + through_linear(branch, record.inputs["fc1"], record.block.mlp.fc1)
        skipped, branch = through_sum(relevance, before, middle - before)
        of_matrix, branch = _through_attention(branch, record, matrix.detach())
        relevance = skipped + branch
        result.append(of_matrix)
    return result[::-1]


def _through_attention(relevance: Tensor, record: BlockRecord, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(R_A, relevance of the attention layer's input)"""
    attn, heads = record.block.attn, matrix.shape[1]
    relevance = through_linear(relevance, record.inputs["proj"], attn.proj).unflatten(2, (heads, -1)).transpose(1, 2)
    q, k, v = record.outputs["qkv"].unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    share = divide(relevance, matrix @ v)
    of_matrix, of_values = matrix * (share @ v.mT) / 2, v * (matrix.mT @ share) / 2
    share = divide(of_matrix, q @ k.mT)
    of_queries, of_keys = q * (share @ k) / 2, k * (share.mT @ q) / 2
    packed = torch.stack((of_queries, of_keys, of_values)).permute(1, 3, 0, 2, 4).flatten(2)
    return of_matrix, through_linear(packed, record.inputs["qkv"], attn.qkv)


def through_linear(relevance: Tensor, inputs: Tensor, layer: nn.Linear) -> Tensor:
    """Relevance of a linear layer's inputs [..., n], from that of its outputs [..., m]."""
    weight = layer.weight.detach()
    pairs = [(inputs.clamp(min=0), weight.clamp(min=0)), (inputs.clamp(max=0), weight.clamp(max=0))]
    share = divide(relevance, sum(F.linear(x, w) for x, w in pairs))
    return torch.stack([x * (share @ w) for x, w in pairs]).sum(0)


def through_sum(relevance: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of two summands [B, N, D]; together they keep each image's total."""
    share = divide(relevance, first + second)
    parts = [first * share, second * share]
    totals = [part.sum((1, 2), keepdim=True) for part in parts]
    whole = relevance.sum((1, 2), keepdim=True)
    size = totals[0].abs() + totals[1].abs()
    scaled = [
        part * divide(divide(total.abs(), size) * whole, total) for part, total in zip(parts, totals, strict=True)
    ]
    return scaled[0], scaled[1]


def divide(a: Tensor, b: Tensor | int) -> Tensor:
    """a / b, a little less near 0; 0 where b is 0."""
    b = torch.as_tensor(b)
    near = b + 1e-9
    return a / torch.where(near == 0, 1e-9, near) * (b != 0)

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
branches may be divided by any constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.models.families import UnsupportedModelError


@dataclass
class BlockRecord:
    """What went through one block: inputs and outputs of its linear layers and norms by name, and its own ("block")."""

    block: Any
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        """A hook for the part with this name."""

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.inputs[name], self.outputs[name] = args[0].detach(), output.detach()

        return hook


@contextmanager
def record_blocks(backbone: nn.Module, wanted: bool = True) -> Iterator[list[BlockRecord]]:
    """Run the backbone inside, once; what went through its blocks is then in what this yields, if it is `wanted`."""
    records = [BlockRecord(block) for block in check(backbone)] if wanted else []
    with ExitStack() as hooks:
        for record in records:
            hooks.enter_context(record.block.register_forward_hook(record.keep("block")))
            for path in ("norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
                hook = record.keep(path.rpartition(".")[2])
                hooks.enter_context(record.block.get_submodule(path).register_forward_hook(hook))
        yield records


def check(backbone: nn.Module) -> list[Any]:
    """The blocks, or an error that says why relevance cannot be propagated."""
    if isinstance(backbone, VisionTransformer) and _reads_class_token(backbone) and all(map(_plain, backbone.blocks)):
        return list(backbone.blocks)
    raise UnsupportedModelError(
        f"relevance is propagated through ViT, DeiT and LV-ViT with a class token and pre-norm blocks, not through "
        f"this {type(backbone).__name__}. Use method='attention' or 'cam'."
    )


def _reads_class_token(model: Any) -> bool:
    """Whether one linear head reads the class token, with nothing in between."""
    direct = isinstance(model.head, nn.Linear) and isinstance(model.fc_norm, nn.Identity)
    return (
        direct
        and model.global_pool == "token"
        and not hasattr(model, "head_dist")
        and not getattr(model, "attn_pool", None)
    )


def _plain(block: Any) -> bool:
    """Whether a block is pre-norm, with norms nowhere else."""
    if not isinstance(block, Block) or getattr(block, "post_norm", False) or not hasattr(block.attn, "qkv"):
        return False
    norms = [getattr(block.attn, "q_norm", None), getattr(block.attn, "norm", None), getattr(block.mlp, "norm", None)]
    return all(norm is None or isinstance(norm, nn.Identity) for norm in norms)


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
    ratio = divide(relevance, matrix @ v)
    of_matrix, of_values = matrix * (ratio @ v.mT) / 2, v * (matrix.mT @ ratio) / 2
    ratio = divide(of_matrix, q @ k.mT)
    of_queries, of_keys = q * (ratio @ k) / 2, k * (ratio.mT @ q) / 2
    packed = torch.stack((of_queries, of_keys, of_values)).permute(1, 3, 0, 2, 4).flatten(2)
    return of_matrix, through_linear(packed, record.inputs["qkv"], attn.qkv)


def through_linear(relevance: Tensor, inputs: Tensor, layer: nn.Linear) -> Tensor:
    """Relevance of a linear layer's inputs [..., n], from that of its outputs [..., m]."""
    weight = layer.weight.detach()
    pairs = [(inputs.clamp(min=0), weight.clamp(min=0)), (inputs.clamp(max=0), weight.clamp(max=0))]
    ratio = divide(relevance, sum(F.linear(x, w) for x, w in pairs))
    return torch.stack([x * (ratio @ w) for x, w in pairs]).sum(0)


def through_sum(relevance: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of two summands [B, N, D]; together they keep each image's total."""
    ratio = divide(relevance, first + second)
    parts = first * ratio, second * ratio
    whole, *totals = (values.sum((1, 2), keepdim=True) for values in (relevance, *parts))
    size = totals[0].abs() + totals[1].abs()
    scales = [divide(divide(total.abs(), size) * whole, total) for total in totals]
    return parts[0] * scales[0], parts[1] * scales[1]


def divide(a: Tensor, b: Tensor | int) -> Tensor:
    """a / b, a little less near 0; 0 where b is 0."""
    b = torch.as_tensor(b)
    near = b + 1e-9
    return a / torch.where(near == 0, 1e-9, near) * (b != 0)

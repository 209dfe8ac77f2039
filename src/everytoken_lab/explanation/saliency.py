"""Which regions of an image support a class: three methods behind one function, `relevance`.

"attention": Chefer, Gur and Wolf, "Generic Attention-model Explainability" (2021), self-attention rules. With A of a
    block and its gradient for the class's logit,  Ā = mean over heads of (∇A ⊙ A)⁺,  R ← R + Ā·R,  R = 1 at the start.
"lrp": Chefer, Gur and Wolf, "Transformer Interpretability Beyond Attention Visualization" (2021), which the papers'
    pictures were made with. A relevance of 1 starts at the class's logit and goes back through every layer; the
    relevance R_A that a block's attention matrix gets stands in the place of A.
    - linear layer, y = W·x: R_x = x⁺ ⊙ W⁺ᵀs + x⁻ ⊙ W⁻ᵀs with s = R_y / (W⁺x⁺ + W⁻x⁻); biases do not take part.
    - product of two (A·V, Q·Kᵀ): each factor gets half of factor ⊙ ∂(product)·s with s = R / product.
    - sum of two (residual): R ⊙ part / sum, each then scaled so that the two keep the total, by the size of theirs.
    - norms, activations, softmax and scaling by constants: R passes.
"cam": Selvaraju et al., "Grad-CAM" (2017):  (Σ_k α_k·F_k)⁺ with α_k the mean over places of ∂logit/∂F_k.

What the answer is read from: the row of the class token; the mean of the rows of class and distillation token where
both answer; the mean over all patch rows, without the start's 1, where the head reads the mean of the tokens. Blocks
that update the class token only (CaiT) change that row only, and tokens that join late join with R = 1.
What we do differently: talking heads (CaiT) mix heads after the softmax, and what mixes tokens then has any sign.
The two summands of a residual keep the total of each image, not of the batch, and may be divided by any constant.
Grad-CAM of a model with a class token looks at the patches before the last block, because after it they do not reach
the head.

While the model is looked at, its layers compute attention as a matrix instead of fused, and hooks on `attn_drop` take
it (`record_attention`). Which layers these are is what token-label alignment knows (`everytoken.models.align.RULES`).
The model is unchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from everytoken.models.align.aligner import HEADS, pooling
from everytoken.models.align.attention import self_attention, talking_heads
from everytoken.models.align.rules import rule_of
from everytoken.models.families import UnsupportedModelError, family_of
from everytoken.models.token_model import TokenModel, grid_shape, last_block

Method = Literal["auto", "attention", "lrp", "cam"]
WAY_OUT = "Use method='cam', which needs no attention."


def relevance(model: nn.Module, images: Tensor, classes: Tensor | Sequence[int], method: Method = "auto") -> Tensor:
    """Maps of how much each position supports each class, [B, n, h, w] float32, 0 or more, on the token grid.

    Args:
        model: a `TokenModel` or a timm model; unchanged afterwards, its gradients too.
        images: [B, C, H, W], normalised.
        classes: n classes for all images, or [B, n] for each.
        method: "auto" takes "attention" where the model has it over all tokens and answers with a class token, else
            "cam": where the head reads the mean, most evidence for a class goes through no attention matrix.
    """
    backbone: Any = backbone_of(model)
    chosen = choose_method(backbone, method)
    with torch.inference_mode(False), torch.enable_grad(), evaluating(backbone):
        indices = torch.as_tensor(classes, dtype=torch.int64, device=images.device)
        indices = indices.expand(len(images), indices.shape[-1]).clone()  # never an inference tensor
        inputs = images.detach().clone().requires_grad_()
        if chosen == "cam":
            return _grad_cam(backbone, inputs, indices)
        with record_attention(backbone) as matrices, record_blocks(backbone, chosen == "lrp") as blocks:
            logits = _class_logits(backbone, backbone.forward_features(inputs))
        size, maps = (images.shape[-2], images.shape[-1]), []
        for i in range(indices.shape[1]):
            score = logits.gather(1, indices[:, i : i + 1]).sum()  # images do not see each other
            grads = torch.autograd.grad(score, matrices, retain_graph=True, allow_unused=True)
            with torch.no_grad():
                weights = [matrix.detach() for matrix in matrices]
                if chosen == "lrp":
                    weights = attention_relevance(backbone, blocks, matrices, indices[:, i])
                pairs = zip(weights, grads, strict=True)  # without a gradient, nothing of it reaches the class
                steps = [(torch.zeros_like(a) if g is None else g * a).clamp(min=0).mean(1) for a, g in pairs]
                start = _identity(1, steps[-1].shape[2], steps[-1])
                maps.append(_read(backbone, accumulate(steps) - start, size))
        return torch.stack(maps, dim=1)


def choose_method(model: nn.Module, method: Method = "auto") -> Method:
    """What "auto" means for a model; other methods are checked. A layer that is not known is an error that names it."""
    backbone = backbone_of(model)
    if method == "cam":
        return "cam"
    try:
        attention_layers(backbone)
    except NoAttentionError:
        if method == "auto":
            return "cam"
        raise
    if method == "auto":
        return "cam" if read_tokens(backbone) == "avg" else "attention"
    if method == "lrp":
        propagation_blocks(backbone)
    return method


def accumulate(steps: Sequence[Tensor]) -> Tensor:
    """R of all blocks, [B, T, T], from R = 1: R ← R + step·R.

    A step [B, M, N] updates the first M tokens. One with more tokens than R means that tokens joined in front, with
    R = 1.
    """
    first = steps[0]
    result = _identity(first.shape[0], first.shape[2], first)
    for step in steps:
        more = step.shape[2] - result.shape[1]
        if more > 0:
            result = F.pad(result, (more, 0, more, 0))
            result[:, :more, :more] = _identity(len(result), more, result)
        updated = step.shape[1]
        result = torch.cat((result[:, :updated] + torch.bmm(step, result), result[:, updated:]), dim=1)
    return result


def _read(backbone: nn.Module, result: Tensor, size: tuple[int, int]) -> Tensor:
    """The patches' part of what the head reads, [B, h, w]."""
    kind, prefix = read_tokens(backbone), family_of(backbone).prefix
    if prefix is None:
        prefix = int(backbone.num_prefix_tokens)  # type: ignore[arg-type]
    row = result[:, {"avg": slice(prefix, None), "both": slice(2), "token": slice(1)}[kind]].mean(1)
    patches = row[:, prefix:].clamp(min=0)
    return patches.unflatten(1, grid_shape(patches.shape[1], size))


def _grad_cam(backbone: Any, inputs: Tensor, classes: Tensor) -> Tensor:
    before: list[Tensor] = []
    with ExitStack() as hooks:
        if family_of(backbone).layout == "tokens" and _has_class_token(backbone):
            keep = last_block(backbone).register_forward_pre_hook(lambda m, args: before.append(args[0]))
            hooks.enter_context(keep)
        features = backbone.forward_features(inputs)
    logits, maps = _class_logits(backbone, features), []
    features = before[0] if before else features
    for i in range(classes.shape[1]):
        score = logits.gather(1, classes[:, i : i + 1]).sum()
        (gradient,) = torch.autograd.grad(score, features, retain_graph=True)
        places, slopes = (_as_grid(backbone, x, inputs) for x in (features.detach(), gradient))
        weight = slopes.mean((1, 2), keepdim=True)
        maps.append((weight * places).sum(-1).clamp(min=0))
    return torch.stack(maps, dim=1)


def _as_grid(backbone: nn.Module, features: Tensor, images: Tensor) -> Tensor:
    """[B, h, w, D]; prefix tokens are left out, of which a block may have fewer than the model (CaiT, CvT)."""
    family, (height, width) = family_of(backbone), images.shape[-2:]
    if features.dim() == 4:
        return features.permute(0, 2, 3, 1) if family.layout == "nchw" else features
    usual = int(getattr(backbone, "num_prefix_tokens", 0)) if family.prefix is None else family.prefix
    prefix, grid = min(
        ((p, grid_shape(features.shape[1] - p, (height, width))) for p in dict.fromkeys((usual, 0))),
        key=lambda choice: abs(choice[1][0] * width - choice[1][1] * height),
    )
    return features[:, prefix:].unflatten(1, grid)


def _has_class_token(backbone: nn.Module) -> bool:
    try:
        return read_tokens(backbone) != "avg"
    except UnsupportedModelError:
        return True  # a head that pools in its own way: before the last block is safe for every one


def _class_logits(backbone: Any, features: Tensor) -> Tensor:
    """[B, K] of a timm model's features; some answer for tokens, too."""
    out = backbone.forward_head(features)
    return out[0] if isinstance(out, tuple) else out


def backbone_of(model: nn.Module) -> nn.Module:
    """The timm model itself."""
    return model.backbone if isinstance(model, TokenModel) else model


def _identity(batch: int, count: int, like: Tensor) -> Tensor:
    return torch.eye(count, device=like.device, dtype=like.dtype).expand(batch, -1, -1)


# -- attention, made explicit ------------------------------------------------------------------------------------------


class NoAttentionError(UnsupportedModelError):
    """The backbone is known, but it has no attention over all tokens: windows, convolutions or MLPs mix its places."""


def attention_layers(backbone: nn.Module) -> list[nn.Module]:
    """The layers with attention over all tokens, in the order in which they run.

    Raises `NoAttentionError` for hierarchical, convolutional and MLP backbones, and `UnsupportedModelError` that names
    the layer where it is not known how a layer mixes tokens.
    """
    family, name = family_of(backbone), type(backbone).__name__
    layers: list[nn.Module] = []

    def walk(module: nn.Module, path: str) -> None:
        rule, what = rule_of(module), f"{type(module).__name__} ({type(module).__module__}, at {path!r} of {name})"
        if path == family.embed or rule == "tokenwise":
            return
        if rule in (self_attention, talking_heads):
            layers.append(module)
        elif rule == "container":
            for child_name, child in module.named_children():
                if path or child_name not in HEADS:
                    walk(child, f"{path}.{child_name}" if path else child_name)
        elif rule is None:
            or_add = "Or add the class to everytoken.models.align.RULES."
            raise UnsupportedModelError(f"it is not known how {what} mixes tokens. {WAY_OUT} {or_add}")
        else:
            raise NoAttentionError(f"{what} does not mix tokens by attention over one grid. {WAY_OUT}")

    if family.layout == "tokens":
        walk(backbone, "")
    if not layers:
        raise NoAttentionError(f"{name} ({family.title}) has no attention over all tokens of one grid. {WAY_OUT}")
    return layers


def read_tokens(backbone: nn.Module) -> str:
    """Which tokens the class head reads: "token" (class token), "both" (class and distillation token) or "avg"."""
    kind = pooling(backbone)
    if kind == "map":
        raise UnsupportedModelError(f"the head of {type(backbone).__name__} attends to the tokens itself. {WAY_OUT}")
    return "both" if kind == "token" and hasattr(backbone, "head_dist") else kind


@contextmanager
def record_attention(backbone: nn.Module) -> Iterator[list[Tensor]]:
    """Run the backbone inside, once; the list then has the attention matrices [B, heads, M, N] of its layers in order.

    Outputs m are made from inputs n.
    """
    layers: list[Any] = attention_layers(backbone)
    fused = [layer for layer in layers if getattr(layer, "fused_attn", False)]
    hooked = [layer.attn_drop for layer in layers if isinstance(getattr(layer, "attn_drop", None), nn.Module)]
    matrices: list[Tensor] = []
    with ExitStack() as stack:
        for drop in hooked:
            stack.enter_context(drop.register_forward_pre_hook(lambda m, args: matrices.append(args[0])))
        for layer in fused:
            layer.fused_attn = False
            stack.callback(setattr, layer, "fused_attn", True)
        stack.enter_context(evaluating(backbone))
        yield matrices
    if len(matrices) != len(layers):
        name = type(backbone).__name__
        raise UnsupportedModelError(f"not all attention layers of {name} pass their matrix to attn_drop. {WAY_OUT}")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and float32 inside; every module is put back as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


# -- relevance through layers, for "lrp" -------------------------------------------------------------------------------


@dataclass
class BlockRecord:
    """What went through one block: inputs and outputs of its linear layers and norms by name, and its own ("block")."""

    block: Any
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def keep(self, name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """A forward hook of the part with this name."""
        self.inputs[name], self.outputs[name] = args[0].detach(), output.detach()


@contextmanager
def record_blocks(backbone: nn.Module, wanted: bool = True) -> Iterator[list[BlockRecord]]:
    """Run the backbone inside, once; what went through its blocks is then in what this yields, if it is `wanted`."""
    records = [BlockRecord(block) for block in propagation_blocks(backbone)] if wanted else []
    with ExitStack() as hooks:
        for record in records:
            for path in ("", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"):
                hook = partial(record.keep, path.rpartition(".")[2] or "block")
                hooks.enter_context(record.block.get_submodule(path).register_forward_hook(hook))
        yield records


def propagation_blocks(backbone: nn.Module) -> list[Any]:
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
    return direct and model.global_pool == "token" and read_tokens(model) == "token"


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

"""The token model: one small interface through which every objective sees the tokens of any backbone.

`TokenModel(backbone)` wraps a timm model without changing it and answers a batch of images with a `TokenView`: class
logits, the token grid in image order, prefix tokens and, with a token head, logits for every token. The backbone's
state dict stays that of the plain timm model, so weights trained here load in timm. `LayerTaps` keeps the token grids
from between the layers, for objectives that look at more than the last one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import register_dataclass
from torch.utils.hooks import RemovableHandle

from everytoken.errors import EverytokenError
from everytoken.mixing.mix import Mix, apply_to_tokens, unmix_tokens
from everytoken.models.align import Aligner, Alignment, Shares
from everytoken.models.families import Family, Layout, UnsupportedModelError, backbone_of, family_of, grid_shape

TapLevel = Literal["blocks", "stages", "merged", "final"]


@dataclass(frozen=True)
class TokenView:
    """What a backbone shows for a batch.

    Attributes:
        logits: [B, K] of the class token (or of the pooled grid).
        grid: [B, h, w, D] tokens in image order (row 0 is the top), after the backbone's last norm.
        prefix: [B, P, D] class, distillation and register tokens, or None.
        token_logits: [B, h, w, C] from the token head, or None without one.
        distill_logits: [B, K] of the distillation token while it is trained, or None.
        shares: which part of class token and tokens belongs to their own image, after `align` and with a mix; or None.
        mix: how the images or tokens were mixed, as it was given to the model; objectives mix their targets by it.
    """

    logits: Tensor
    grid: Tensor
    prefix: Tensor | None = None
    token_logits: Tensor | None = None
    distill_logits: Tensor | None = None
    shares: Shares | None = None
    mix: Mix | None = None

    def voted(self, vote: float) -> Tensor:
        """Class logits [B, K] plus `vote` times the strongest token logit of each class."""
        if not vote:
            return self.logits
        if self.token_logits is None or self.token_logits.shape[-1] != self.logits.shape[-1]:
            raise EverytokenError("a vote of the tokens needs a token head with the classes of the class head.")
        return self.logits + vote * self.token_logits.flatten(1, 2).amax(1)


for _kind in (TokenView, Shares, Mix):  # so that a TokenModel can be exported
    register_dataclass(_kind)


class TokenModel(nn.Module):
    """A backbone that shows its tokens.

        model = TokenModel(timm.create_model("deit_small_patch16_224"), token_classes=1000)
        view = model(images)                   # images [B, 3, 224, 224]
        view.logits, view.token_logits         # [B, 1000], [B, 14, 14, 1000]

    Args:
        backbone: any timm model of a supported family (`everytoken.models.FAMILIES`), one of torchvision or of Hugging
            Face's transformers (`FOREIGN`), or a module without weights of its own around one; of a compiled model the
            plain one is taken, so compile the TokenModel. Logits are those of the backbone itself.
        token_classes: outputs of the token head. None: no token head. Backbones that bring one (`aux_head` of LV-ViT
            and VOLO) use it when it has that many outputs.
    """

    def __init__(self, backbone: nn.Module, token_classes: int | None = None) -> None:
        super().__init__()
        self.backbone = backbone = _bare_backbone(backbone)
        if _is_sharded(backbone):
            _show_methods(backbone)
        self.family: Family = family_of(backbone)
        self.token_head: nn.Linear | None = None
        self.uses_own_head = False  # token logits come from a head that the backbone brought along
        if token_classes:
            self.add_token_head(token_classes)
        self.aligner: Aligner | None = None

    def add_token_head(self, classes: int) -> None:
        """Give every token a classifier with `classes` outputs, the backbone's own if it fits."""
        head = getattr(self.backbone, "aux_head", None)
        self.uses_own_head = False
        if isinstance(head, nn.Linear) and head.out_features == classes:
            self.uses_own_head = True
            head.requires_grad_(True)  # LV-ViT keeps it frozen until somebody uses it
        else:
            like = next(self.backbone.parameters())
            if _is_sharded(self.backbone):
                raise EverytokenError("a token head is sharded with its model: fully_shard(TokenModel(model, ...)).")
            self.token_head = nn.Linear(self.num_features, classes, device=like.device, dtype=like.dtype)
            nn.init.trunc_normal_(self.token_head.weight, std=0.02)
            nn.init.zeros_(self.token_head.bias)

    def align(self, options: Alignment | None = None) -> None:
        """From now on follow the shares of mixed images through the backbone (TL-Align), see `TokenView.shares`."""
        if self.aligner is not None:
            self.aligner.remove()
        self.aligner = Aligner(self.backbone, options)

    def train_distilled(self) -> None:
        """From now on training passes give `TokenView.distill_logits`; an error without a distillation token."""
        enable = getattr(self.backbone, "set_distilled_training", None)
        if enable is None:
            name = type(self.backbone).__name__
            raise UnsupportedModelError(f"{name} has no distillation token; lvvit_s_distilled has, or through='class'.")
        enable(True)

    @property
    def num_features(self) -> int:
        """Channels D of a token."""
        return int(attrgetter(self.family.width)(self.backbone))

    @property
    def num_prefix_tokens(self) -> int:
        """Class, distillation and register tokens P in front of the grid."""
        if self.family.prefix is not None:
            return self.family.prefix
        return int(self.backbone.num_prefix_tokens)  # type: ignore[arg-type]

    @property
    def can_mix_tokens(self) -> bool:
        """Whether tokens can be mixed between patch embedding and position embedding (MixToken)."""
        return self.family.embed is not None

    def forward(self, images: Tensor, mix: Mix | None = None) -> TokenView:
        """Images [B, C, H, W] -> TokenView.

        A `mix` of tokens is carried out after the patch embedding, and undone on the grid (where it can be), so that
        every token stands for its own image again. A mix of pixels has been carried out by the caller. Either way the
        view keeps the mix, so that objectives know whose labels count.
        """
        token_mix = None if mix is None else mix.of_tokens
        if token_mix is not None and not self.can_mix_tokens:
            name = type(self.backbone).__name__
            raise EverytokenError(f"MixToken needs a patch embedding without overlap, {name} has none; use CutMix.")
        shares = None
        # for this pass only, so that the backbone stays as it is; compilers can trace this, but not registering a hook
        parent, _, name = (self.family.embed or "").rpartition(".")
        modules: dict[str, Any] = self.backbone.get_submodule(parent)._modules
        embed = modules.get(name)
        if token_mix is not None:
            modules[name] = _MixedEmbedding(embed, token_mix, self.family.embed_layout)
        try:
            if self.aligner is None or mix is None:
                features, (logits, distill) = self._answer(images)
            else:  # with the head, which may attend to the tokens
                (features, (logits, distill)), shares = self.aligner.run(self._answer, images, mix)
        finally:  # after an error that the caller survives, the next batch must not be mixed
            if token_mix is not None:
                modules[name] = embed
        grid, prefix = self.split(features, (images.shape[-2], images.shape[-1]))
        if token_mix is not None:
            grid = unmix_tokens(grid, token_mix)
            if shares is not None and token_mix.unmixes:
                shares = shares.unmixed(token_mix.at((grid.shape[1], grid.shape[2])), token_mix.partner)
        return TokenView(logits, grid, prefix, self.token_logits(grid), distill, shares, mix)

    def _answer(self, images: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        features = self.features(images)
        return features, self._class_logits(features)

    def features(self, images: Tensor) -> Tensor:
        """What the backbone makes of images [B, C, H, W], in its own layout."""
        if self.family.features is not None:
            return self.family.features(self.backbone, images)
        return self.backbone.forward_features(images)  # type: ignore[operator]

    def token_logits(self, grid: Tensor) -> Tensor | None:
        """[B, h, w, D] -> [B, h, w, C], or None without a token head."""
        head = self.backbone.aux_head if self.uses_own_head else self.token_head
        return None if head is None else head(grid)  # type: ignore[operator]

    def split(self, features: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Backbone features -> (grid [B, h, w, D], prefix [B, P, D] or None); `size` is the image's (height, width)."""
        if not isinstance(features, Tensor):
            raise UnsupportedModelError(f"{type(self.backbone).__name__}.forward_features returns no single tensor")
        if self.family.layout == "tokens":
            count = self.num_prefix_tokens
            prefix = features[:, :count] if count else None
            tokens = _norm_of_pooled(self.backbone, features[:, count:])
            h, w = grid_shape(tokens.shape[1], size)
            return tokens.reshape(tokens.shape[0], h, w, tokens.shape[2]), prefix
        features = _norm_of_pooled(self.backbone, features)
        return (features.permute(0, 2, 3, 1) if self.family.layout == "nchw" else features), None

    def cell_logits(self, images: Tensor) -> Tensor:
        """The backbone's own classifier at every cell: images [B, C, H, W] -> [B, h, w, K].

        Each cell is handed to the backbone's head as if it were an image of one cell, so norms, hidden layers and
        biases of the head are applied as they would be. Where pooling is a plain mean and the head is linear, the
        mean over the cells equals the model's logits. For models with a class token, the class head reads the patch
        tokens.
        """
        return self._cells(self.features(images), (images.shape[-2], images.shape[-1]))

    def class_and_cell_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Class logits [B, K] and logits [B, h, w, C] of every cell, the token head's or `cell_logits`; one pass."""
        size = (images.shape[-2], images.shape[-1])
        features = self.features(images)
        tokens = self.token_logits(self.split(features, size)[0])
        return self._class_logits(features)[0], self._cells(features, size) if tokens is None else tokens

    def _cells(self, features: Tensor, size: tuple[int, int]) -> Tensor:
        if self.family.layout == "tokens":
            count = self.num_prefix_tokens
            tokens = features[:, count:]
            b, n, d = tokens.shape
            cells = tokens.reshape(b * n, 1, d).expand(-1, count + 1, -1)
            h, w = grid_shape(n, size)
        elif self.family.layout == "nchw":
            b, d, h, w = features.shape
            cells = features.permute(0, 2, 3, 1).reshape(b * h * w, d, 1, 1)
        else:
            b, h, w, d = features.shape
            cells = features.reshape(b * h * w, 1, 1, d)
        logits, _ = self._class_logits(cells)
        return logits.reshape(b, h, w, -1)

    def _class_logits(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        model: Any = self.backbone
        if self.family.head is not None:
            return self.family.head(model, features), None
        if self.family.title == "VOLO" and (self.training or features.shape[1] == 2):
            # VOLO's head adds half of the strongest token logits, which is meant for evaluation of whole images
            return model.head(model.forward_head(features, pre_logits=True)), None
        out = model.forward_head(features)
        return out if isinstance(out, tuple) else (out, None)


def _bare_backbone(model: nn.Module) -> nn.Module:
    """The backbone that a TokenModel takes for a model: the same weights, and nothing lost that is around it."""
    backbone = backbone_of(model)
    if backbone is model:
        return model
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | DataParallel):
            name = type(module).__name__
            raise EverytokenError(f"a TokenModel goes into {name}, not around it: {name}(TokenModel(model)).")
    inside = {id(value) for value in (*backbone.parameters(), *backbone.buffers())}
    own = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if id(value) not in inside]
    if own:
        names = ", ".join(own[:3])
        raise EverytokenError(
            f"{type(model).__name__} has weights of its own ({names}) beside its {type(backbone).__name__}, and a "
            "TokenModel would leave them out. Give it the backbone alone."
        )
    return backbone


def _is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` (FSDP2) has been called on a model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by whoever sharded it
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def _show_methods(model: nn.Module) -> None:
    """Let FSDP2 gather the weights for timm's two methods, too; an error for models without them."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    if not hasattr(model, "forward_features"):
        raise EverytokenError(f"shard the TokenModel of a {type(model).__name__}: fully_shard(TokenModel(model)).")
    for method in ("forward_features", "forward_head"):
        register_fsdp_forward_method(model, method)


class _MixedEmbedding:
    """Stands in for a patch embedding and mixes the tokens that it returns."""

    def __init__(self, embed: Any, mix: Mix, layout: Layout) -> None:
        self.embed, self.mix, self.layout = embed, mix, layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self.embed, name)

    def __call__(self, images: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self.embed(images, *args, **kwargs)
        if isinstance(output, tuple):  # with the size of the grid
            return self._mixed(images, output[0]), *output[1:]
        return self._mixed(images, output)

    def _mixed(self, images: Tensor, output: Tensor) -> Tensor:
        if output.ndim == 3:  # [B, N, D]
            h, w = grid_shape(output.shape[1], (images.shape[-2], images.shape[-1]))
            return apply_to_tokens(output.reshape(output.shape[0], h, w, -1), self.mix).reshape(output.shape)
        return apply_to_tokens(output, self.mix, "NCHW" if self.layout == "nchw" else "NHWC")


def _norm_of_pooled(model: nn.Module, features: Tensor) -> Tensor:
    """Apply, to every cell, the norm that some backbones keep for after pooling (ConvNeXt, ViT with `fc_norm`)."""
    norm = getattr(model, "fc_norm", None)
    if norm is None:
        norm = getattr(getattr(model, "head", None), "norm", None)
    if norm is None or isinstance(norm, nn.Identity):
        return features
    return norm(features)


@torch.no_grad()
def probe(model: TokenModel, size: tuple[int, int], channels: int = 3) -> tuple[int, int]:
    """The token grid (h, w) for images of (height, width), found by one forward pass of zeros."""
    was = model.training
    model.eval()
    like = next(model.parameters())
    # by `forward`: one image would cost a compiled model a graph of its own
    view = model.forward(torch.zeros(1, channels, *size, device=like.device, dtype=like.dtype))
    model.train(was)
    return view.grid.shape[1], view.grid.shape[2]


class LayerTaps:
    """Token grids from between the layers of a backbone, kept by forward hooks in every training pass.

    timm's `feature_info` names the stages (or, in a plain ViT, the blocks); the blocks of a stage are its `.blocks` or
    the members of its container. Nothing is computed twice, and the backbone's state dict is not touched.

    Args:
        model: the backbone's token model.
        level: "blocks", every block; "stages", the last block of each stage; "merged", what the next stage's merging
            makes of each stage, and the last block; "final", the last block, which is before the final norm.

    Attributes:
        dims: channels at each tap.
    """

    def __init__(self, model: TokenModel, level: TapLevel) -> None:
        self.layout = model.family.layout
        self.prefix = model.num_prefix_tokens
        self.name = type(model.backbone).__name__
        modules = _tapped_modules(model.backbone, level)
        self.dims = [dim for _, dim in modules]
        self.outputs = _TapOutputs()
        self.handles: list[RemovableHandle] = [
            module.register_forward_hook(partial(_keep, self.outputs, i)) for i, (module, _) in enumerate(modules)
        ]

    def grids(self, size: tuple[int, int]) -> list[Tensor]:
        """The grids of the last training pass, [B, h, w, D] each, for images of (height, width).

        They are handed over once: the next call needs another training pass.
        """
        if len(self.outputs) != len(self.dims):
            seen = f"{len(self.outputs)} of {len(self.dims)} tapped blocks of {self.name}"
            raise UnsupportedModelError(f"{seen} have run in training mode since the last call of `grids`")
        grids = [self._as_grid(self.outputs[i], size) for i in range(len(self.dims))]
        self.outputs.clear()
        return grids

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()
        self.outputs.clear()

    def _as_grid(self, output: Tensor, size: tuple[int, int]) -> Tensor:
        if output.ndim == 4 and self.layout != "tokens":
            return output.permute(0, 2, 3, 1) if self.layout == "nchw" else output
        if output.ndim != 3:
            raise UnsupportedModelError(f"a block of {self.name} returns {output.ndim} dimensions, not 3 or 4")
        # class tokens may join late (CvT), so take the number of prefix tokens that leaves the image's proportions
        prefix, (h, w) = min(
            ((p, grid_shape(output.shape[1] - p, size)) for p in dict.fromkeys((self.prefix, 0))),
            key=lambda split: abs(split[1][0] * size[1] - split[1][1] * size[0]),
        )
        return output[:, prefix:].reshape(output.shape[0], h, w, output.shape[2])


class _TapOutputs(dict[int, Tensor]):
    """Outputs by number. A copy of a tapped model (averaged weights) starts with no outputs."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _TapOutputs:
        memo[id(self)] = new = _TapOutputs()
        return new


def _keep(outputs: _TapOutputs, index: int, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook: what a block returns in training mode."""
    if module.training:
        outputs[index] = output[0] if isinstance(output, tuple) else output


def blocks_of(backbone: nn.Module) -> list[nn.Module]:
    """All blocks of the stages that the backbone names, in the order in which they run."""
    return [module for module, _ in _tapped_modules(backbone, "blocks")]


def last_block(backbone: nn.Module) -> nn.Module:
    """The last block of the last stage that the backbone names."""
    return _tapped_modules(backbone, "final")[-1][0]


def _tapped_modules(backbone: nn.Module, level: TapLevel) -> list[tuple[nn.Module, int]]:
    """The modules to tap, with their channels."""
    infos: Any = getattr(backbone, "feature_info", None)
    if not infos:
        raise UnsupportedModelError(f"{type(backbone).__name__} does not name its stages (no feature_info)")
    try:
        named = [(backbone.get_submodule(info["module"]), int(info["num_chs"])) for info in infos]
    except AttributeError as error:
        raise UnsupportedModelError(f"the stages that {type(backbone).__name__} names do not exist: {error}") from error
    stages = [(module, members, dim) for module, dim in named if (members := _members(module))]
    if level == "final":
        return [(stages[-1][1][-1], stages[-1][2]) if stages else named[-1]]
    if not stages:  # a plain transformer: the named modules are its blocks
        if level == "blocks":
            return named
        raise UnsupportedModelError(f"{type(backbone).__name__} has no stages; take every block ('blocks')")
    if level == "blocks":
        return [(block, dim) for _, members, dim in stages for block in members]
    if level == "stages":
        return [(members[-1], dim) for _, members, dim in stages]
    merges: list[tuple[Any, int]] = [(getattr(module, "downsample", None), dim) for module, _, dim in stages[1:]]
    if any(merge is None or isinstance(merge, nn.Identity) for merge, _ in merges):
        raise UnsupportedModelError(f"{type(backbone).__name__} has no merging between stages; take 'stages'")
    return [*merges, (stages[-1][1][-1], stages[-1][2])]


def _members(module: nn.Module) -> list[nn.Module]:
    blocks = getattr(module, "blocks", module)
    return list(blocks) if isinstance(blocks, nn.Sequential | nn.ModuleList) else []

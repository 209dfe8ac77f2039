"""Taps: token grids from between the layers of a backbone, for objectives that look at more than the last one.

A tap is a forward hook that remembers what a block returned in a training pass; `grids` hands everything over as
[B, h, w, D] and forgets it. Nothing is computed twice, and the backbone's state dict is not touched.

Which blocks: timm's `feature_info` names the stages (or, in a plain ViT, the blocks); the blocks of a stage are its
`.blocks` or the members of its container. Cost: the memory of the tapped outputs, which training keeps anyway, except
under gradient checkpointing.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from everytoken.models.families import UnsupportedModelError
from everytoken.models.view import TokenModel, grid_shape

__all__ = ["Level", "Taps", "blocks_of", "last_block"]

Level = Literal["blocks", "stages", "merged", "final"]


class Taps:
    """Taps in a backbone.

    Args:
        model: the token view of the backbone.
        level: "blocks", every block; "stages", the last block of each stage; "merged", what the next stage's merging
            makes of each stage, and the last block; "final", the last block, which is before the final norm.

    Attributes:
        dims: channels at each tap.
    """

    def __init__(self, model: TokenModel, level: Level) -> None:
        self.layout = model.family.layout
        own = model.family.prefix
        self.prefix = int(getattr(model.backbone, "num_prefix_tokens", 0)) if own is None else own
        self.name = type(model.backbone).__name__
        places = _places(model.backbone, level)
        self.dims = [dim for _, dim in places]
        self.outputs = _Store()
        self.handles: list[RemovableHandle] = [
            module.register_forward_hook(_Tap(self.outputs, i)) for i, (module, _) in enumerate(places)
        ]

    def grids(self, size: tuple[int, int]) -> list[Tensor]:
        """The grids of the last training pass, [B, h, w, D] each, for images of (height, width); they are forgotten."""
        if len(self.outputs) != len(self.dims):
            raise UnsupportedModelError(
                f"{len(self.outputs)} of {len(self.dims)} tapped blocks of {self.name} ran in training mode since the "
                "last look; run the model in training mode first, with these taps in place"
            )
        found = [self._as_grid(self.outputs[i], size) for i in range(len(self.dims))]
        self.outputs.clear()
        return found

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()
        self.outputs.clear()

    def _as_grid(self, output: Tensor, size: tuple[int, int]) -> Tensor:
        if output.ndim == 4 and self.layout != "tokens":
            return output.permute(0, 2, 3, 1) if self.layout == "nchw" else output
        if output.ndim != 3:
            raise UnsupportedModelError(f"a block of {self.name} returns {output.ndim} dimensions, which is not known")
        # class tokens may join late (CvT), so take the number of prefix tokens that leaves the image's proportions
        prefix, (h, w) = min(
            ((p, grid_shape(output.shape[1] - p, size)) for p in dict.fromkeys((self.prefix, 0))),
            key=lambda found: abs(found[1][0] * size[1] - found[1][1] * size[0]),
        )
        return output[:, prefix:].reshape(output.shape[0], h, w, output.shape[2])


class _Store(dict[int, Tensor]):
    """Outputs by number. A copy of a tapped model (averaged weights) gets an empty store of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Store:
        memo[id(self)] = new = _Store()
        return new


class _Tap:
    """Remembers an output."""

    def __init__(self, outputs: _Store, index: int) -> None:
        self.outputs = outputs
        self.index = index

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module.training:
            self.outputs[self.index] = output[0] if isinstance(output, tuple) else output


def blocks_of(backbone: nn.Module) -> list[nn.Module]:
    """All blocks of the stages that the backbone names, in the order in which they run."""
    return [module for module, _ in _places(backbone, "blocks")]


def last_block(backbone: nn.Module) -> nn.Module:
    """The last block of the last stage that the backbone names."""
    return _places(backbone, "final")[-1][0]


def _places(backbone: nn.Module, level: Level) -> list[tuple[nn.Module, int]]:
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
        raise UnsupportedModelError(
            f"{type(backbone).__name__} does not begin its stages with a merging; take 'stages'"
        )
    return [*merges, (stages[-1][1][-1], stages[-1][2])]


def _members(module: nn.Module) -> list[nn.Module]:
    blocks = getattr(module, "blocks", module)
    return list(blocks) if isinstance(blocks, nn.Sequential | nn.ModuleList) else []

"""What other code wraps around a backbone: torch.compile, DistributedDataParallel, FSDP2, DataParallel, own modules."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from everytoken.errors import EverytokenError
from everytoken.models.families import UnsupportedModelError, family_of


def backbone_of(model: nn.Module) -> nn.Module:
    """The one supported backbone that a model is or holds, however deep; an error if there is none, or several."""
    found = _backbones(model)
    if len(found) > 1:
        names = ", ".join(f"{type(module).__name__} at {name!r}" for name, module in found.items())
        raise EverytokenError(f"{type(model).__name__} holds {len(found)} backbones: {names}. Give the one you mean.")
    if not found:
        family_of(model)  # says why not
    return next(iter(found.values()))


def _backbones(model: nn.Module, name: str = "") -> dict[str, nn.Module]:
    """The outermost supported backbones, by name."""
    try:
        family = family_of(model)
        if family.features is not None or hasattr(model, "forward_features"):  # not a layer from the same module
            return {name: model}
    except UnsupportedModelError:
        pass
    found: dict[str, nn.Module] = {}
    for child_name, child in model.named_children():
        found |= _backbones(child, f"{name}.{child_name}" if name else child_name)
    return found


def bare_backbone(model: nn.Module) -> nn.Module:
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


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` (FSDP2) has been called on a model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by whoever sharded it
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def show_methods(model: nn.Module) -> None:
    """Let FSDP2 gather the weights for timm's two methods, too; an error for models without them."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    if not hasattr(model, "forward_features"):
        raise EverytokenError(f"shard the TokenModel of a {type(model).__name__}: fully_shard(TokenModel(model)).")
    for method in ("forward_features", "forward_head"):
        register_fsdp_forward_method(model, method)

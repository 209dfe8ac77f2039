"""`everytoken models`: what is supported, by family; the names that match a pattern; or what one model costs."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.schema import say
from everytoken_lab.terminal import print_facts, print_table

if TYPE_CHECKING:
    from torch import Tensor

    from everytoken.models.token_model import TokenModel


@dataclass(frozen=True)
class ModelsOptions:
    """List the backbones that have a token view, which all objectives but tl_align and transmix work on.

    Without a name: one line per family. With part of a name: the models that match. With the name of a model: its
    parameters, multiply-adds, token grid, and throughput on this machine.

    Examples:
        everytoken models
        everytoken models 'swin*'
        everytoken models lvvit_s
        everytoken models lvvit_s --seconds 0 --set depth=12 --set 'stem_kernels=[16]' --set 'stem_strides=[16]'
    """

    pattern: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = ""
    """A timm model, part of a name, or a pattern with * and ?."""
    img_size: tuple[int, ...] = ()
    """Of one model: side of the image in pixels, or height and width. Default: the model's own."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = ()
    """Of one model: NAME=VALUE for other arguments, such as depth=12 or num_classes=10; may be repeated."""
    batch_size: int = 8
    """Images per step when measuring throughput."""
    seconds: float = 3.0
    """How long to measure throughput; 0 leaves it out."""
    device: str = ""
    """cpu, cuda, mps... Default: the best available."""
    json: bool = False
    """Print JSON instead of a table."""


def main(options: ModelsOptions) -> None:
    if len(options.img_size) > 2:
        raise EverytokenError(f"--img-size takes one number or height and width, got {options.img_size}")
    import timm

    if options.pattern and timm.is_model(options.pattern):
        facts = measure(options)
        if options.json:
            say(json.dumps(facts, indent=1))
        else:
            print_facts(facts, options.pattern)
        return
    names = _names_by_family(options.pattern)
    if not names:
        beginnings = {name.split("_")[0] for group in _names_by_family("").values() for name in group}
        raise EverytokenError(
            f"no supported model matches {options.pattern!r}.{did_you_mean(options.pattern, beginnings)} `everytoken "
            "models` lists the families; other timm models have no token view yet."
        )
    if options.json:
        say(json.dumps(names, indent=1))
    elif options.pattern:
        say("\n".join(name for group in names.values() for name in group))
    else:
        _print_families(names)


def _names_by_family(pattern: str) -> dict[str, list[str]]:
    """Title of a family -> its model names that match; a pattern without * and ? is part of a name."""
    import timm

    from everytoken.models.families import family_of_name

    names: dict[str, list[str]] = defaultdict(list)
    for name in timm.list_models(pattern if set("*?[") & set(pattern) else f"*{pattern}*"):
        if (family := family_of_name(name)) is not None:
            names[family.title].append(name)
    return dict(names)


def _print_families(names: dict[str, list[str]]) -> None:
    from everytoken.models.families import FAMILIES

    rows = []
    for title, family in {family.title: family for family in FAMILIES.values()}.items():
        example = min(names[title], key=lambda name: (len(name), name))
        mixes = "yes" if family.embed else "use CutMix"
        rows.append({"family": title, "models": len(names[title]), "MixToken": mixes, "for example": example})
    print_table(rows, "Backbones with a token view", "`everytoken models PATTERN` lists the names")


def measure(options: ModelsOptions) -> dict[str, Any]:
    """Size, cost and speed of a model, by the words that are printed."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from everytoken.models.families import family_of
    from everytoken.models.token_model import TokenModel
    from everytoken_lab.engine.distributed import pick_device
    from everytoken_lab.engine.options import overrides
    from everytoken_lab.models.description import building, create_sized

    device = torch.device(pick_device(options.device))
    arguments = {"num_classes": 1000, **overrides(options.set, {})}
    if options.img_size:
        arguments["img_size"] = (options.img_size[0], options.img_size[-1])
    with building(f"{options.pattern} with {arguments}"):
        backbone: Any = create_sized(options.pattern, arguments)[0]
    model = TokenModel(backbone).to(device).eval()
    size = options.img_size or backbone.pretrained_cfg["input_size"][1:]
    image = torch.zeros(1, int(arguments.get("in_chans", 3)), size[0], size[-1], device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        view = model(image)
    facts: dict[str, Any] = {
        "family": family_of(backbone).title,
        "parameters": sum(p.numel() for p in backbone.parameters()),
        "input": f"{size[0]} x {size[-1]}",
        "multiply-adds": f"{counter.get_total_flops() / 2e9:.2f} G",
        "token grid": f"{view.grid.shape[1]} x {view.grid.shape[2]}",
        "token width": view.grid.shape[3],
        "prefix tokens": 0 if view.prefix is None else view.prefix.shape[1],
        "brings a token head": "yes" if getattr(backbone, "aux_head", None) is not None else "no",
        "MixToken": "yes" if model.can_mix_tokens else "no, use CutMix",
    }
    images = image.repeat(options.batch_size, 1, 1, 1)
    for label, training in (("evaluation", False), ("training", True)) if options.seconds > 0 else ():
        rate = _images_per_second(model.train(training), images, options.seconds / 2)
        facts[f"{label} on {device}"] = f"{rate:.1f} images/s"
    return facts


def _images_per_second(model: TokenModel, images: Tensor, seconds: float) -> float:
    """Over at least `seconds`, after one step to warm up; with the backward pass in training mode."""
    import torch

    steps, start = -1, 0.0
    while steps < 1 or time.perf_counter() - start < seconds:
        with torch.set_grad_enabled(model.training):
            logits = model(images).logits
        if model.training:
            logits.sum().backward()
        if images.is_cuda:
            torch.cuda.synchronize()
        steps += 1
        start = time.perf_counter() if steps == 0 else start
    return steps * len(images) / (time.perf_counter() - start)

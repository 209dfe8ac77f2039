"""`everytoken model NAME`: what a model costs, and how fast it is on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse
from everytoken.errors import EverytokenError

if TYPE_CHECKING:
    from torch import Tensor

    from everytoken.models import TokenModel


@dataclass(frozen=True)
class ModelOptions:
    """Print parameters, multiply-adds, the token grid, and throughput on this machine.

    Examples:
        everytoken model lvvit_s
        everytoken model swin_tiny_patch4_window7_224 --img-size 224 320
        everytoken model lvvit_s --seconds 0 --set depth=12 --set 'stem_kernels=[16]' --set 'stem_strides=[16]'
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """A timm model name (`everytoken models`)."""
    img_size: tuple[int, ...] = ()
    """Side of the image in pixels, or height and width. Default: the model's own."""
    num_classes: int = 1000
    """Classes of the class head."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for other arguments of the model, such as depth=12; may be repeated."""
    batch_size: int = 8
    """Images per step when measuring throughput."""
    seconds: float = 3.0
    """How long to measure; 0 leaves the measurement out."""
    device: str = ""
    """cpu, cuda, mps... Default: the best available."""
    json: bool = False
    """Print JSON instead of a table."""


def main(argv: list[str], prog: str) -> None:
    """Parse, measure, print."""
    options = parse(ModelOptions, prog, argv)
    if len(options.img_size) > 2:
        raise EverytokenError(f"--img-size takes one number or height and width, not {options.img_size}")
    facts = measure(options)
    if options.json:
        print(json.dumps(facts, indent=1))
        return
    table = Table(title=options.name, show_header=False)
    for key, value in facts.items():
        table.add_row(key, f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def measure(options: ModelOptions) -> dict[str, Any]:
    """Size, cost and speed of a model, by the words that are printed."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from everytoken.engine.distributed import pick_device
    from everytoken.engine.recipe import overrides
    from everytoken.models import TokenModel, family_of
    from everytoken.models.open import building, check_architecture, create_sized

    check_architecture(options.name)
    device = torch.device(pick_device(options.device))
    arguments = {"num_classes": options.num_classes, **overrides(options.set, {})}
    if options.img_size:
        arguments["img_size"] = options.img_size if len(options.img_size) == 2 else options.img_size[0]
    with building(f"{options.name} with {arguments}"):
        backbone: Any = create_sized(options.name, arguments)[0]
    model = TokenModel(backbone).to(device).eval()
    size = options.img_size or backbone.pretrained_cfg["input_size"][1:]
    height, width = size if len(size) == 2 else (size[0], size[0])
    channels = int(arguments.get("in_chans", 3))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        view = model(torch.zeros(1, channels, height, width, device=device))
    facts: dict[str, Any] = {
        "family": family_of(backbone).title,
        "parameters": sum(p.numel() for p in backbone.parameters()),
        "input": f"{height} x {width}",
        "multiply-adds": f"{counter.get_total_flops() / 2e9:.2f} G",
        "token grid": f"{view.grid.shape[1]} x {view.grid.shape[2]}",
        "token width": view.grid.shape[3],
        "prefix tokens": 0 if view.prefix is None else view.prefix.shape[1],
        "brings a token head": "yes" if getattr(backbone, "aux_head", None) is not None else "no",
        "MixToken": "yes" if model.can_mix_tokens else "no, use CutMix",
    }
    if options.seconds > 0:
        images = torch.zeros(options.batch_size, channels, height, width, device=device)
        for label, training in (("evaluation", False), ("training", True)):
            rate = _images_per_second(model, images, options.seconds / 2, training)
            facts[f"{label} on {device}"] = f"{rate:.1f} images/s"
    return facts


def _images_per_second(model: TokenModel, images: Tensor, seconds: float, training: bool) -> float:
    """Over at least `seconds`, after one step to warm up."""
    import torch

    model.train(training)

    def step() -> None:
        with torch.set_grad_enabled(training):
            logits = model(images).logits
        if training:
            logits.sum().backward()
        if images.is_cuda:
            torch.cuda.synchronize()

    step()
    start, steps = time.perf_counter(), 0
    while steps == 0 or time.perf_counter() - start < seconds:
        step()
        steps += 1
    return steps * len(images) / (time.perf_counter() - start)

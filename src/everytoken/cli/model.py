"""`everytoken model NAME`: what one model costs, and how fast it is here."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from everytoken.cli._parse import parse
from everytoken.errors import EverytokenError, did_you_mean


@dataclass(frozen=True)
class Model:
    """Print parameters, multiply-adds, the token grid, and throughput on this machine.

    Examples:
        everytoken model lvvit_s
        everytoken model swin_tiny_patch4_window7_224 --img-size 224 320
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """A timm model name (`everytoken models`)."""
    img_size: tuple[int, ...] = ()
    """Side of the image in pixels, or height and width. Default: the model's own."""
    num_classes: int = 1000
    """Classes of the class head."""
    batch_size: int = 8
    """Images per step when measuring throughput."""
    seconds: float = 3.0
    """How long to measure; 0 leaves the measurement out."""
    device: str = ""
    """cpu, cuda, mps... Default: the best there is."""
    json: bool = False
    """Print JSON instead of a table."""


def main(argv: list[str], prog: str) -> None:
    """Parse, measure, print."""
    options = parse(Model, prog, argv)
    if len(options.img_size) > 2:
        raise EverytokenError(f"--img-size takes one number or height and width, not {options.img_size}")
    facts = _facts(options)
    if options.json:
        print(json.dumps(facts, indent=1))
        return
    table = Table(title=options.name, show_header=False)
    for key, value in facts.items():
        table.add_row(key, f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def _facts(options: Model) -> dict[str, Any]:
    import timm
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from everytoken.engine.distributed import pick_device
    from everytoken.models import TokenModel, family_of_name
    from everytoken.models.open import create_sized

    if not timm.is_model(options.name.split(".")[0]):
        near = did_you_mean(options.name, timm.list_models())
        raise EverytokenError(f"timm knows no model {options.name!r}.{near}")
    device = torch.device(pick_device(options.device))
    arguments: dict[str, Any] = {"num_classes": options.num_classes}
    if options.img_size:
        arguments["img_size"] = options.img_size if len(options.img_size) == 2 else options.img_size[0]
    backbone: Any = create_sized(options.name, arguments)[0]
    model = TokenModel(backbone).to(device).eval()
    size = options.img_size or backbone.pretrained_cfg["input_size"][1:]
    height, width = size if len(size) == 2 else (size[0], size[0])
    image = torch.zeros(1, 3, height, width, device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        view = model(image)
    family = family_of_name(options.name.split(".")[0])
    facts: dict[str, Any] = {
        "family": family.title if family else "",
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
        batch = torch.zeros(options.batch_size, 3, height, width, device=device)
        facts[f"evaluation on {device}"] = f"{_rate(model, batch, options.seconds / 2, False):.1f} images/s"
        facts[f"training on {device}"] = f"{_rate(model, batch, options.seconds / 2, True):.1f} images/s"
    return facts


def _rate(model: Any, batch: Any, seconds: float, training: bool) -> float:
    """Images per second over at least `seconds`, after one step to warm up."""
    import torch

    model.train(training)

    def step() -> None:
        with torch.set_grad_enabled(training):
            logits = model(batch).logits
        if training:
            logits.sum().backward()
        if batch.is_cuda:
            torch.cuda.synchronize()

    step()
    start, steps = time.perf_counter(), 0
    while steps == 0 or time.perf_counter() - start < seconds:
        step()
        steps += 1
    return steps * batch.shape[0] / (time.perf_counter() - start)

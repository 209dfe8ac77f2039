"""drloc's Table 14: seconds per batch, mean and deviation, with and without dense relative localization.

    python benchmarks/papers/drloc_table14.py                 # the paper's three networks, small
    python benchmarks/papers/drloc_table14.py --batch-size 1024 --steps 50 --device cuda --amp

A batch is a whole step (forward, loss, backward, AdamW) on images that are there already. Steps with and without drloc
alternate, so that what else the machine does meets both; the first of each are left out. On a CPU it is processor time.
The paper has +2.43 % (CvT-13), +2.36 % (Swin-T) and +1.77 % (T2T-ViT-14) at a batch of 1024; the share of a small batch
is larger or smaller with the machine. `benchmarks/drloc.py` compares the cost with its floor instead.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import timm
import torch
from torch.nn import functional as F

import everytoken  # noqa: F401  (registers the models)
from everytoken.models import TokenModel
from everytoken.objectives.drloc import Drloc

MODELS = ("cvt_13", "swin_tiny_patch4_window7_224", "t2t_vit_14")


def seconds(name: str, batch: int, steps: int, device: str = "cpu", amp: bool = False, size: int = 224) -> np.ndarray:
    """[2, steps] seconds of steps without and with drloc."""
    torch.manual_seed(0)
    model = TokenModel(timm.create_model(name, img_size=size, num_classes=100)).to(device).train()
    drloc = Drloc(model).to(device)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(100, (batch,), device=device)
    parameters = [*model.parameters(), *drloc.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    clock = time.process_time if device == "cpu" else time.perf_counter
    times: list[list[float]] = [[], []]
    for number in range(2 * (steps + 1)):
        with_drloc = number % 2
        started = clock()
        with torch.autocast(torch.device(device).type, enabled=amp):
            view = model(images)
            loss = F.cross_entropy(view.logits, labels)
            if with_drloc:
                loss = loss + drloc(view, None)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times[with_drloc].append(clock() - started)
    return np.array(times)[:, 1:]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true")
    options = parser.parse_args(argv)
    print(f"seconds per batch of {options.batch_size}, mean ± standard deviation of {options.steps} steps")
    for name in options.models:
        plain, both = seconds(name, options.batch_size, options.steps, options.device, options.amp, options.img_size)
        print(f"{name:<36}{plain.mean():.4f} ± {plain.std():.4f}")
        added = 100 * (both.mean() / plain.mean() - 1)
        print(f"{name + ' + drloc':<36}{both.mean():.4f} ± {both.std():.4f}   {added:+.2f} %")


if __name__ == "__main__":
    main()

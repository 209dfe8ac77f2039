"""TL-Align's Table 2, columns Params and Speed: images per second of training with every way of mixing.

    python benchmarks/papers/tl_align_table2.py                                  # DeiT-S, a small batch
    python benchmarks/papers/tl_align_table2.py --batch-size 128 --steps 50 --device cuda --amp

A step is mixing, forward, loss, backward and AdamW on images that are there already. The methods take turns, so that
what else the machine does meets all of them; the first round is left out, and medians are printed. On a CPU it is
processor time. Weights are random, which costs the same as trained ones. The paper measured 322 to 139 images/s on a
GPU that it does not name; compare the last two columns, which are relative to training without mixing. Attentive-CutMix
asks a ResNet-50, whose classifier the paper's 46 M leave out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import timm
import torch

import everytoken  # noqa: F401  (registers the models)
from everytoken.data.batch import Batch
from everytoken.keyed import StepKey
from everytoken.mixing import build_mixer
from everytoken.models import TokenModel
from everytoken.objectives.registry import build_objectives
from everytoken.step import FrozenTeacher, TokenStep

METHODS = {  # objective, mixing, images per second in the paper
    "Vanilla": ("hard", "", 322),
    "CutMix": ("hard", "cutmix", 322),
    "Puzzle-Mix": ("hard", "puzzlemix", 139),
    "SaliencyMix": ("hard", "saliencymix", 314),
    "Attentive-CutMix": ("hard", "attentivecutmix", 239),
    "TransMix": ("transmix", "cutmix", 322),
    "CutMix + TL-Align": ("tl_align", "cutmix", 311),
}
NORM = ((0.5,) * 3, (0.5,) * 3)


def measure(
    name: str, teacher: str, batch: int, steps: int, device: str = "cpu", amp: bool = False, size: int = 224
) -> tuple[np.ndarray, list[float]]:
    """([methods, steps] seconds, million parameters of each method)"""
    torch.manual_seed(0)
    made = {}
    for objective in ("hard", "transmix", "tl_align"):  # alignment belongs to a model, so each has its own
        model = TokenModel(timm.create_model(name, img_size=size, num_classes=1000)).to(device)
        made[objective] = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
    asked = FrozenTeacher(TokenModel(timm.create_model(teacher)), NORM, NORM)
    trained, parameters = [], []
    for objective, mixing, _ in METHODS.values():
        model, optimizer = made[objective]
        guide = asked if mixing == "attentivecutmix" else None
        mixer, objectives = build_mixer({mixing: {}} if mixing else {}), build_objectives({objective: {}}, model)
        trained.append((TokenStep(model, objectives, mixer, guide).train(), optimizer))
        networks = [model, *([guide.model] if guide else [])]
        parameters.append(sum(p.numel() for network in networks for p in network.parameters()) / 1e6)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    clock = time.process_time if device == "cpu" else time.perf_counter
    times = np.zeros((len(trained), steps + 1))
    for number in range(steps + 1):
        for row, (step, optimizer) in enumerate(trained):
            started = clock()
            with torch.autocast(torch.device(device).type, enabled=amp):
                loss = step(Batch(images, labels, key=StepKey(step=number)))["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            times[row, number] = clock() - started
    return times[:, 1:], parameters


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_small_patch16_224")
    parser.add_argument("--teacher", default="resnet50")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--amp", action="store_true")
    options = parser.parse_args(argv)
    times, parameters = measure(
        *(options.model, options.teacher, options.batch_size, options.steps),
        *(options.device, options.amp, options.img_size),
    )
    speeds = options.batch_size / np.median(times, axis=1)
    print(f"{'method':<20}{'M parameters':>14}{'images/s':>12}{'relative':>10}{'paper':>8}")
    for (method, (_, _, paper)), count, speed in zip(METHODS.items(), parameters, speeds, strict=True):
        print(f"{method:<20}{count:14.1f}{speed:12.1f}{speed / speeds[0]:10.2f}{paper / 322:8.2f}")


if __name__ == "__main__":
    main()

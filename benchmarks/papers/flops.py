"""Parameters and multiply-adds of the segmenters and detectors in TL-Align's Tables 3 and 4.

    python benchmarks/papers/flops.py                       # every recipe segment_* and detect_*
    python benchmarks/papers/flops.py segment_swin_tiny_upernet

Counted by `torch.utils.flop_counter` on the meta device, so nothing is computed: segmenters at 512 x 2048, detectors
at 800 x 1280 with 1,000 regions for every box head and 100 for every mask head, as mmsegmentation and mmdetection do.
Their counter does not see products of two activations, nor anything inside torch's own attention module, which
mmsegmentation's ViT consists of. So 1032 G of DeiT-S are the 1,215.7 G counted here, less 154.7 of QK and AV and 29.0
of the projections; for Swin, whose attention is written out, only the small products in windows are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import everytoken  # noqa: F401  (registers the models)
from everytoken_lab.dense.detect import DetectOptions
from everytoken_lab.dense.detect.model import Detector, build_detector
from everytoken_lab.dense.segment import SegmentOptions
from everytoken_lab.dense.segment.model import build_segmenter
from everytoken_lab.engine.options import apply, read_recipe, recipe_names

SEGMENT, DETECT = (512, 2048), (800, 1280)
REGIONS, MASKS = 1000, 100
PAPER = {  # G, TL-Align
    "segment_deit_small_upernet": 1032,
    "segment_swin_tiny_upernet": 945,
    "segment_swin_small_upernet": 1038,
    "segment_swin_base_upernet": 1188,
    "detect_swin_tiny_cascade_3x": 745,
    "detect_swin_small_cascade_3x": 838,
    "detect_swin_base_cascade_3x": 982,
}


def count(recipe: str) -> tuple[float, float, float]:
    """(million parameters, G multiply-adds, of which products of two activations)"""
    if recipe.startswith("segment_"):
        options = apply(SegmentOptions(), read_recipe(recipe), recipe)
        names = tuple(map(str, range(150)))
        with torch.device("meta"):
            built, _ = build_segmenter(options, names)
            parameters = sum(p.numel() for p in built.parameters())
            model: nn.Module = build_segmenter(options, names, SEGMENT)[0].eval()
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                model(torch.empty(1, 3, *SEGMENT))
    else:
        dense = apply(DetectOptions(), read_recipe(recipe), recipe)
        with torch.device("meta"):
            detector, _ = build_detector(dense, tuple(map(str, range(80))))
            parameters = sum(p.numel() for p in detector.parameters())
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                _detect(detector.eval())
    total = counter.get_flop_counts()["Global"]
    products = sum(flops for op, flops in total.items() if "bmm" in str(op) or "attention" in str(op))
    return parameters / 1e6, sum(total.values()) / 2e9, products / 2e9


def _detect(model: Detector) -> None:
    """The parts of a detector on one image, without the choice of regions."""
    levels, _ = model.levels(torch.empty(1, 3, *DETECT))
    model.rpn.head(list(levels.values()))
    for stage in model.heads.stages:
        stage(torch.empty(REGIONS, model.options.channels, 7, 7))
        if stage.mask is not None:
            stage.mask(torch.empty(MASKS, model.options.channels, 14, 14))


def main(argv: Sequence[str] | None = None) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dense = [name for name in recipe_names() if name.startswith(("segment_", "detect_"))]
    parser.add_argument("recipes", nargs="*", default=dense)
    print(f"{'recipe':<32}{'M':>8}{'G':>10}{'products':>10}{'paper G':>10}")
    for recipe in parser.parse_args(argv).recipes:
        parameters, flops, products = count(recipe)
        print(f"{recipe:<32}{parameters:8.1f}{flops:10.1f}{products:10.1f}{PAPER.get(recipe, ''):>10}")


if __name__ == "__main__":
    main()

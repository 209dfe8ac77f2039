"""Networks on the CPU as annotation, evaluation and prediction run them, against PyTorch's eager mode.

    OMP_NUM_THREADS=1 python benchmarks/inference.py [--batch 64] [--rounds 6]

    eager       the network as it is; glibc gives the memory of every large tensor back to the system
    kept        freed memory is kept, as our commands do (`machine.keep_freed_memory`)
    ours        and ONNX Runtime (`models.onnx.faster`)
Beside it how well the answers agree: the largest difference, of the largest logit, and how many best classes are the
same. Weights and images are random. CPU time, in turns (`ratios.py`). Exit code 1 when a goal is broken.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from collections.abc import Callable

import timm
import torch
from ratios import judge, ratio, take_turns
from torch import Tensor, nn

from everytoken.models import TokenModel
from everytoken_lab.annotators.annotator import CellScores
from everytoken_lab.machine import keep_freed_memory
from everytoken_lab.models.onnx import faster


class Classes(nn.Module):
    """Class logits, as in `predict`."""

    def __init__(self, model: TokenModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K]"""
        return self.model(images).logits


def give_memory_back() -> None:
    """glibc's own state after a while: what is larger than 32 MB goes back to the system at once."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 32 * 2**20), mallopt(-1, 64 * 2**20)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD


@torch.inference_mode()
def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    held = True
    print(f"CPU ms per image, batches of {args.batch}; eager / ours\n")
    for name, side, head, goal in (
        ("tf_efficientnet_lite0", 320, CellScores, 3.0),
        ("tf_efficientnet_lite0", 224, Classes, 3.0),
        ("deit_tiny_patch16_224", 224, Classes, None),
    ):
        network = head(TokenModel(timm.create_model(name))).eval().requires_grad_(False)
        images = torch.randn(args.batch, 3, side, side)
        program = faster(network, images[:3])

        def run(prepare: Callable[[], object], forward: Callable[[Tensor], Tensor]) -> Callable[[], object]:
            return lambda: (prepare(), forward(images))  # noqa: B023

        ways = {
            "eager": run(give_memory_back, network),
            "kept": run(keep_freed_memory, network),
            "ours": run(keep_freed_memory, program),
        }
        times = take_turns(ways, args.rounds)
        expected, answer = network(images), program(images)
        apart = ((answer - expected).abs().max() / expected.abs().max()).item()
        same = (answer.argmax(-1) == expected.argmax(-1)).float().mean().item()
        ms = ", ".join(f"{way} {1e3 * statistics.median(t) / args.batch:.1f}" for way, t in times.items())
        what = f"{name}, {side} px, {'every cell' if head is CellScores else 'classes'}"
        found = ratio(times["eager"], times["ours"])
        print(f"{what}: {ms}; {found}; logits differ by {apart:.0e}, {same:.2%} of the best classes are the same")
        if goal:
            held &= judge(f"inference with {what}, against eager", found, at_least=goal)
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())

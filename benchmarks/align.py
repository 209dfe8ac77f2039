"""A training step with token-label alignment against CutMix alone, and against the paper's algorithm.

    OMP_NUM_THREADS=1 python benchmarks/align.py [--models deit_small_patch16_224 ...] [--batch 2] [--rounds 40]
    python benchmarks/align.py --kernels        only attention, forward and backward: plain, widened, asked again

    cutmix      the plain timm model on images mixed by CutMix, target mixed by area
    aligned     the same, target by everytoken.models.align
    dense       the same, as the paper describes it: attention matrices and a K-wide label for every token; fewer rounds
A step is forward, loss and backward (no optimizer, which would hide differences). Shown are medians of the rounds'
ratios to `cutmix` in CPU time with their 95 % intervals (`ratios.py`). Freed memory is kept, as our commands do.
Memory is the peak of all tensors in a step, above what was there before it (weights).
Six minutes on a quiet core. Exit code 1 when a goal is broken.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm
import torch
from ratios import Ratio, judge, ratio, take_turns
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from everytoken.functional.shares import aligned_cross_entropy
from everytoken.mixing.methods import CutMix
from everytoken.mixing.mix import Mix, apply_to_pixels
from everytoken.models.align import Aligner
from everytoken.models.align.fused import attend
from everytoken_lab.machine import keep_freed_memory

MODELS = ("deit_small_patch16_224", "swin_tiny_patch4_window7_224")
TIME, MEMORY = 1.05, 1.02  # goals


class Dense:
    """The paper's algorithm: the label of every token as K numbers, carried along by the attention matrices."""

    def __init__(self, model: nn.Module) -> None:
        self.labels: Tensor | None = None
        self.swin = hasattr(model, "layers")
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
        if self.swin:
            for stage in model.layers:
                if not isinstance(stage.downsample, nn.Identity):
                    stage.downsample.register_forward_hook(self.merge)
                for block in stage.blocks:
                    block.attn.attn_drop.register_forward_pre_hook(self.windows(block))
        else:
            for block in model.blocks:
                block.attn.attn_drop.register_forward_pre_hook(self.tokens)

    def start(self, mix: Mix, own: Tensor, partner: Tensor, grid: int) -> None:
        inside = mix.at((grid, grid)).expand(len(mix), -1, -1)[..., None]
        labels = inside * own[:, None, None] + (1 - inside) * partner[:, None, None]
        if not self.swin:
            first = mix.ratio[:, None] * own + (1 - mix.ratio[:, None]) * partner
            labels = torch.cat((first[:, None], labels.flatten(1, 2)), 1)
        self.labels = labels

    @torch.no_grad()
    def tokens(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.labels is not None:
            self.labels = (args[0].mean(1) @ self.labels + self.labels) / 2

    def windows(self, block: nn.Module) -> Callable[..., None]:
        (wh, ww), shift = block.window_size, block.shift_size

        @torch.no_grad()
        def mix(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            if self.labels is None:
                return
            y = torch.roll(self.labels, (-shift[0], -shift[1]), (1, 2))
            b, h, w, k = y.shape
            cut = y.view(b, h // wh, wh, w // ww, ww, k).transpose(2, 3).reshape(-1, wh * ww, k)
            cut = (args[0].mean(1) @ cut).view(b, h // wh, w // ww, wh, ww, k).transpose(2, 3).reshape(b, h, w, k)
            self.labels = (torch.roll(cut, shift, (1, 2)) + self.labels) / 2

        return mix

    @torch.no_grad()
    def merge(self, *_: object) -> None:
        if self.labels is not None:
            b, h, w, k = self.labels.shape
            self.labels = self.labels.view(b, h // 2, 2, w // 2, 2, k).mean((2, 4))

    def end(self) -> Tensor:
        labels, self.labels = self.labels, None
        return labels.mean((1, 2)) if self.swin else labels[:, 0]


def make_step(name: str, variant: str, batch: int, device: str) -> Callable[[], None]:
    """One training step of a variant; all variants have the same weights and batch."""
    torch.manual_seed(0)
    model = timm.create_model(name, drop_path_rate=0.1).train().to(device)
    size = model.patch_embed.img_size
    mix = CutMix().draw(batch, size, model.patch_embed.grid_size, np.random.default_rng(7), device)
    images = apply_to_pixels(torch.randn(batch, 3, *size, device=device), mix)
    labels = torch.randint(0, 1000, (batch,), device=device)
    own, partner = F.one_hot(labels, 1000).float(), F.one_hot(labels[mix.partner], 1000).float()

    def cutmix() -> Tensor:
        return aligned_cross_entropy(model(images), labels, labels[mix.partner], mix.ratio, 0.1)

    def aligned() -> Tensor:
        with aligner.watch(mix) as seen:
            logits = model(images)
        return aligned_cross_entropy(logits, labels, labels[mix.partner], seen.shares.image, 0.1)

    def with_dense() -> Tensor:
        dense.start(mix, own, partner, model.patch_embed.grid_size[0])
        logits = model(images)
        return F.cross_entropy(logits, dense.end() * 0.9 + 0.1 / 1000)

    if variant == "aligned":
        aligner = Aligner(model)
    elif variant == "dense":
        dense = Dense(model)
    loss = {"cutmix": cutmix, "aligned": aligned, "dense": with_dense}[variant]

    def step() -> None:
        torch.manual_seed(1)  # the same drop path for all
        loss().backward()
        model.zero_grad()
        if device != "cpu":
            torch.cuda.synchronize()

    return step


def peak_memory(step: Callable[[], None], device: str) -> float:
    """MB of tensors at the peak of a step, above what was there before it."""
    step()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    events = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    held = peak = 0
    for event in events:
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak / 2**20


def compare_kernels(rounds: int) -> None:
    """Attention of DeiT-S by itself: what one more column costs."""
    b, heads, n, d = 8, 6, 197, 64
    x = torch.randn(b, n, 3, heads, d, requires_grad=True)
    values = torch.rand(b, n, 1)

    def run(how: str) -> Callable[[], None]:
        def step() -> None:
            q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
            if how == "plain":
                out = F.scaled_dot_product_attention(q, k, v)
            elif how == "autograd":  # widened, and the widened backward as autograd would do it
                wide = torch.cat((v, values[:, None].expand(-1, heads, -1, -1)), -1)
                out = F.scaled_dot_product_attention(F.pad(q, (0, 1)), F.pad(k, (0, 1)), wide, scale=d**-0.5)
                out = out[..., :d]
            else:
                out, _ = attend(values, how == "again", q, k, v)
            out.transpose(1, 2).reshape(b, n, heads * d).sum().backward()
            x.grad = None

        return step

    times = take_turns({how: run(how) for how in ("plain", "widened", "again", "autograd")}, rounds)
    for how, seconds in times.items():
        print(f"{how:10s} {1e3 * statistics.median(seconds):7.1f} ms   {ratio(seconds, times['plain'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    keep_freed_memory()
    if args.kernels:
        compare_kernels(args.rounds)
        return 0
    held = True
    for name in args.models:
        steps = {variant: make_step(name, variant, args.batch, args.device) for variant in ("cutmix", "aligned")}
        memory = {variant: peak_memory(step, args.device) for variant, step in steps.items()}
        print(f"{name}, batch {args.batch}, {args.device}, {args.rounds} rounds, {torch.get_num_threads()} threads")
        times = take_turns(steps, args.rounds)
        aligned = ratio(times["aligned"], times["cutmix"])
        print(f"  cutmix   {statistics.median(times['cutmix']):.3f} CPU seconds, {memory['cutmix']:.0f} MB")
        print(f"  aligned  {aligned}, memory {memory['aligned'] / memory['cutmix']:.3f}", flush=True)
        steps["dense"] = make_step(name, "dense", args.batch, args.device)
        memory["dense"] = peak_memory(steps["dense"], args.device)
        del steps["aligned"]
        times = take_turns(steps, max(args.rounds // 5, 6))
        print(f"  dense    {ratio(times['dense'], times['cutmix'])}, memory {memory['dense'] / memory['cutmix']:.3f}")
        held &= judge(f"TL-Align in a step of {name} against CutMix alone, CPU time", aligned, at_most=TIME)
        more = memory["aligned"] / memory["cutmix"]
        held &= judge(f"the same, memory of {name}", Ratio(more, more, more), at_most=MEMORY)
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Compact targets and losses against the released dense algorithm: time and memory, as ratios.

    OMP_NUM_THREADS=1 python benchmarks/targets.py [--store PATH]

Targets: from stored records (18x18 cells, top 5) to ready targets on 14x14 tokens and for the image, K = 1000, random
resized crops. The dense side is the released algorithm written with torchvision: scatter to [B, K, h, w], RoIAlign
twice, softmax over K, smoothing. Loss: forward and backward of the token loss, targets included, against dense soft
cross entropy. Times are CPU seconds of one thread, in turns (`ratios.py`). A large part of the dense loss's time is the
system's, which gives its K-wide tensors new pages again and again; with freed memory kept, as our commands do, the
ratio is smaller, and it is shown too.
Memory is the growth of the peak resident set, each in a fresh process. Maps: `--store` reads real ones; without it,
smooth random maps with vocabularies as a strong annotator gives them (tens of classes per image) and as a weak one
does (two hundred).
Exit code 1 when a goal is broken.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from ratios import Ratio, judge, ratio, take_turns
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import roi_align

from everytoken.functional import collate_maps, compact_cross_entropy, from_scores, label_tokens
from everytoken_lab.machine import keep_freed_memory

GRID, SMOOTHING = (14, 14), 0.1
LINE = "{:<52} {:>11} {:>11}  {}".format
KINDS = {"strong": 40, "weak": 300}  # classes that compete in an image


def random_map(rng: np.random.Generator, rivals: int, K: int = 1000, cells: int = 18, k: int = 5) -> Any:
    """A smooth score map: each rival class is a bump field; the k best of each cell are kept."""
    fields = torch.from_numpy(rng.normal(0, 1, (1, rivals, 5, 5)).astype(np.float32))
    smooth = F.interpolate(fields, (cells, cells), mode="bicubic")[0].permute(1, 2, 0)
    rough = torch.from_numpy(rng.normal(0, 0.3, (cells, cells, rivals)).astype(np.float32))
    scores, place = (3 * (smooth + rough)).topk(k)
    classes = rng.choice(K, size=rivals, replace=False).astype(np.uint16)[place.numpy()]
    return SimpleNamespace(scores=scores.numpy().astype(np.float16), classes=classes, area=(0.0, 0.0, 1.0, 1.0))


def records(source: str, count: int) -> Sequence[Any]:
    """Score maps: of a kind, or of a store."""
    if source in KINDS:
        rng = np.random.default_rng(0)
        return [random_map(rng, KINDS[source]) for _ in range(count)]
    from everytoken.maps import Maps

    store = Maps(source)
    keys = list(store.keys())
    return [store[keys[i * len(keys) // count]] for i in range(count)]


def crops(count: int) -> Tensor:
    """Placements [B, 2, 3] of random resized crops, 8-100 % of the area, aspect 3/4-4/3."""
    rng = np.random.default_rng(1)
    ratio = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3), count))
    side = np.sqrt(rng.uniform(0.08, 1, count))
    size = np.minimum(np.stack([side * np.sqrt(ratio), side / np.sqrt(ratio)], axis=1), 1)
    placement = torch.zeros(count, 2, 3)
    placement[:, 0, 0], placement[:, 1, 1] = torch.from_numpy(size).float().unbind(1)
    placement[:, :, 2] = torch.from_numpy(rng.random((count, 2)) * (1 - size)).float()
    return placement


def ours(maps: Sequence[Any], placement: Tensor) -> Any:
    return label_tokens(collate_maps(maps, 1000), placement, GRID, smoothing=SMOOTHING)


def released(maps: Sequence[Any], placement: Tensor, K: int = 1000) -> Tensor:
    """[B, K, 1 + N], as the released code makes them (with its coordinates)."""
    B, (h, w, _) = len(maps), maps[0].scores.shape
    dense = torch.zeros(B, K, h, w)
    for i, record in enumerate(maps):
        raw = np.stack([record.scores.astype(np.float32), record.classes.astype(np.float32)]).transpose(0, 3, 1, 2)
        scores, classes = torch.from_numpy(raw)
        dense[i].scatter_(0, classes.long(), scores)
    size, at = placement.diagonal(dim1=1, dim2=2), placement[:, :, 2]
    boxes = torch.cat([at.flip(1), (at + size).flip(1)], dim=1) * w - 0.5
    rois = torch.cat([torch.arange(B)[:, None], boxes], dim=1)
    both = [roi_align(dense, rois, (n, n), 1.0, -1, aligned=False).flatten(2) for n in (1, GRID[0])]
    p = torch.cat(both, dim=2).softmax(1)
    return p * (1 - SMOOTHING + SMOOTHING / K) + SMOOTHING / K


def loss_inputs(K: int, B: int, U: int = 192) -> tuple[Tensor, Tensor, Tensor]:
    """Token logits [B, 14, 14, K], and sampled scores [B, 14, 14, U] with their classes [B, U]."""
    g = torch.Generator().manual_seed(0)
    classes = torch.stack([torch.randperm(K, generator=g)[:U].sort().values for _ in range(B)])
    scores = torch.randn(B, *GRID, U, generator=g) * 3 * (torch.rand(B, *GRID, U, generator=g) < 0.2)
    return torch.randn(B, *GRID, K, generator=g), scores, classes


def compact_step(x: Tensor, scores: Tensor, classes: Tensor) -> Tensor | None:
    x = x.detach().requires_grad_()
    target = from_scores(scores, classes, x.shape[-1], smoothing=SMOOTHING)
    compact_cross_entropy(x, target).backward()
    return x.grad


def dense_step(x: Tensor, scores: Tensor, classes: Tensor) -> Tensor | None:
    x = x.detach().requires_grad_()
    K = x.shape[-1]
    z = torch.zeros_like(x).scatter_(-1, classes[:, None, None].expand(scores.shape), scores)
    t = z.softmax(-1) * (1 - SMOOTHING) + SMOOTHING / K
    torch.sum(-t * x.log_softmax(-1), dim=-1).mean().backward()
    return x.grad


def compare(what: str, one: Callable[[], Any], other: Callable[[], Any], images: int, rounds: int) -> Ratio:
    """How much longer the one takes; printed with both times."""
    times = take_turns({"one": one, "other": other}, rounds)
    slow, fast = (f"{1e3 * statistics.median(seconds) / images:.3f} ms" for seconds in times.values())
    found = ratio(times["one"], times["other"])
    print(LINE(what, slow, fast, str(found)))
    return found


def peak(f: Callable[[], Any]) -> int:
    """Bytes by which the peak resident set grows while f runs (Linux)."""

    def resident(name: str) -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith(name)) * 1024

    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = resident("VmRSS")
    kept = f()
    grown = resident("VmHWM") - before
    del kept
    return grown


def measure(what: str, source: str, K: int, B: int) -> int:
    """Peak bytes of one job; runs in a process of its own."""
    torch.set_num_threads(1)
    if what in ("ours", "released"):
        maps, placement = records(source, B), crops(B)
        job = ours if what == "ours" else released
        job(records("strong", 1), crops(1))  # import and warm up
        return peak(lambda: job(maps, placement))
    step = compact_step if what == "compact" else dense_step
    step(*loss_inputs(50, 1, 8))
    inputs = loss_inputs(K, B)
    return peak(lambda: step(*inputs))


def in_fresh_process(*job: Any) -> int:
    done = subprocess.run([sys.executable, __file__, "--measure", *map(str, job)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return int(done.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", help="a store of real score maps")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        what, source, K, B = args.measure
        print(measure(what, source, int(K), int(B)))
        return 0
    torch.set_num_threads(1)
    goals: list[tuple[str, Ratio, float]] = []
    print(LINE("per image", "released", "everytoken", "ratio"))
    for source in [args.store] if args.store else KINDS:
        maps, placement = records(source, args.batch), crops(args.batch)
        U = np.mean([len(np.unique(m.classes)) for m in maps])
        name = f"{source if source in KINDS else 'store'} maps, {U:.0f} classes/image"
        jobs = (lambda: released(maps, placement)), (lambda: ours(maps, placement))  # noqa: B023
        found = compare(f"targets, time: {name}", *jobs, args.batch, args.rounds)
        goals.append((f"targets against the released algorithm, time, {name}", found, 10))
        slow, fast = (in_fresh_process(what, source, 1000, args.batch) for what in ("released", "ours"))
        kb = [f"{b / args.batch / 1e3:.0f} KB" for b in (slow, fast)]
        print(LINE(f"targets, peak memory: {name}", *kb, f"{slow / fast:.3g}"))
        goals.append((f"the same, peak memory, {name}", Ratio(slow / fast, slow / fast, slow / fast), 10))
    print()
    print(LINE("token loss, forward + backward, per image", "dense", "compact", "ratio"))
    for kept in (False, True):
        if kept and not keep_freed_memory():
            continue
        for K, B, wanted in ((1000, 16, 2.5), (21841, 2, 3)):
            inputs = loss_inputs(K, B)
            jobs = (lambda: dense_step(*inputs)), (lambda: compact_step(*inputs))  # noqa: B023
            found = compare(f"time, K = {K:,}{', memory kept' if kept else ''}", *jobs, B, 2 * args.rounds)
            if not kept:
                goals.append((f"loss, K = {K:,}, forward + backward against dense", found, wanted))
    for K in (1000, 5000, 21841):
        B = 4
        gradient = B * GRID[0] * GRID[1] * K * 4
        slow, fast = (in_fresh_process(what, "-", K, B) - gradient for what in ("dense", "compact"))
        mb = [f"{b / 1e6:.1f} MB" for b in (slow, fast)]
        print(LINE(f"peak beyond logits and gradient, K = {K:,}", *mb, ""))
    print()
    held = [judge(what, found, at_least=wanted) for what, found, wanted in goals]
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""Kill it, damage its files, fill its disk, lie to it; then count what was lost.

    python benchmarks/faults.py [--share 1.0] [--only attacks,kills] [--json out.json]

Prints a table: tried, held, lost (a wrong result, silently; or different weights), tracebacks (of any kind, where a
sentence should be), hangs, let in (code that a file names, a connection, a followed link, a secret or a terminal's
escape that is shown). The last four columns must be zero, and the exit code says so. With a share of 1: fourteen
classes of attack with some 40 tries or more in each, 60 kills, 370 flips, 1,500 images, 1,000 texts, full and read-only
disks, tiny shared memory; within 30 minutes on two free cores.

Commands run in forked processes, so that torch is imported once. Disks are small tmpfs mounts in a mount namespace of
its own, which nobody else sees; where mounting is not allowed, a limit on file sizes stands in, and what then cannot be
tried is listed. `attacks.py` has the classes of attack, `fuzz.py` damage that is
tried without the command line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import attacks
import fuzz
import numpy as np
import timm  # noqa: F401  (imported once, for all forked processes)
import torch
import torchvision  # noqa: F401
from fuzz import Tally, make_photos, photo
from PIL import Image

import everytoken_lab
from everytoken.maps.format import list_shards
from everytoken_lab import cli
from everytoken_lab.data.loader import _close_all

LONGEST = 300.0  # seconds after which a process counts as hanging
NOBODY = 65534


class Job:
    """A command in a forked process group of its own.

    Args:
        words: of the command.
        log: where its output goes.
        prepare: called in the new process: limits, mounts, another user.
    """

    def __init__(self, words: Sequence[str], log: Path, prepare: Callable[[], None] | None = None) -> None:
        self.words, self.log = list(words), log
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(prepare)

    def _run(self, prepare: Callable[[], None] | None) -> None:
        code = 70
        try:
            os.setsid()
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
            if prepare is not None:
                prepare()
            code = (
                _annotate_in_small_shards(self.words[1:]) if self.words[0] == "small-shards" else cli.main(self.words)
            )
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                _close_all()  # as at the exit of a process that was not forked
            os._exit(code)

    def wait(self, seconds: float = LONGEST) -> int | None:
        """The exit code, or None if it is still running after so many seconds."""
        until = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > until:
                return None
            time.sleep(0.02)

    def kill(self) -> None:
        """The whole group, as the power would."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


def _annotate_in_small_shards(words: Sequence[str]) -> int:
    """`annotate` with four images per shard, which the command line does not offer."""
    data, out, weights, workers = words
    more = {"shard_size": 4, "batch_size": 4, "img_size": 128, "device": "cpu", "workers": int(workers)}
    everytoken_lab.annotate(data, out, "timm:vit_tiny_patch16_224", weights=weights, **more)
    return 0


# -- kills -------------------------------------------------------------------------------------------------------------

TINY = [
    *("--model", "vit_tiny_patch16_224", "--img-size", "32", "--batch-size", "12", "--warmup-epochs", "1"),
    *("--lr", "0.001", "--checkpoint-steps", "2", "--threads", "1", "--device", "cpu", "--log-interval", "1"),
    *("--set", "model_kwargs={patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}", "--drop-path", "0.2"),
    *("--set", "mixing.mixtoken={}", "--set", "objectives.drloc={}", "--set", "objectives.hard={}", "--model-ema"),
]
SEGMENT = [
    *("--model", "vit_tiny_patch16_224", "--channels", "16", "--pyramid-channels", "16", "--aux-channels", "8"),
    *("--set", "model_kwargs={patch_size: 8, embed_dim: 32, depth: 4, num_heads: 2}", "--crop-size", "32"),
    *("--batch-size", "4", "--threads", "1", "--device", "cpu", "--drop-path", "0.1", "--iters", "24"),
    *("--val-iters", "12", "--warmup-iters", "2", "--checkpoint-steps", "3"),
]
DETECT = [
    *("--model", "resnet10t", "--set", "model_kwargs={stem_width: 8, channels: [8, 12, 16, 24]}", "--drop-path", "0"),
    *("--channels", "8", "--hidden", "16", "--regions", "8", "--proposals", "20", "--anchor-scale", "4"),
    *("--sizes", "48", "--longest", "64", "--detector", "mask", "--max-detections", "3"),
    *("--threads", "1", "--device", "cpu", "--lr", "0.003", "--iters", "16", "--val-iters", "8", "-b", "2"),
    *("--warmup-iters", "2", "--checkpoint-steps", "2"),
]


def make_shapes(root: Path) -> Path:
    """Images with masks, and the same in COCO's format."""
    for split, count in (("train", 8), ("val", 3)):
        for folder in ("images", "masks"):
            (root / "masks" / folder / split).mkdir(parents=True, exist_ok=True)
        (root / "objects" / split / "images").mkdir(parents=True, exist_ok=True)
        images, annotations = [], []
        for i in range(count):
            picture = photo((48, 40), i)
            mask = np.zeros((40, 48), np.uint8)
            mask[12:28, 16:32] = 1 + i % 2
            picture.save(root / "masks" / "images" / split / f"{i}.png")
            Image.fromarray(mask).save(root / "masks" / "masks" / split / f"{i}.png")
            picture.save(root / "objects" / split / "images" / f"{i}.png")
            images.append({"id": i, "file_name": f"{i}.png", "width": 48, "height": 40})
            shape = {"bbox": [16, 12, 16, 16], "area": 256, "iscrowd": 0}
            corners = [[16, 12, 32, 12, 32, 28, 16, 28]]
            annotations.append({"id": i + 1, "image_id": i, "category_id": 1 + i % 2, "segmentation": corners, **shape})
        categories = [{"id": 1, "name": "disc"}, {"id": 2, "name": "square"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "objects" / split / "instances.json").write_text(json.dumps(content))
    (root / "masks" / "classes.txt").write_text("ground\ndisc\nsquare\n")
    return root


def store_state(folder: Path) -> bytes:
    """Every file of a store but the locks."""
    parts = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
        parts.append(path.relative_to(folder).as_posix().encode() + b"\n" + path.read_bytes())
    return b"".join(parts)


def leftovers(folder: Path) -> list[str]:
    """What killed writers left behind. (Lock files stay, empty, after every run.)"""
    return [p.name for p in folder.rglob(".*") if p.name.startswith((".tmp", ".writing"))]


class Killing:
    """Kill a command again and again at random moments, then let it end, and compare with an undisturbed run."""

    def __init__(self, name: str, words: Callable[[Path, int], list[str]], state: Callable[[Path], bytes]) -> None:
        self.name, self.words, self.state = name, words, state

    def run(self, kills: int, work: Path, rng: random.Random) -> Tally:
        """So many kills, over as many runs as that takes."""
        tally = Tally(f"kills: {self.name}")
        whole, length = work / f"{self.name}-whole", time.monotonic()
        job = Job(self.words(whole, 0), work / "log.txt")
        if job.wait() != 0:
            raise SystemExit(f"the undisturbed run of {self.name} failed:\n{job.text[-2000:]}")
        length = time.monotonic() - length
        reference = self.state(whole)
        done = number = 0
        while done < kills:
            number += 1
            cut, hits = work / f"{self.name}-cut-{number}", 0
            while True:
                job = Job(self.words(cut, rng.randrange(3)), work / f"log-{done}.txt")
                wait = rng.uniform(0.02, 0.6) * length if done < kills else LONGEST
                code = job.wait(wait)
                if code is None:
                    job.kill()
                    done, hits = done + 1, hits + 1
                    if done > kills:  # it hangs
                        tally.lost, tally.tried = tally.lost + hits, tally.tried + hits
                        tally.notes.append(f"{self.name} hangs after {hits} kills: {job.text[-300:]}")
                        return tally
                    continue
                break
            tally.tried += hits
            if "Traceback" in job.text:
                tally.tracebacks += hits
                tally.notes.append(f"{self.name}: {job.text[-600:]}")
            elif code != 0 or self.state(cut) != reference or leftovers(cut):
                tally.lost += hits
                what = f"code {code}" if code else "another result" if not leftovers(cut) else f"left {leftovers(cut)}"
                tally.notes.append(f"{self.name} after {hits} kills: {what}: {job.text[-300:]}")
            else:
                tally.held += hits
            shutil.rmtree(cut)
        return tally


def kills(work: Path, share: float, rng: random.Random, only: str = "") -> Iterator[Tally]:
    """60 of them, or those of one command."""
    photos, shapes = make_photos(work / "photos"), make_shapes(work / "shapes")
    teacher = work / "teacher"
    job = Job(["train", str(photos), *TINY, "--epochs", "1", "--workers", "0", "--out", str(teacher)], work / "log.txt")
    if job.wait() != 0:
        raise SystemExit(job.text)

    def train(out: Path, workers: int) -> list[str]:
        return ["train", str(photos), *TINY, "--epochs", "4", "--workers", str(workers), "--out", str(out)]

    def annotate(out: Path, workers: int) -> list[str]:
        return ["small-shards", str(photos), str(out), str(teacher), str(workers)]

    def fit(out: Path, workers: int) -> list[str]:
        words = ["--annotator", "fit", "--fit-model", str(teacher)]
        return ["annotate", str(photos), "--out", str(out), *words, "--workers", str(workers), "--device", "cpu"]

    def segment(out: Path, workers: int) -> list[str]:
        place = ["--workers", str(workers), "--out", str(out)]
        return ["segment", "train", str(shapes / "masks"), *SEGMENT, *place]

    def detect(out: Path, workers: int) -> list[str]:
        place = ["--workers", str(workers), "--out", str(out)]
        return ["detect", "train", str(shapes / "objects"), *DETECT, *place]

    for name, words, state, count in (
        ("train", train, fuzz.end_state, 22),
        ("annotate", annotate, store_state, 12),
        ("fit", fit, store_state, 8),
        ("segment", segment, fuzz.end_state, 8),
        ("detect", detect, fuzz.end_state, 5),
    ):
        if only in ("", name):
            yield Killing(name, words, state).run(max(1, round(count * share)), work, rng)
    if only in ("", "ranks"):
        yield kill_ranks(max(1, round(5 * share)), photos, work, rng)


def kill_ranks(count: int, photos: Path, work: Path, rng: random.Random) -> Tally:
    """Two processes as torchrun starts them, of which one is killed; once both have met, the other ends by itself."""
    tally = Tally("kills: one rank of two")
    words = ["train", str(photos), *TINY, "--epochs", "3", "--workers", "0"]

    def start(out: Path) -> list[Job]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]

        def rank(number: int) -> Callable[[], None]:
            def prepare() -> None:
                os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}

            return prepare

        return [Job([*words, "--out", str(out)], work / f"rank-{n}.txt", rank(n)) for n in range(2)]

    began = time.monotonic()
    codes = [job.wait() for job in start(work / "ranks-whole")]
    length = time.monotonic() - began
    assert codes == [0, 0], (work / "rank-0.txt").read_text()
    reference, cut = fuzz.end_state(work / "ranks-whole"), work / "ranks-cut"
    for _ in range(count):
        log = cut / "log.txt"
        size = log.stat().st_size if log.exists() else 0
        jobs = start(cut)
        victim, other = rng.sample(jobs, 2)
        if victim.wait(rng.uniform(0.1, 0.8) * length) is not None:  # at its end already
            other.wait()
            continue
        joined = log.exists() and log.stat().st_size > size
        victim.kill()
        tally.tried += 1
        code = other.wait(60 if joined else 5)
        if code is None and not joined:  # it waits for a process that never came, until torchrun ends it
            os.kill(other.pid, signal.SIGTERM)
            code = other.wait(60)
        if code is None:
            other.kill()
            tally.lost += 1
            tally.notes.append("the other rank waits for ever")
        elif "Traceback" in other.text:
            tally.tracebacks += 1
            tally.notes.append(other.text[-600:])
        else:
            tally.held += 1
    codes = [job.wait() for job in start(cut)]
    if codes != [0, 0] or fuzz.end_state(cut) != reference:
        tally.lost, tally.held = tally.lost + tally.held, 0
        tally.notes.append(f"codes {codes}, or other weights: {(work / 'rank-0.txt').read_text()[-300:]}")
    return tally


# -- disks -------------------------------------------------------------------------------------------------------------


def own_mounts() -> bool:
    """A mount namespace of our own; False where that is not allowed."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS
            return False
        return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0
    except (OSError, AttributeError):
        return False


def mount(path: Path, size: str, *options: str) -> bool:
    """A tmpfs of a size, new or remounted."""
    path.mkdir(parents=True, exist_ok=True)
    words = ",".join((f"size={size}", *options))
    return subprocess.run(["mount", "-t", "tmpfs", "-o", words, "none", str(path)], capture_output=True).returncode == 0


def in_words(tally: Tally, what: str, job: Job, *, seconds: float = LONGEST, has: str = "") -> int | None:
    """Count a command that must end with a sentence (or well); returns its code."""
    code = job.wait(seconds)
    tally.tried += 1
    if code is None:
        job.kill()
        tally.lost += 1
        tally.notes.append(f"{what}: hangs: {job.text[-300:]}")
    elif "Traceback" in job.text or code not in (0, 1, 2):
        tally.tracebacks += 1
        tally.notes.append(f"{what}: code {code}: {job.text[-900:]}")
    elif code and has not in job.text:
        tally.lost += 1
        tally.notes.append(f"{what}: {has!r} is not in: {job.text[-300:]}")
    else:
        tally.held += 1
    return code


def disks(work: Path, mounts: bool) -> Iterator[Tally]:
    """Full, read-only and forbidden disks; when there is room again, the same command ends with the same weights."""
    photos, disk = make_photos(work / "photos"), work / "disk"
    plain = ["train", str(photos), *TINY, "--epochs", "2", "--workers", "0", "--out"]
    assert Job([*plain, str(work / "whole")], work / "log.txt").wait() == 0, (work / "log.txt").read_text()
    reference = fuzz.end_state(work / "whole")
    run, maps = str(work / "whole"), fuzz.make_maps(work / "maps", photos)
    tally = Tally("full disk" if mounts else "full disk (as a limit on file sizes)")
    for size in (4, 40, 160, 400, 600, 900):

        def little(size: int = size) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size * 1024, size * 1024))

        out = disk / "run" if mounts else work / f"limited-{size}"
        if mounts:
            mount(disk, f"{size}k")
        job = Job([*plain, str(out)], work / "log.txt", None if mounts else little)
        in_words(tally, f"train with {size} kB", job, has="space")
        if mounts:
            subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
        again = Job([*plain, str(out)], work / "log.txt")
        if again.wait() != 0 or fuzz.end_state(out) != reference:
            tally.lost, tally.held = tally.lost + 1, tally.held - 1
            tally.notes.append(f"after {size} kB it ends otherwise: {again.text[-300:]}")
        if mounts:
            subprocess.run(["umount", str(disk)], check=True)
    commands: dict[str, list[str]] = {
        "train": [*plain, str(disk / "new")],
        "predict": ["predict", run, str(photos / "val"), "--out", str(disk / "p.csv"), "-j", "0", "--device", "cpu"],
        "maps sheet": ["maps", "sheet", str(maps), "--out", str(disk / "sheet.png")],
        "annotate": [
            *("annotate", str(photos), "--out", str(disk / "maps"), "--annotator", "fit", "--fit-model", run),
            *("--workers", "0", "--device", "cpu"),
        ],
        "report": ["report", run, "--out", str(disk / "page.html"), "--samples", "0"],
        "eval": ["eval", run, str(photos), "--out", str(disk / "result"), "-j", "0", "--device", "cpu"],
    }
    if mounts:
        for name, words in commands.items():
            mount(disk, "8k")
            (disk / "filler").write_bytes(bytes(4096))
            in_words(tally, f"{name} on a full disk", Job(words, work / "log.txt"), has="space")
            subprocess.run(["umount", str(disk)], check=True)
    yield tally
    tally = Tally("read-only and forbidden")
    if mounts:
        for name, words in commands.items():
            mount(disk, "8k", "ro")
            in_words(tally, f"{name} on a read-only disk", Job(words, work / "log.txt"))
            subprocess.run(["umount", str(disk)], check=True)
    if os.getuid() == 0:
        _forbidden(tally, work, photos, commands, disk)
    yield tally


def _forbidden(tally: Tally, work: Path, photos: Path, commands: dict[str, list[str]], disk: Path) -> None:
    """As another user, who may not read or write."""

    def nobody() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    for path in (work.parent, work):
        path.chmod(0o755)
    disk.mkdir(exist_ok=True)
    disk.chmod(0o700)
    for name, words in commands.items():
        in_words(tally, f"{name} in a forbidden folder", Job(words, work / "log.txt", nobody))
    secret = make_photos(work / "secret")
    train = ["train", str(secret), *TINY, "--epochs", "1", "--workers", "0", "--out", "/nowhere/run"]
    for what, path in (
        ("class folder", secret / "train" / "class-0"),
        ("image", secret / "train" / "class-1" / "0.png"),
    ):
        mode = path.stat().st_mode
        path.chmod(0)
        in_words(tally, f"train with a forbidden {what}", Job(train, work / "log.txt", nobody))
        in_words(tally, f"doctor with a forbidden {what}", Job(["doctor", str(secret)], work / "log.txt", nobody))
        path.chmod(mode)
    for name in ("config.yaml", "best.safetensors"):
        path = work / "whole" / name
        mode = path.stat().st_mode
        path.chmod(0)
        words = ["eval", str(work / "whole"), str(photos), "-j", "0", "--device", "cpu"]
        in_words(tally, f"eval with a forbidden {name}", Job(words, work / "log.txt", nobody))
        path.chmod(mode)
    for path in list_shards(work / "maps")[:1]:
        path.chmod(0)
        in_words(
            tally,
            f"maps verify with a forbidden {path.name}",
            Job(["maps", "verify", str(work / "maps")], work / "log.txt", nobody),
        )
        path.chmod(0o644)


def scarce(work: Path, mounts: bool) -> Iterator[Tally]:
    """Tiny shared memory, few file handles, little memory, workers that die."""
    photos = make_photos(work / "photos")
    train = ["train", str(photos), *TINY, "--epochs", "2", "--out"]
    tally = Tally("tiny shared memory")
    if mounts:
        teacher = str(work / "teacher")
        assert Job([*train, teacher, "--workers", "0"], work / "log.txt").wait() == 0, (work / "log.txt").read_text()
        for number, size in enumerate(("64k", "200k", "64m")):

            def tiny(size: str = size) -> None:
                own_mounts()
                mount(Path("/dev/shm"), size)

            words = [*train, str(work / f"shm-{number}"), "--workers", "2", "--img-size", "64"]
            in_words(tally, f"train with {size} of shared memory", Job(words, work / "log.txt", tiny), has="shm-size")
            words = ["annotate", str(photos), "--out", str(work / f"shm-maps-{number}"), "--annotator", "fit"]
            words += ["--fit-model", teacher, "--workers", "2", "--device", "cpu"]
            in_words(
                tally, f"annotate with {size} of shared memory", Job(words, work / "log.txt", tiny), has="shm-size"
            )
    yield tally
    tally = Tally("killed workers, few handles")
    for number, how in enumerate((signal.SIGKILL, signal.SIGSEGV, signal.SIGKILL)):
        job = Job([*train, str(work / f"worker-{number}"), "--workers", "2", "--epochs", "40"], work / "log.txt")
        until = time.monotonic() + 120
        while len(_children(job.pid)) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.2 * number)
        for worker in _children(job.pid)[:1]:
            os.kill(worker, how)
        in_words(tally, f"a worker ended by {how.name}", job, has="process that loads images")
    for files in (20, 32, 64):

        def few(files: int = files) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        words = [*train, str(work / f"handles-{files}"), "--workers", "2"]
        in_words(tally, f"train with {files} file handles", Job(words, work / "log.txt", few))
    yield tally


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


# -- everything --------------------------------------------------------------------------------------------------------


def in_a_child(make: Callable[[], Iterator[Tally]]) -> Iterator[Tally]:
    """Tallies from a forked process: after its first backward pass torch cannot be forked again."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            try:
                torch.set_num_threads(1)
                for tally in make():
                    pickle.dump(tally, pipe)
                    pipe.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        while True:
            try:
                yield pickle.load(pipe)
            except EOFError:
                break
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("a process that attacks ended by itself")


def crafted(work: Path, share: float, seed: int, only: str) -> Iterator[Tally]:
    """The classes of `attacks`, each in a process of its own."""

    def make() -> Iterator[Tally]:
        attacks.World.make(work)
        return iter(())

    yield from in_a_child(make)
    for name in attacks.CLASSES:
        if any(word in name for word in only.split("+")):
            yield from in_a_child(partial(attacks.attack, work, name, share, seed))


COUNTS = ("tried", "held", "lost", "tracebacks", "hangs", "let_in")


def main() -> int:
    """Try everything, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of all trials")
    parser.add_argument(
        "--only",
        default="attacks,fuzz,kills,disks,scarce",
        help="parts; kills:detect is one command, attacks:tar+ONNX the classes with these words",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="", help="also write the table here")
    options = parser.parse_args()
    parts, rng, tallies, skipped = options.only.split(","), random.Random(options.seed), [], []
    mounts = own_mounts()
    if not mounts:
        skipped.append("tiny shared memory, read-only disks (mounting is not allowed here)")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        works = {name: Path(root) / name for name in ("attacks", "fuzz", "kills", "disks", "scarce")}
        for work in works.values():
            work.mkdir()
        makers: dict[str, Callable[[], Iterator[Tally]]] = {
            "kills": lambda: kills(works["kills"], options.share, rng, only),
            "disks": lambda: disks(works["disks"], mounts),
            "scarce": lambda: scarce(works["scarce"], mounts),
            "attacks": lambda: crafted(works["attacks"], options.share, options.seed, only),
            "fuzz": lambda: in_a_child(partial(fuzz.attacks, works["fuzz"], options.share, options.seed, only)),
        }
        print(f"{'':28}" + "".join(f"{name.replace('_', ' '):>11}" for name in COUNTS))
        for part in parts:
            name, _, only = part.partition(":")
            for tally in makers[name]():
                tallies.append(tally)
                print(row(tally), flush=True)
                for note in tally.notes[:8]:
                    print("    " + note.replace("\n", "\n    "), flush=True)
    total = Tally("all", *(sum(getattr(tally, name) for tally in tallies) for name in COUNTS))
    print(row(total), f"\n{(time.monotonic() - began) / 60:.1f} minutes")
    for text in skipped:
        print(f"not tried: {text}")
    if options.json:
        content: list[dict[str, Any]] = [asdict(tally) for tally in (*tallies, total)]
        Path(options.json).write_text(json.dumps(content, indent=1))
    return 1 if total.bad else 0


def row(tally: Tally) -> str:
    """A line of the table."""
    return f"{tally.name:28}" + "".join(f"{getattr(tally, name):11,}" for name in COUNTS)


if __name__ == "__main__":
    sys.exit(main())

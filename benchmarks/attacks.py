"""What an enemy can put into files, folders and servers: fourteen classes of attack, each through the real command.

A trial calls `command`, which is `everytoken` in this process, or a process of its own where one is killed. It ends
well with a result or a sentence; anything else is counted as lost, a traceback, a hang or let in, see `fuzz.Tally`.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
import yaml
from fuzz import LetIn, Tally, Trial, flipped, make_maps, make_photos
from safetensors.torch import load_file

from everytoken.models.weights import encode_weights
from everytoken_lab import cli

SECRET = "S3CR3T"
TINY = [
    *("--model", "vit_nano_patch4_32", "--img-size", "32", "--epochs", "1", "--batch-size", "12", "--threads", "1"),
    *("--device", "cpu", "--warmup-epochs", "0", "--aa", ""),
]
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
_ENVIRONMENT = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def command(*words: str, codes: tuple[int, ...] = (0, 1, 2), environment: dict[str, str] | None = None) -> str:
    """What a command prints: a sentence if it fails, neither secrets nor signs that steer a terminal."""
    out, before = io.StringIO(), dict(os.environ)
    os.environ |= environment or {}
    try:
        with redirect_stdout(out), redirect_stderr(out):
            try:
                code = cli.main(list(words))
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
    finally:
        os.environ.clear()
        os.environ.update(before)
    text = out.getvalue()
    check_text(text)
    if code not in codes:
        raise AssertionError(f"exit code {code}: {text[-300:]}")
    return text


def check_text(text: str) -> None:
    """Raise if it shows what it should not."""
    if found := _STEERING.search(text):
        raise LetIn(f"{found[0]!r} in {text[max(0, found.start() - 60) : found.end() + 60]!r}")
    if SECRET in text:
        raise LetIn(f"the secret is in {text[-300:]}")
    if "Traceback" in text:
        raise RuntimeError(text[-600:])


@dataclass
class World:
    """What is attacked: photos, a run on them, its score maps, and a folder for everything else."""

    work: Path
    photos: Path
    run: Path
    maps: Path
    number: int = 0

    @classmethod
    def make(cls, work: Path) -> World:
        """Once; the process that calls it has trained, so that what it forks cannot."""
        photos = make_photos(work / "photos", train=8, val=4)
        make_maps(work / "maps", photos)
        command("train", str(photos), *TINY, "--workers", "0", "--out", str(work / "run"), codes=(0,))
        return cls.of(work, "first")

    @classmethod
    def of(cls, work: Path, name: str) -> World:
        """What `make` made in `work`, and a folder of a class's own."""
        own = work / re.sub(r"\W+", "-", name)
        own.mkdir(exist_ok=True)
        return cls(own, work / "photos", work / "run", work / "maps")

    def new(self, name: str = "new") -> Path:
        self.number += 1
        return self.work / f"{name}-{self.number}"

    def foreign(self, **config: Any) -> Path:
        """A copy of the run, whose config.yaml says something else."""
        copy = self.new("foreign")
        shutil.copytree(self.run, copy)
        if config:
            values = yaml.safe_load((copy / "config.yaml").read_text()) | config
            (copy / "config.yaml").write_text(yaml.safe_dump(values))
        return copy

    @property
    def image(self) -> str:
        return str(self.photos / "val" / "class-0" / "0.png")

    def commands(self, run: Path | str, photos: Path | None = None) -> dict[str, list[str]]:
        """Commands that read a run, and images."""
        data, out = str(photos or self.photos), self.new("out")
        image = self.image if photos is None else str(photos / "val")
        return {
            "predict": ["predict", str(run), image, "-j", "0", "--device", "cpu"],
            "doctor": ["doctor", data, "--out", str(out)],
            "eval": ["eval", str(run), data, "-j", "0", "--device", "cpu"],
            "report": ["report", str(run), "--out", f"{out}.html", "--samples", "0"],
            "export": ["export", str(run), "--to", "timm", "--out", str(out)],
            "explain": ["explain", str(run), self.image, "--out", str(out)],
            "train": ["train", data, "--weights", str(run), *TINY[4:], "--workers", "0", "--out", str(out)],
            "robust": ["robust", str(run), "--suite", f"val={data}", "--workers", "0", "--out", str(out)],
        }


class Listener:
    """A server that answers nothing and counts who came."""

    def __init__(self) -> None:
        self.heard = 0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            connection, _ = self.server.accept()
            self.heard += 1
            connection.close()

    def quiet(self, *words: str, **more: Any) -> bool:
        """Whether a command connects to nobody, neither here nor through a proxy."""
        before, proxy = self.heard, f"http://{self.address}"
        names = [f"{kind}_proxy" for kind in ("http", "https", "all")]
        command(*words, environment={n: proxy for name in names for n in (name, name.upper())}, **more)
        if self.heard > before:
            raise LetIn("a connection was opened")
        return True


# -- what gets in or out -----------------------------------------------------------------------------------------------


def telemetry(world: World) -> Iterator[Trial]:
    """1: no connection is opened that nobody asked for, and no id of the machine is written."""
    listener, home = Listener(), world.new("home")
    os.environ |= {"XDG_CACHE_HOME": str(home), "XDG_CONFIG_HOME": str(home)}

    def call(words: list[str]) -> bool:
        listener.quiet(*words)
        if found := [path.name for path in home.rglob("*") if "device" in path.name.lower()]:
            raise LetIn(f"{found} was written")
        return True

    for i in range(5):
        for name, words in world.commands(world.run).items():
            yield f"{name} behind a proxy that listens ({i})", partial(call, words)
    yield "export to ONNX", partial(call, ["export", str(world.run), "--to", "onnx", "--out", str(world.new())])


def code(world: World) -> Iterator[Trial]:
    """2: a file that names code does not run it."""
    folder, mark = world.new("lib"), world.work / "code-ran"
    folder.mkdir()
    text = f"from pathlib import Path\nPath({str(mark)!r}).touch()\nclass A:\n    def forward(self): pass\n"
    (folder / "planted_module.py").write_text(text)
    sys.path.insert(0, str(folder))

    def call(words: list[str]) -> bool:
        command(*words)
        if mark.exists():
            mark.unlink()
            raise LetIn("code ran")
        return True

    for name in (
        "planted_module:A",
        "planted_module:B",
        "planted_module.A:A",
        "planted_module:A.B",
        " planted_module:A",
    ):
        run = world.foreign(objectives={"hard": {}, name: {}})
        for which, words in world.commands(run).items():
            yield f"{which} of a run with {name!r}", partial(call, words)
        for key in ("objectives", "mixing", "model_kwargs"):
            recipe = world.new("recipe").with_suffix(".yaml")
            recipe.write_text(yaml.safe_dump({key: {name: {}}, "trust_code": True}))
            words = ["train", str(world.photos), *TINY, "--recipe", str(recipe), "--out", str(world.new())]
            yield f"a recipe with {key} {name!r}", partial(call, words)


def links(world: World) -> Iterator[Trial]:
    """3: what a command writes replaces links, and never what they lead to."""
    victim = world.work / "victim"
    words = {
        name: words for name, words in world.commands(world.run).items() if name not in ("eval", "doctor", "robust")
    }
    words["predict"] = ["predict", str(world.run), str(world.photos / "val"), "--out", "OUT/a.csv", "--pictures", "OUT"]
    words["eval"] = ["eval", str(world.run), str(world.photos), "-j", "0", "--out", "OUT/numbers"]
    words["report"] = ["report", str(world.run), "--out", "OUT/report.html", "--samples", "0"]
    words["sheet"] = ["maps", "sheet", str(world.maps), "--count", "2", "--out", "OUT/sheet.png"]

    def fill(name: str, folder: Path) -> list[str]:
        given = [*words[name][:-1], str(folder)] if "OUT" not in " ".join(words[name]) else words[name]
        return [word.replace("OUT", str(folder)) for word in given]

    def call(name: str, planted: str, folder: bool) -> bool:
        out, elsewhere = world.new("linked"), world.new("elsewhere")
        (out / planted).parent.mkdir(parents=True)
        victim.write_text("mine")
        elsewhere.mkdir()
        (out / planted).symlink_to(elsewhere if folder else victim)
        command(*fill(name, out))
        if victim.read_text() != "mine" or list(elsewhere.iterdir()):
            raise LetIn("a link was followed")
        return True

    for name in words:
        clean = world.new("clean")
        clean.mkdir()
        command(*fill(name, clean))
        for path in sorted(clean.rglob("*")):
            yield f"{path.name} of {name} as a link", partial(call, name, str(path.relative_to(clean)), path.is_dir())


def addresses(world: World) -> Iterator[Trial]:
    """4: no address is opened because a run names it."""
    listener = Listener()
    for kind in (
        "http://{}/x.tar",
        "HTTP://me@{}/x.tar?a=b",
        "https://{}/x.zip",
        "ftp://{}/x.tar",
        "s3://{}/x",
        "sftp://{}/x.tar",
        "gs://{}/{{0..3}}.tar",
    ):
        run = world.foreign(data=kind.format(listener.address))
        own = {**world.commands(run), "own eval": ["eval", str(run), "-j", "0"]}
        for name in ("predict", "report", "export", "explain", "own eval", "train"):
            yield f"{name} of a run on {kind}", partial(listener.quiet, *own[name])


def secrets(world: World) -> Iterator[Trial]:
    """5: passwords and signatures of addresses reach no page, no message and no log."""
    forms = (
        f"memory://me:{SECRET}@host/train.tar",
        f"https://me:{SECRET}@127.0.0.1:1/train.tar",
        f"https://127.0.0.1:1/train.tar?X-Amz-Signature={SECRET}",
        f"https://127.0.0.1:1/a/train-{{0..2}}.tar?sig=1&token={SECRET}#x",
        f"s3://key:{SECRET}@bucket/train.tar",
        f"HTTPS://{SECRET}:@127.0.0.1:1/x.zip?{SECRET}",
    )

    def call(words: list[str]) -> bool:
        command(*words)
        for word in words[1:]:
            place = Path(word)
            for path in [place, *place.rglob("*")] if place.name.startswith("out-") else []:
                if path.is_file() and path.suffix in (".md", ".html", ".csv", ".txt", ".json"):
                    check_text(path.read_text(errors="replace"))
        return True

    for form in forms:
        run = world.foreign(data=form)
        (run / "environment.json").write_text(json.dumps([{"command": ["train", form], "folder": form}]))
        named = world.commands(run)
        for name in ("predict", "report", "export", "explain"):
            yield f"{name} of a run on {form}", partial(call, named[name])
        yield f"eval of a run on {form}", partial(call, ["eval", str(run), "-j", "0"])
        yield f"eval on {form}", partial(call, ["eval", str(world.run), form, "-j", "0"])
        yield f"doctor on {form}", partial(call, ["doctor", form])


_NAMES = (
    ("\x1b]0;owned\x07", "\x1b[2J\x1b[31mred", "\x9b31m"),
    ("a\rb", "a\nb: 100 %", "\u202eevil"),
    ("caf\udce9", "\x7f\x08", "[red]"),
)


def escapes(world: World) -> Iterator[Trial]:
    """6: names of classes and files do not steer the terminal."""
    for names in _NAMES:
        photos, run = world.new("photos"), world.new("named")
        for (number, name), split in product(enumerate(names), ("train", "val")):
            shutil.copytree(world.photos / split / f"class-{number}", photos / split / name)
            (photos / split / name / "0.png").rename(photos / split / name / f"{name}.png")
        command("train", str(photos), *TINY, "--workers", "0", "--out", str(run), codes=(0,))
        more = world.commands(run, photos)
        more["json"] = [*more["predict"], "--json"]
        for name in names:
            more[f"no file {name!r}"] = ["predict", str(run), str(photos / f"{name}.jpg")]
            damaged = world.new("damaged") / f"{name}.jpg"
            damaged.parent.mkdir()
            damaged.write_bytes(b"no image")
            more[f"damaged {name!r}"] = ["predict", str(run), str(damaged)]
        for which, words in more.items():
            yield f"{which} on {names}", lambda words=words: bool(command(*words)) or True


# -- hangs, memory, tracebacks -----------------------------------------------------------------------------------------


def bombs(world: World) -> Iterator[Trial]:
    """7: small YAML and tar files that stand for much, or never end."""
    nine = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    loops = ("a: &a [*a]\n", "a: &a {b: *a}\n", "&a [*a, *a]\n", "a: &a {x: 1}\nb:\n  <<: *a\n")
    for text in (nine, *loops, "a: " + "[" * 5000, "a: " + "{" * 5000, "x" * 2_000_000, "a: " + "9" * 100_000):
        run = world.foreign()
        (run / "config.yaml").write_text(text)
        recipe = run / "recipe.yaml"
        recipe.write_text(text)
        words = world.commands(run)
        for name in ("predict", "report"):
            yield f"{name} with {text[:20]!r}", lambda words=words[name]: bool(command(*words)) or True
        train = ["train", str(world.photos), *TINY, "--recipe", str(recipe), "--out", str(world.new())]
        yield f"train with {text[:20]!r}", lambda words=train: bool(command(*words))
    for name, content in tars().items():
        path = world.new("bomb").with_suffix(".tar")
        path.write_bytes(content)
        for which in (["doctor", str(path), "--out", str(world.new())], ["eval", str(world.run), str(path), "-j", "0"]):
            yield f"{which[0]} of a tar with {name}", lambda words=which: bool(command(*words))


def tars() -> dict[str, bytes]:
    """Tar files whose headers lie."""

    def tar(*headers: tuple[tarfile.TarInfo, bytes]) -> bytes:
        return b"".join(h.tobuf(tarfile.GNU_FORMAT) + d + bytes(-len(d) % 512) for h, d in headers) + bytes(1024)

    def header(name: str, size: int, kind: bytes = b"0") -> tarfile.TarInfo:
        info = tarfile.TarInfo(name)
        info.size, info.type = size, kind
        return info

    def pax(text: bytes, kind: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
        return header("pax", len(text), kind), text

    def field(name: str, value: str) -> bytes:
        length = len(name) + len(value) + 3
        length += len(str(length + len(str(length))))
        return f"{length} {name}={value}\n".encode()

    member = (header("train/a/1.png", 3), b"abc")
    return {
        "a negative size": tar((header("a/1.png", -512), b"")),
        "a negative size later": tar(member, (header("a/2.png", -1024), b"")),
        "a size of 2^62": tar((header("a/1.png", 1 << 62), b"")),
        "a size of 2^87": tar((header("a/1.png", 1 << 87), b"")),
        "a pax size": tar(pax(field("size", "9" * 20)), member),
        "a negative pax size": tar(pax(field("size", "-512")), member),
        "a pax header of digits": tar(pax(b"1" * 200_000), member),
        "a global header of digits": tar(pax(b"1" * 200_000, b"g"), member),
        "a long name of 2^40": tar((header("a", 1 << 40, b"L"), b""), member),
        "a negative long name": tar((header("a", -512, b"L"), b""), member),
        "3,000 pax headers": tar(*[pax(field("path", "a/1.png"))] * 3000, member),
        "damage in the middle": tar(member, member)[:1100] + b"\xff" * 300 + tar(member),
    }


def special_files(world: World) -> Iterator[Trial]:
    """8: pipes, devices and folders in the place of files."""

    def plant(path: Path, kind: str) -> None:
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "socket":
            socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))
        else:
            path.symlink_to(f"/dev/{kind}")

    def call(name: str, kind: str, which: str, image: bool) -> bool:
        if image:
            photos = world.new("photos")
            shutil.copytree(world.photos, photos)
            plant(photos / name, kind)
            words = world.commands(world.run, photos)[which]
            command(*words)
            command(*words, *(("--on-bad-image", "skip") if which in ("eval", "train") else ()))
        else:
            run = world.foreign()
            plant(run / name, kind)
            command(*world.commands(run)[which])
        return True

    names = sorted(p.name for p in world.run.iterdir() if p.is_file() and not p.name.startswith("."))
    names += ["summary.json", "calibration.json", "skipped-images.jsonl", "bad-updates.jsonl"]
    which = cycle(("predict", "report", "train", "export", "eval"))
    for name, kind in product(names, ("pipe", "zero", "folder")):
        command_name = next(which)
        yield f"{command_name}: {name} is a {kind}", partial(call, name, kind, command_name, False)
    images = ("val/class-0/0.png", "train/class-1/3.png", "labels.csv", "train/class-1/pipe.jpg")
    for name, kind in product(images, ("pipe", "zero", "socket")):
        command_name = next(which)
        yield f"{command_name}: {name} is a {kind}", partial(call, name, kind, command_name, True)


def descriptions(world: World) -> Iterator[Trial]:
    """9: weights that say that they are larger than they are; nothing is allocated."""
    tensors, best = load_file(world.run / "best.safetensors"), world.run / "best.safetensors"
    raw = best.read_bytes()
    about = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["everytoken"])

    def call(changes: dict[str, Any], which: str) -> bool:
        changed = json.loads(json.dumps(about))
        for name, value in changes.items():
            place = (
                changed["arguments"]
                if name in ("num_classes", "depth", "embed_dim", "mlp_ratio", "patch_size")
                else changed
            )
            place[name] = value
        path = world.new("weights").with_suffix(".safetensors")
        path.write_bytes(encode_weights(tensors, {"everytoken": json.dumps(changed)}))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        command(*world.commands(path)[which], codes=(2,))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB

    large = (1e9, 2**40, 10**8, 10**6, 60_000, -1)
    which = cycle(("predict", "eval", "export", "explain"))
    for name, value in product(("num_classes", "depth", "embed_dim", "mlp_ratio", "patch_size"), large):
        yield f"{name} {value}", partial(call, {name: value}, next(which))
    for value in ([1 << 14, 1 << 14], [10**9, 10**9], [0, 0], "x", None):
        yield f"img_size {value}", partial(call, {"img_size": value}, next(which))
    for name, value in product(("class_names", "token_class_names"), (["x"] * 100_000, [], ["x"] * 4, 7, {})):
        if value != []:  # which means that there are none
            yield f"{name} {str(value)[:20]}", partial(call, {name: value}, next(which))


def programs(world: World) -> Iterator[Trial]:
    """10: ONNX files with a wrong bit, other shapes, loops, other answers."""
    import onnx
    from onnx import TensorProto, helper

    from everytoken_lab.models.onnx import sealed

    out = world.new("program")
    command("export", str(world.run), "--to", "onnx", "--out", str(out), codes=(0,))
    content, rng = (out / "model.onnx").read_bytes(), random.Random(0)
    metadata = {p.key: p.value for p in onnx.load_from_string(content).metadata_props}

    def call(data: bytes) -> bool:
        path = world.new("bad").with_suffix(".onnx")
        path.write_bytes(data)
        command("predict", str(path), world.image, "-j", "0", codes=(2,))
        return True

    def model(shape: list[Any], logits: list[Any], nodes: list[Any], *more: Any) -> bytes:
        values = [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("images", shape), ("logits", logits))
        ]
        graph = helper.make_graph(nodes, "g", values[:1], values[1:], list(more))
        program = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        helper.set_model_props(program, {k: v for k, v in metadata.items() if k != "sha256"})
        return sealed(program.SerializeToString())

    for i in range(30):
        yield f"a wrong bit ({i})", partial(call, flipped(content, rng))
    yield "half of it", partial(call, content[: len(content) // 2])
    yield "something behind it", partial(call, content + b"\0")
    yield "nothing", partial(call, b"")
    mean = helper.make_node("ReduceMean", ["images"], ["logits"], axes=[2, 3], keepdims=0)
    for shape, logits in (
        (["b", 3, "h", "w"], ["b", 3]),
        (["b", 3], ["b", 3]),
        (["b", 1, 32, 32], ["b", 3]),
        ([1, 3, 32, 32], [1, 3]),
        (["b", 3, 32, 32], ["b", 10**9]),
        (["b", 3, 64, 32], ["b", 7]),
    ):
        with suppress(Exception):  # what onnx itself does not make
            data = model(shape, logits, [mean])
            good = (shape, logits) == ([1, 3, 32, 32], [1, 3])  # which answers for one image as it says
            yield f"images {shape}, logits {logits}", (lambda: True) if good else partial(call, data)
    nan = helper.make_node("Log", ["minus"], ["logits"])
    square = helper.make_node("Neg", ["mean"], ["minus"])
    mean = helper.make_node("ReduceMean", ["images"], ["mean"], axes=[2, 3], keepdims=0)
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    first = helper.make_node("Gather", ["mean", "one"], ["logits"], axis=0)
    yield "another number of answers", partial(call, model(["b", 3, 32, 32], ["b", 3], [mean, first], one))
    del nan, square
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("d", TensorProto.BOOL, [])],
    )
    loop = helper.make_node("Loop", ["trips", "yes"], [], body=body)
    more = [
        helper.make_tensor("trips", TensorProto.INT64, [], [1 << 62]),
        helper.make_tensor("yes", TensorProto.BOOL, [], [1]),
    ]
    mean = helper.make_node("ReduceMean", ["images"], ["logits"], axes=[2, 3], keepdims=0)
    yield "a loop of 2^62", partial(call, model(["b", 3, 32, 32], ["b", 3], [loop, mean], *more))


def numbers(world: World) -> Iterator[Trial]:
    """11: numbers that are none, in weights, descriptions and settings; no answer is "nan %"."""
    tensors = load_file(world.run / "best.safetensors")
    raw = (world.run / "best.safetensors").read_bytes()
    about = json.loads(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]["everytoken"])

    def call(words: list[str], codes: tuple[int, ...] = (0, 1, 2)) -> bool:
        return not re.search(r"\bnan %", command(*words, codes=codes))

    for value, name in product((float("nan"), float("inf"), 1e38), ("head.weight", "patch_embed.proj.bias")):
        run = world.foreign()
        changed = {**tensors, name: torch.full_like(tensors[name], value)}
        (run / "best.safetensors").write_bytes(encode_weights(changed, {"everytoken": json.dumps(about)}))
        for which in ("predict", "eval", "report", "export"):
            yield f"{which} with {name} = {value}", partial(call, world.commands(run)[which])
    for name, value in product(("mean", "std"), (float("nan"), float("inf"), 1e-300, -1.0)):
        changed = {**about, name: [value] * 3}
        path = world.new("weights").with_suffix(".safetensors")
        path.write_bytes(encode_weights(tensors, {"everytoken": json.dumps(changed)}))
        yield f"{name} = {value}", partial(call, world.commands(path)["predict"])
    texts = ("mixing.cutmix.odds=x", "mixing.cutmix.odds={}", "mixing.cutmix.odds=-1", "mixing.cutmix.odds=.nan")
    texts += (
        "objectives.hard.weight=.inf",
        "objectives.hard.weight=.nan",
        "mixing.cutmix.alpha=.nan",
        "lr=.nan",
        "lr=.inf",
    )
    texts += ("mixing.cutmix.odds=true", "weight_decay=.inf", "smoothing=.nan")
    for text in texts:
        words = ["train", str(world.photos), *TINY, "--workers", "0", "--out", str(world.new()), "--set", text]
        codes = (0, 2) if text.endswith("true") else (2,)
        yield f"--set {text}", partial(call, words, codes)


def processes(world: World) -> Iterator[Trial]:
    """12: two Ctrl-C, too little memory, a dead proxy, names that are not UTF-8, folders that are no models."""
    dead = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}

    def end(words: list[str], seconds: float, **more: Any) -> bool:
        process = subprocess.Popen(
            [sys.executable, "-m", "everytoken_lab", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
            **more,
        )
        if seconds:
            time.sleep(seconds)
            for _ in range(2):
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.3)
        try:
            text = process.communicate(timeout=200)[0].decode(errors="replace")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        check_text(text)
        return process.returncode in (0, 2, 130, -signal.SIGINT)

    words = world.commands(world.run)
    words["eval"][words["eval"].index("-j") + 1] = "2"
    words["auto"] = ["train", str(world.photos), "--out", str(world.new())]
    for seconds, which in product((1.5, 4, 8, 12), ("eval", "auto")):
        yield f"two Ctrl-C in {which} after {seconds} s", partial(end, words[which], seconds)

    def little(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))

    for size in (2_500, 4_000):
        limit = partial(little, size << 20)
        yield f"predict with {size} MB of addresses", partial(end, words["predict"], 0, preexec_fn=limit)
    for name in ("timm:vit_tiny_patch16_224", "timm:resnet18", "hf-hub:nobody/nothing", "timm:convnext_atto"):

        def offline(name: str = name) -> bool:
            text = command("predict", name, world.image, environment={**dead, "HF_HOME": str(world.new())}, codes=(2,))
            return len(text.splitlines()) <= 3

        yield f"{name} behind a dead proxy", offline
    strange = world.new("strange")
    for split in ("train", "val"):
        shutil.copytree(world.photos / split, strange / split)
        (strange / split / "class-0").rename(strange / split / "caf\udce9")
        (strange / split / "caf\udce9" / "0.png").rename(strange / split / "caf\udce9" / "\udcff.png")
    run = world.new("strange-run")
    train = ["train", str(strange), *TINY, "--workers", "0", "--out", str(run)]
    yield "train on names that are not UTF-8", lambda: bool(command(*train, codes=(0,)))
    for which, more in {
        **world.commands(run, strange),
        "csv": ["predict", str(run), str(strange / "val"), "--out", str(world.new()) + ".csv"],
        "json": ["predict", str(run), str(strange / "val"), "--json"],
        "pictures": ["predict", str(run), str(strange / "val"), "--pictures", str(world.new())],
    }.items():
        yield f"{which} on names that are not UTF-8", lambda words=more: bool(command(*words)) or True
    config = {"architecture": "vit_nano_patch4_32", "num_classes": 3, "model_args": {}, "pretrained_cfg": {}}
    bad: list[Any] = [[], 7, "x", {}, None, {"architecture": 5}, {"architecture": "x"}]
    bad += [{**config, "model_args": v} for v in ([], "x", {"depth": "x"}, {"img_size": "x"}, {"nothing": 1})]
    bad += [{**config, "label_names": v} for v in (5, "x", {"a": 1}, [[]])]
    bad += [{**config, "pretrained_cfg": v} for v in ([], "x", {"input_size": 5}, {"mean": "x"})]
    bad += [{**config, "num_classes": v} for v in ("x", -1, 10**9)]
    for value in bad:
        folder = world.new("local")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(value))
        yield f"local-dir with {str(value)[:60]}", partial(_refused, "predict", f"local-dir:{folder}", world.image)


def _refused(*words: str) -> bool:
    command(*words, codes=(2,))
    return True


def servers(world: World) -> Iterator[Trial]:
    """13: archives at an address: servers that stall, err and lie, and damage in the cache."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    from everytoken_lab.data import archives

    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(world.photos / "val", "val")
    good, plain = file.getvalue(), {n: getattr(MemoryFileSystem, n) for n in ("info", "open", "isdir")}

    class Status(Exception):  # noqa: N818  (as aiohttp's)
        def __init__(self, status: int | None) -> None:
            super().__init__(f"{status}, message='no'")
            self.status = status

    def fails(status: int | None) -> Callable[..., Any]:
        def info(*_: Any, **__: Any) -> Any:
            raise FileNotFoundError("x") from Status(status)

        return info

    def stalls(*_: Any, **__: Any) -> Any:
        time.sleep(40)

    def slow(*_: Any, **__: Any) -> Any:
        return type("Slow", (io.BytesIO,), {"read": stalls})(good)

    def asked(
        says: str, content: bytes = good, cached: bytes | None = None, codes: tuple[int, ...] = (2,), **fakes: Any
    ) -> bool:
        archives.find_remote.cache_clear()
        fs, cache = fsspec.filesystem("memory"), world.new("cache")
        fs.store.clear()
        fs.pipe_file("/b/val.tar", content)
        words = ["eval", str(world.run), f"memory://u:{SECRET}@b/val.tar", "-j", "0"]
        words = [*words[:2], "memory://b/val.tar", *words[3:]]
        environment = {"EVERYTOKEN_CACHE": str(cache)}
        if cached is not None:
            command(*words, environment=environment, codes=(0,))
            next(cache.glob("*/val.tar")).write_bytes(cached)
        patience, archives._TIMEOUT = archives._TIMEOUT, 1
        for name, fake in fakes.items():
            setattr(MemoryFileSystem, name, fake)
        try:
            text = command(*words, environment=environment, codes=codes)
        finally:
            archives._TIMEOUT = patience
            for name, own in plain.items():
                setattr(MemoryFileSystem, name, own)
        left = [p for p in cache.glob("*/*") if p.suffix == ".tar" and p.read_bytes() != good]
        return says in text and not left

    for status in (400, 401, 403, 418, 429, 500, 502, 503, 504, None, 302, 308):
        yield f"a server that answers {status}", partial(asked, "the server answers", info=fails(status))
    for status in (404, 410):
        yield f"a server that answers {status}", partial(asked, "There is no file", info=fails(status))
    for name in ("info", "open"):
        yield f"a server that stalls at {name}", partial(asked, "no answer", **{name: stalls})
    yield "a server that stalls in the middle", partial(asked, "no answer", open=slow)
    yield "a server without sizes", partial(asked, "how large", info=lambda *a, **k: {"type": "file", "size": None})
    for length in (0, 1, 700, len(good) - 1, len(good) + 1):
        body = (good + b"\0")[:length]
        fake = lambda *a, body=body, **k: io.BytesIO(body)  # noqa: E731
        yield f"{length} of {len(good)} bytes", partial(asked, "val.tar", open=fake)
    rng = random.Random(0)
    for i in range(6):
        noise = rng.randbytes(len(good))
        yield f"noise ({i})", partial(asked, "cannot be read as", open=lambda *a, noise=noise, **k: io.BytesIO(noise))
    for i in range(8):
        yield f"a wrong bit in the cache ({i})", partial(asked, "damaged", cached=flipped(good, rng), codes=(0,))
    for what, cached in (("half", good[:5000]), ("nothing", b""), ("zeros", bytes(len(good)))):
        yield f"{what} in the cache", partial(asked, "top-1", cached=cached, codes=(0,))


def together(world: World) -> Iterator[Trial]:
    """14: exports that are killed leave nothing behind once the command has run again; two runs in one folder."""
    rng = random.Random(0)

    def start(words: list[str]) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                with open(os.devnull, "w") as null:
                    os.dup2(null.fileno(), 1)
                    os.dup2(null.fileno(), 2)
                    os._exit(cli.main(words))
            finally:
                os._exit(70)
        return pid

    def killed(seconds: float, kind: str) -> bool:
        out = world.new("exported")
        words = ["export", str(world.run), "--to", kind, "--out", str(out)]
        pid = start(words)
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        command(*words, codes=(0,))
        return not [path.name for path in out.iterdir() if path.name.startswith(".")]

    def two(words: list[str]) -> bool:
        first = start(words)
        time.sleep(rng.uniform(0, 0.3))
        second = start(words)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (first, second))
        return codes in ([0, 0], [0, 2])

    for i in range(36):
        yield f"export, killed ({i})", partial(killed, rng.uniform(0.05, 1.5), "timm")
    for i in range(4):
        out = str(world.new("shared"))
        yield (
            f"two runs in one folder ({i})",
            partial(two, ["train", str(world.photos), *TINY, "--workers", "0", "--out", out]),
        )


CLASSES: dict[str, Callable[[World], Iterator[Trial]]] = {
    "telemetry": telemetry,
    "code in files": code,
    "planted links": links,
    "addresses in runs": addresses,
    "secrets": secrets,
    "terminal": escapes,
    "YAML and tar bombs": bombs,
    "special files": special_files,
    "oversized weights": descriptions,
    "ONNX files": programs,
    "no numbers": numbers,
    "processes, names": processes,
    "servers": servers,
    "two at once, killed": together,
}


def attack(work: Path, name: str, share: float = 1.0, seed: int = 0) -> Iterator[Tally]:
    """One class in the world that `World.make` made; a random `share` of its trials."""
    os.environ["EVERYTOKEN_CACHE"] = str(work / "cache")
    chosen, trials = random.Random(f"{seed} {name}"), CLASSES[name](World.of(work, name))
    yield Tally(name).run(trial for trial in trials if chosen.random() < share)

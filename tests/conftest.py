"""Small real files for tests that drive the command line, and the command line in processes of its own."""

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub

CONTEXT = multiprocessing.get_context("forkserver")  # torch and timm are imported once, and forked: seconds less each
CONTEXT.set_forkserver_preload(
    ["timm", "everytoken_lab.training.classify", "everytoken_lab.dense.segment.task", __name__]
)


def run_program(
    words: Sequence[str],
    environment: dict[str, str],
    folder: str,
    files: Sequence[Path],
    first: Callable[[], None] | None,
) -> None:
    """What a process of `Program` does."""
    os.setsid()
    os.chdir(folder)
    os.environ |= environment
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    from everytoken_lab.cli import main

    leave_nothing_to_look_at(setattr)
    if first is not None:
        first()
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_nothing_to_look_at(change):
    """Runs of tests draw no batch.jpg and no report.html, which takes longer than they do; see tests/training."""
    loop = sys.modules.get("everytoken_lab.engine.loop")
    if loop is not None:
        change(loop.Task, "show", lambda self, batch: None)
        change(loop.Task, "is_reported", False)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """In this process."""
    leave_nothing_to_look_at(monkeypatch.setattr)


class Program:
    """`everytoken WORDS` in a process and session of its own, started without importing everything again.

    `first` is called there before.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        inside: str,
        first: Callable[[], None] | None = None,
    ) -> None:
        self.files = [folder / "stdout", folder / "stderr"]
        self.process = CONTEXT.Process(target=run_program, args=(list(words), environment, inside, self.files, first))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.process.exitcode

    def wait(self, timeout: float = 240) -> int:
        """Its exit code."""
        self.process.join(timeout)
        assert self.process.exitcode is not None, "still running"
        return self.process.exitcode

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal to it and its workers, and wait for its end; the exit code."""
        if self.poll() is None:
            os.killpg(self.pid, number)
        return self.wait()

    @property
    def out(self) -> str:
        return self.files[0].read_text()

    @property
    def err(self) -> str:
        return self.files[1].read_text()


@pytest.fixture
def forkserver():
    """Starts processes that have torch and timm imported."""
    return CONTEXT


@pytest.fixture
def start(tmp_path_factory):
    """Starts a `Program`: start("train", ..., RANK="1"). Those that still run at the end are killed."""
    programs = []

    def start(
        *words: object, inside: object = "", first: Callable[[], None] | None = None, **environment: str
    ) -> Program:
        folder = tmp_path_factory.mktemp("program")
        programs.append(Program(list(map(str, words)), folder, environment, str(inside) or os.getcwd(), first))
        return programs[-1]

    yield start
    for program in programs:
        program.kill()


@pytest.fixture
def start_ranks(start):
    """Starts processes of one job, as torchrun would: start_ranks(2, "train", ...).

    `inside`: a folder for each; with relative paths among the words, as on machines with a disk each. `first`: what
    rank 0 calls before it begins.
    """

    def start_ranks(
        size: int, *words: object, inside: Sequence[object] = (), first: Callable[[], None] | None = None
    ) -> list[Program]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port} for rank in range(size)]
        places = inside or [""] * size
        return [
            start(*words, inside=place, first=None if number else first, **common, **rank)
            for number, (place, rank) in enumerate(zip(places, ranks, strict=True))
        ]

    return start_ranks


def make_photos(root: Path, classes: int = 3, train: int = 12, val: int = 4, size: tuple[int, int] = (40, 36)) -> Path:
    """An ImageFolder tree: each class is a coloured disc at a random place on noise."""
    rng = np.random.default_rng(0)
    colours = np.array([[220, 40, 40], [40, 200, 60], [60, 80, 230], [230, 210, 40]])
    rows, columns = np.mgrid[: size[1], : size[0]]
    for split, count in (("train", train), ("val", val)):
        for c in range(classes):
            place = root / split / f"class-{c}"
            place.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(60, 160, (size[1], size[0], 3)).astype(np.uint8)
                y, x = rng.integers(10, size[1] - 10), rng.integers(10, size[0] - 10)
                pixels[(rows - y) ** 2 + (columns - x) ** 2 < 80] = colours[c]
                Image.fromarray(pixels).save(place / f"photo.{i}.png")
    return root


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """36 training and 12 validation images of three classes."""
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def photo_maps(photos, tmp_path_factory) -> Path:
    """A store of score maps of the training images: random ones, over nine classes that are not the folders'."""
    from everytoken.maps import MapWriter, ScoreMap, StoreMeta

    root, rng = photos / "train", np.random.default_rng(0)
    path = tmp_path_factory.mktemp("photo-maps") / "maps"
    keys = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.png"))
    with MapWriter(path, keys, StoreMeta((5, 6), 2, tuple(f"thing {i}" for i in range(9)))) as writer:
        for key in keys:
            classes = np.stack([rng.permutation(9)[:2] for _ in range(30)]).reshape(5, 6, 2).astype(np.uint16)
            scores = np.sort(rng.normal(3, 1, (5, 6, 2)))[..., ::-1].astype(np.float16)
            writer.write({key: ScoreMap(scores, classes, (40, 36))})
        writer.finalize()
    return path


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> str:
    """A tiny network with random weights in the place of a pretrained one, in a file that describes itself."""
    import timm
    import torch

    from everytoken_lab.engine.checkpoint import write_weights
    from everytoken_lab.models.description import Description

    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=7)
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(16, 3, 32, 32))
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    about = Description("test_resnet", {"num_classes": 7}, img_size=(32, 32), crop_pct=1.0)
    write_weights(path, model.state_dict(), about.to_metadata())
    return str(path)

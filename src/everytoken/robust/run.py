"""Evaluate a model on suites: predictions of each, kept on disk, so that a stopped evaluation goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from PIL import Image

from everytoken.data import keyed
from everytoken.data.augment import AugmentConfig, View
from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.decode import Picture
from everytoken.data.evaluation import EvalTransform
from everytoken.data.loader import BadImages, Loader
from everytoken.data.sources import DataSet, Subset
from everytoken.errors import EverytokenError
from everytoken.evaluate.accuracy import Predictions, predict, read_real
from everytoken.evaluate.run import open_part
from everytoken.robust.attack_log import AttackLog
from everytoken.robust.attacks import auto
from everytoken.robust.attacks.balls import Norm
from everytoken.robust.corruptions import corrupt
from everytoken.robust.corruptions.digital import stored
from everytoken.robust.models import Normalised, Subject
from everytoken.robust.subsets import Match, match
from everytoken.robust.suites import Suite

STORED_QUALITY = 85  # of the published ImageNet-C files
Tell = Callable[[str, int, int], None]  # what, done, of how many


@dataclass(frozen=True)
class Settings:
    """How suites are evaluated.

    Attributes:
        limit: images per suite, 0: all; chosen by a hash of their keys. attack_limit: likewise for attacks.
        as_stored: generated corruptions go through a JPEG file of quality 85, as the published ones did.
        frost_textures: folder of photographs. restrict: answers among the data's classes only. real: real.json.
        attack, norm, budget: see `attacks`.
        sources: what is compared; of data that one of these runs was trained on, only what it held out is used.
    """

    limit: int = 0
    attack_limit: int = 0
    batch_size: int = 64
    attack_batch_size: int = 16
    workers: int = 4
    as_stored: bool = True
    frost_textures: str = ""
    restrict: bool = False
    real: str = ""
    on_bad_image: str = "raise"
    attack: str = "autoattack"
    norm: Norm = "linf"
    budget: auto.Budget = field(default_factory=auto.Budget)
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a model did on one suite.

    Attributes:
        correct: [N] right or wrong. keys: [N] names of the images.
        top5: percent, or None. ece: percent, or None.
    """

    suite: Suite
    correct: np.ndarray
    keys: list[str]
    top5: float | None = None
    ece: float | None = None
    notes: tuple[str, ...] = ()


class _KeyedSet(Subset):
    """Pictures that know the key of their image."""

    def picture(self, i: int, alpha: Any = "white") -> Picture:
        made = super().picture(i, alpha)
        made.key = self.key(i)  # type: ignore[attr-defined]
        return made


class CorruptTransform(EvalTransform):
    """The evaluation view, corrupted; random numbers are keyed by the image, and the same for all severities."""

    def __init__(self, config: AugmentConfig, suite: Suite, settings: Settings) -> None:
        super().__init__(config)
        self.suite, self.settings = suite, settings

    def view(self, image: Image.Image | Picture, rng: np.random.Generator | None = None) -> View:
        """The view; everything is decided by the key."""
        pixels, placement, erased = super().view(image, rng)
        dice = keyed.generator(0, getattr(image, "key", ""), "corrupt", self.suite.corruption)
        textures = self.settings.frost_textures
        made = corrupt(pixels, self.suite.corruption, self.suite.severity, dice, frost_textures=textures)
        if self.settings.as_stored:
            made = np.array(stored(Image.fromarray(made), STORED_QUALITY))
        return View(made, placement, erased)


def view_of(subject: Subject) -> AugmentConfig:
    """How the model wants its images."""
    about = subject.about
    return AugmentConfig(
        img_size=(about.img_size[0], about.img_size[1]), crop_pct=about.crop_pct, interpolation=about.interpolation,
        mean=(about.mean[0], about.mean[1], about.mean[2]), std=(about.std[0], about.std[1], about.std[2]),
    )  # fmt: skip


def published_view(subject: Subject, suite: Suite) -> AugmentConfig:
    """ImageNet-C's images are the 224 px centre already: resized to the model's input, nothing is cut off."""
    view = view_of(subject)
    return replace(view, crop_pct=1.0) if suite.kind == "c" else view


def open_images(suite: Suite, limit: int, sources: Sequence[str] = ()) -> DataSet:
    """The suite's images, or `limit` of them; never those that one of the runs `sources` was trained on."""
    data, _ = open_part(sources, suite.path)
    chosen = np.arange(len(data))
    if limit and limit < len(data):
        draws = [keyed.uniform(0, "limit", key) for key in data.keys()]  # noqa: SIM118
        chosen = np.sort(np.argsort(draws, kind="stable")[:limit])
    return _KeyedSet(data, chosen)


def evaluate_suite(subject: Subject, suite: Suite, settings: Settings, folder: Path, tell: Tell) -> Result:
    """Predictions on one suite (not an attack), from the folder if they are there."""
    data = open_images(suite, settings.limit, settings.sources)
    pair = match_classes(subject, data, suite, settings)
    keys = list(data.keys())
    config = published_view(subject, suite)
    facts: dict[str, Any] = {
        "weights": subject.weights, "keys": _digest(keys), "labels": _digest(map(str, pair.labels[data.labels])),
        "columns": None if pair.columns is None else _digest(map(str, pair.columns)), "view": asdict(config),
    }  # fmt: skip
    if suite.kind == "corrupt":
        facts |= {"corruption": suite.corruption, "severity": suite.severity, "as_stored": settings.as_stored}
        facts |= {"frost": settings.frost_textures} if suite.corruption == "frost" else {}
        stem = f"{suite.corruption}-{suite.severity}-{facts['keys'][:8]}"
    else:  # by place, so that val and real share theirs
        stem = f"{Path(suite.path).name}-{_digest([suite.path, facts['keys'], suite.subset])[:8]}"
    path = folder / "predictions" / f"{stem}.npz"
    known = _load(path, facts)
    if known is None:
        known = _predict(subject, data, suite, pair, config, settings, tell)
        _save(path, facts, known)
    return _result(suite, known, keys, settings)


def _predict(
    subject: Subject, data: DataSet, suite: Suite, pair: Match, config: AugmentConfig, settings: Settings, tell: Tell
) -> Predictions:
    made = suite.kind == "corrupt"
    transform = CorruptTransform(config, suite, settings) if made else EvalTransform(config)
    loader = Loader(
        data, transform, settings.batch_size, train=False, workers=settings.workers,
        bad_images=BadImages(settings.on_bad_image), pin_memory=subject.device.startswith("cuda"),
    )  # fmt: skip
    labels = torch.from_numpy(pair.labels).to(subject.device)

    def batches() -> Iterator[Batch]:
        done = 0
        for batch in Prefetcher(loader.epoch(0), subject.device, config.mean, config.std):
            yield replace(batch, labels=labels[batch.labels])
            done += len(batch)
            tell(suite.name, done, len(data))

    class Kept(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = subject.net(images)
            return logits if pair.columns is None else logits[:, torch.from_numpy(pair.columns).to(logits.device)]

    try:
        return predict(Kept(), batches())
    finally:
        loader.close()


def match_classes(subject: Subject, data: DataSet, suite: Suite, settings: Settings) -> Match:
    """The data's classes among the model's."""
    names = subject.about.class_names
    where = f"{suite.name} ({suite.path})"
    return match(names, subject.outputs, data.class_names, subset=suite.subset, restrict=settings.restrict, where=where)


def _result(suite: Suite, known: Predictions, keys: list[str], settings: Settings) -> Result:
    own = [keys[i] for i in known.index]
    if suite.kind == "real":
        labels = real_labels(settings.real)
        sets = [labels.get(f"{PurePosixPath(key).stem}.JPEG") for key in own]
        if all(s is None for s in sets):
            raise EverytokenError(
                f"{suite.path}: no image has ReaL labels; they are found by the names of the validation files "
                f"(ILSVRC2012_val_00000001), the first here is {own[0]}"
            )
        judged = [i for i, s in enumerate(sets) if s]
        hits = np.array([known.top[i, 0] in (sets[i] or ()) for i in judged], dtype=np.bool_)
        return Result(suite, hits, [own[i] for i in judged])
    numbers = known.summary()
    return Result(suite, known.correct, own, numbers["top5"], numbers["ece"])


def real_labels(path: str) -> dict[str, list[int]]:
    """ReaL labels by file name: from a file, or the copy that timm carries."""
    if path:
        return read_real(path)
    import timm.data

    return read_real(Path(timm.data.__file__).parent / "_info" / "imagenet_real_labels.json")


def attack_suites(subject: Subject, suites: list[Suite], settings: Settings, folder: Path, tell: Tell) -> list[Result]:
    """Robust accuracy for each eps, smallest first. An image that fell at a smaller eps has fallen at a larger one."""
    out: list[Result] = []
    fallen: dict[str, str] = {}
    for suite in sorted(suites, key=lambda s: s.eps):
        data = open_images(suite, settings.attack_limit or settings.limit, settings.sources)
        pair = match_classes(subject, data, suite, settings)
        records, no_gradient = _attack(subject, data, suite, pair, settings, folder, fallen, tell)
        fallen |= {r["key"]: r["by"] for r in records if r["by"]}
        correct = np.array([not r["by"] for r in records], dtype=np.bool_)
        tried = [r for r in records if r["by"] != "clean"]
        counts = {name: sum(r["by"] == name for r in tried) for name in sorted({r["by"] for r in tried if r["by"]})}
        notes = [f"{suite.name}: " + (", ".join(f"{k} broke {v}" for k, v in counts.items()) or "nothing broke")]
        if no_gradient:
            notes.append(f"{suite.name}: {no_gradient} images have no gradient; only Square can be believed there")
        out.append(Result(suite, correct, [r["key"] for r in records], notes=tuple(notes)))
    return out


def _attack(
    subject: Subject, data: DataSet, suite: Suite, pair: Match, settings: Settings, folder: Path,
    fallen: dict[str, str], tell: Tell,
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    config, size = view_of(subject), settings.attack_batch_size
    keys = list(data.keys())
    facts = {
        "weights": subject.weights, "keys": _digest(keys), "labels": _digest(map(str, pair.labels[data.labels])),
        "columns": None if pair.columns is None else _digest(map(str, pair.columns)),
        "view": _digest([json.dumps(asdict(config))]), "attack": settings.attack, "norm": settings.norm,
        "eps": suite.eps, "batch": size, "budget": asdict(settings.budget), "fallen": _digest(sorted(fallen)),
    }  # fmt: skip
    name = f"{settings.attack}-{settings.norm}-{suite.eps:.6g}.jsonl"
    sizes = [min(size, len(data) - at) for at in range(0, len(data), size)]
    log = AttackLog(folder / "attacks" / name, facts, sizes)
    model = Normalised(subject.net, config.mean, config.std, pair.columns)
    parts = auto.attacks(settings.attack, settings.budget)
    loader = Loader(data, EvalTransform(config), size, train=False, workers=min(1, settings.workers))
    done = sum(sizes[: len(log.batches)])
    for batch in loader.epoch(0, len(log.batches)) if len(log.batches) < len(sizes) else ():
        labels = torch.from_numpy(pair.labels)[batch.labels].to(subject.device)
        images = batch.images.to(subject.device).float() / 255
        new = [i for i, key in enumerate(batch.keys) if key not in fallen]
        records = [{"key": key, "by": fallen.get(key, ""), "smaller eps": key in fallen} for key in batch.keys]
        if new:
            rows = torch.tensor(new, device=images.device)
            count = done
            say = lambda attack, left, count=count: tell(f"{suite.name} {attack}", count, len(data))  # noqa: E731
            got = auto.run(
                model, images[rows], labels[rows], [batch.keys[i] for i in new], parts, suite.eps, settings.norm, say
            )
            for i, place in enumerate(new):
                records[place] |= {
                    "by": got.by[i], "label": int(labels[place]), "clean": int(got.clean[i]),
                    "attacked": int(got.attacked[i]), "distance": round(float(got.distance[i]), 7),
                }  # fmt: skip
            records[new[0]]["no gradient"] = got.no_gradient
        log.add(records)
        done += len(batch)
        tell(suite.name, done, len(data))
    loader.close()
    every = [record for part_ in log.batches for record in part_]
    return every, sum(record.get("no gradient", 0) for record in every)


def _digest(texts: Any) -> str:
    made = hashlib.blake2b(digest_size=12)
    for text in texts:
        made.update(text.encode("utf-8", "surrogateescape") + b"\n")
    return made.hexdigest()


_FIELDS = ("index", "label", "top", "confidence", "loss")


def _load(path: Path, facts: dict[str, Any]) -> Predictions | None:
    try:
        with np.load(path) as file:
            if str(file["facts"]) != json.dumps(facts, sort_keys=True, default=str):
                return None
            return Predictions(*(file[name] for name in _FIELDS))
    except (OSError, KeyError, ValueError, EOFError, BadZipFile):
        return None


def _save(path: Path, facts: dict[str, Any], known: Predictions) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    with temporary.open("wb") as file:
        text = json.dumps(facts, sort_keys=True, default=str)
        np.savez(file, facts=np.array(text), **{name: getattr(known, name) for name in _FIELDS})
    temporary.replace(path)

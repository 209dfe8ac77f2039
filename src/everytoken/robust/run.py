"""Evaluate a model on suites: predictions of each, kept on disk, so that a stopped evaluation goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from everytoken import keyed
from everytoken.classes import ClassList, ClassMatch, imagenet_numbers
from everytoken.classes import match_classes as match_folders
from everytoken.data.augment import EvalTransform
from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.datasets import DataSet, Subset
from everytoken.data.decode import Picture
from everytoken.data.loader import BadImages, Loader
from everytoken.evaluation.accuracy import Predictions, predict, read_real, real_sets
from everytoken.evaluation.kept import keep, kept
from everytoken.evaluation.run import open_part
from everytoken.evaluation.run import view_of as view_of_weights
from everytoken.robust.attack_log import AttackLog, Record
from everytoken.robust.attacks import auto
from everytoken.robust.attacks.balls import Norm
from everytoken.robust.corruptions import corrupt
from everytoken.robust.corruptions.digital import stored
from everytoken.robust.models import Normalised, Subject
from everytoken.robust.suites import Suite

STORED_QUALITY = 85  # of the published ImageNet-C files
Tell = Callable[..., None]  # what, done, of how many, and perhaps which attack
_OWN = ("val", "own", "corrupt", "attack")  # suites whose images may be the user's training images


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

    def picture(self, i: int) -> Picture:
        made = super().picture(i)
        made.key = self.key(i)  # type: ignore[attr-defined]
        return made


class CorruptTransform:
    """The evaluation view, corrupted; random numbers are keyed by the image, and the same for all severities."""

    def __init__(self, view: EvalTransform, suite: Suite, settings: Settings) -> None:
        self.view, self.suite, self.settings = view, suite, settings

    def __call__(self, image: Picture, rng: np.random.Generator | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The view; everything is decided by the key."""
        pixels, placement = self.view(image)
        dice = keyed.generator(0, getattr(image, "key", ""), "corrupt", self.suite.corruption)
        textures = self.settings.frost_textures
        made = corrupt(pixels, self.suite.corruption, self.suite.severity, dice, frost_textures=textures)
        if self.settings.as_stored:
            made = np.array(stored(Image.fromarray(made), STORED_QUALITY))
        return made, placement


def view_of(subject: Subject) -> EvalTransform:
    """How the model wants its images."""
    return view_of_weights(subject.about)


def published_view(subject: Subject, suite: Suite) -> EvalTransform:
    """ImageNet-C's images are the 224 px centre already: resized to the model's input, nothing is cut off."""
    view = view_of(subject)
    return replace(view, crop_pct=1.0) if suite.kind == "c" else view


def open_images(suite: Suite, limit: int, sources: Sequence[str] = ()) -> DataSet:
    """The suite's images, or `limit` of them; never those that one of the runs `sources` was trained on."""
    return _open(suite, limit, sources)[0]


def _open(suite: Suite, limit: int, sources: Sequence[str]) -> tuple[DataSet, list[str]]:
    """The same, with what to say about them."""
    data, note = open_part(sources, suite.path, doubt=suite.kind in _OWN)
    chosen = np.arange(len(data))
    if limit and limit < len(data):
        draws = [keyed.uniform(0, "limit", key) for key in data.keys()]  # noqa: SIM118
        chosen = np.sort(np.argsort(draws, kind="stable")[:limit])
    return _KeyedSet(data, chosen), [note] if note else []


def notes_on(suites: Sequence[Suite], sources: Sequence[str]) -> list[str]:
    """What to say about the images of suites before they are evaluated, each folder once; test sets say it after."""
    places = {suite.path: suite for suite in suites if suite.kind in _OWN}
    return [note for suite in places.values() for note in _open(suite, 0, sources)[1]]


def evaluate_suite(subject: Subject, suite: Suite, settings: Settings, folder: Path, tell: Tell) -> Result:
    """Predictions on one suite (not an attack), from the folder if they are there."""
    data, notes = _open(suite, settings.limit, settings.sources)
    pair = match_classes(subject, data, suite, settings)
    keys = list(data.keys())
    config = published_view(subject, suite)
    facts = {**_facts(subject, data, pair, keys), "view": asdict(config)}
    if suite.kind == "corrupt":
        facts |= {"corruption": suite.corruption, "severity": suite.severity, "as_stored": settings.as_stored}
        facts |= {"frost": settings.frost_textures} if suite.corruption == "frost" else {}
        stem = f"{suite.corruption}-{suite.severity}-{facts['keys'][:8]}"
    else:  # by place, so that val and real share theirs
        stem = f"{Path(suite.path).name}-{_digest([suite.path, facts['keys'], suite.subset])[:8]}"
    path = folder / "predictions" / f"{stem}.npz"
    about = json.dumps(facts, sort_keys=True, default=str)
    known = kept(path, about)
    if known is None:
        known = _predict(subject, data, suite, pair, config, settings, tell)
        keep(path, known[0], about, known[1])
    if known[1]:
        notes.append(f"{suite.name}: {len(known[1])} unreadable images are left out")
    if suite.kind == "real":
        numbers = imagenet_numbers(ClassList(subject.outputs, subject.about.class_names))
        made = _real_result(suite, known[0], keys, settings, numbers if pair.columns is None else numbers[pair.columns])
    else:
        made = _result(suite, known[0], keys)
    return replace(made, notes=tuple(notes))


def _facts(subject: Subject, data: DataSet, pair: ClassMatch, keys: Sequence[str]) -> dict[str, Any]:
    """What decides the answers of a model, as far as predictions and attacks have it in common."""
    return {
        "weights": subject.weights, "token vote": subject.token_vote, "keys": _digest(keys),
        "labels": _digest(map(str, pair.labels[data.labels])),
        "columns": None if pair.columns is None else _digest(map(str, pair.columns)),
    }  # fmt: skip


def _predict(
    subject: Subject,
    data: DataSet,
    suite: Suite,
    pair: ClassMatch,
    config: EvalTransform,
    settings: Settings,
    tell: Tell,
) -> tuple[Predictions, dict[str, str]]:
    """Predictions, and the images that could not be read (key -> reason)."""
    made = suite.kind == "corrupt"
    bad = BadImages(settings.on_bad_image)
    transform = CorruptTransform(config, suite, settings) if made else config
    loader = Loader(
        data, transform, settings.batch_size, train=False, workers=settings.workers,
        bad_images=bad, pin_memory=subject.device.startswith("cuda"),
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
        return predict(Kept(), batches()), dict(bad.seen)
    finally:
        loader.close()


def match_classes(subject: Subject, data: DataSet, suite: Suite, settings: Settings) -> ClassMatch:
    """The data's classes among the model's."""
    classes = ClassList(subject.outputs, subject.about.class_names)
    where = f"{suite.name} ({suite.path})"
    return match_folders(classes, data.class_names, where, subset=suite.subset, restrict=settings.restrict)


def _result(suite: Suite, known: Predictions, keys: list[str]) -> Result:
    numbers = known.summary()
    return Result(suite, known.correct, [keys[i] for i in known.index], numbers["top5"], numbers["ece"])


def _real_result(suite: Suite, known: Predictions, keys: list[str], settings: Settings, numbers: np.ndarray) -> Result:
    """Judged by ReaL labels; `numbers` are ImageNet's classes of the answers."""
    own = [keys[i] for i in known.index]
    sets = real_sets(own, real_labels(settings.real))
    judged = [i for i, s in enumerate(sets) if s]
    hits = np.array([numbers[known.top[i, 0]] in sets[i] for i in judged], dtype=np.bool_)
    return Result(suite, hits, [own[i] for i in judged])


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
        data, notes = _open(suite, settings.attack_limit or settings.limit, settings.sources)
        pair = match_classes(subject, data, suite, settings)
        every = _attack(subject, data, suite, pair, settings, folder, fallen, tell)
        records = [r for r in every if "unreadable" not in r]
        fallen |= {r["key"]: r["by"] for r in records if r["by"]}
        correct = np.array([not r["by"] for r in records], dtype=np.bool_)
        tried = [r for r in records if r["by"] != "clean"]
        counts = {name: sum(r["by"] == name for r in tried) for name in sorted({r["by"] for r in tried if r["by"]})}
        notes.append(f"{suite.name}: " + (", ".join(f"{k} broke {v}" for k, v in counts.items()) or "nothing broke"))
        no_gradient = sum(r.get("no gradient", 0) for r in records)
        if no_gradient:
            notes.append(f"{suite.name}: {no_gradient} images have no gradient; only Square can be believed there")
        if len(records) < len(every):
            notes.append(f"{suite.name}: {len(every) - len(records)} unreadable images are left out")
        out.append(Result(suite, correct, [r["key"] for r in records], notes=tuple(notes)))
    return out


def _attack(
    subject: Subject, data: DataSet, suite: Suite, pair: ClassMatch, settings: Settings, folder: Path,
    fallen: dict[str, str], tell: Tell,
) -> list[Record]:  # fmt: skip
    """One record for each image, from the log as far as it goes."""
    config, size = view_of(subject), settings.attack_batch_size
    keys = list(data.keys())
    facts = {
        **_facts(subject, data, pair, keys),
        "view": _digest([json.dumps(asdict(config))]), "attack": settings.attack, "norm": settings.norm,
        "eps": suite.eps, "batch": size, "budget": asdict(settings.budget), "fallen": _digest(sorted(fallen)),
    }  # fmt: skip
    other = _digest([json.dumps(facts, sort_keys=True, default=str)])[:8]  # other settings, another log
    name = f"{settings.attack}-{settings.norm}-{suite.eps:.6g}-{other}.jsonl"
    sizes = [min(size, len(data) - at) for at in range(0, len(data), size)]
    log = AttackLog(folder / "attacks" / name, facts, sizes)
    model = Normalised(subject.net, config.mean, config.std, pair.columns)
    parts = auto.attacks(settings.attack, settings.budget)
    bad = BadImages(settings.on_bad_image)
    loader = Loader(
        data, config, size, train=False, workers=min(1, settings.workers), bad_images=bad
    )  # fmt: skip

    def add(records: list[Record]) -> None:
        """Append a whole batch: what was attacked, and a record of each image that could not be read."""
        at = len(log.batches) * size
        known = {record["key"]: record for record in records}
        left_out = lambda key: {"key": key, "by": "", "unreadable": bad.seen.get(key, "")}  # noqa: E731
        log.add([known.get(key) or left_out(key) for key in keys[at : at + size]])
        tell(suite.name, sum(sizes[: len(log.batches)]), len(data))

    for batch in loader.epoch(0, len(log.batches)) if len(log.batches) < len(sizes) else ():
        assert batch.indices is not None
        while len(log.batches) < int(batch.indices[0]) // size:
            add([])  # nothing of a batch could be read
        labels = torch.from_numpy(pair.labels)[batch.labels].to(subject.device)
        done = len(log.batches) * size
        say = lambda attack, left, done=done: tell(suite.name, done, len(data), attack)  # noqa: E731
        add(_attack_batch(model, batch, labels, parts, suite, settings, fallen, say))
    while len(log.batches) < len(sizes):
        add([])
    loader.close()
    return [record for records in log.batches for record in records]


def _attack_batch(
    model: Normalised, batch: Batch, labels: torch.Tensor, parts: Any, suite: Suite, settings: Settings,
    fallen: dict[str, str], say: Callable[..., None],
) -> list[Record]:  # fmt: skip
    """A record for each image of a batch; those that have fallen already are not attacked again."""
    images = batch.images.to(labels.device).float() / 255
    new = [i for i, key in enumerate(batch.keys) if key not in fallen]
    records: list[Record] = [
        {"key": key, "by": fallen.get(key, ""), "smaller eps": key in fallen} for key in batch.keys
    ]
    if not new:
        return records
    rows = torch.tensor(new, device=images.device)
    got = auto.run(
        model, images[rows], labels[rows], [batch.keys[i] for i in new], parts, suite.eps, settings.norm, say
    )  # fmt: skip
    for i, place in enumerate(new):
        records[place] |= {
            "by": got.by[i], "label": int(labels[place]), "clean": int(got.clean[i]),
            "attacked": int(got.attacked[i]), "distance": round(float(got.distance[i]), 7),
        }  # fmt: skip
    records[new[0]]["no gradient"] = got.no_gradient
    return records


def _digest(texts: Any) -> str:
    made = hashlib.blake2b(digest_size=12)
    for text in texts:
        made.update(text.encode("utf-8", "surrogateescape") + b"\n")
    return made.hexdigest()

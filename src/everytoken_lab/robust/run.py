"""Evaluate a model on suites: predictions of each, and logs of attacks, kept on disk, so that a stopped job resumes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import Normalize

from everytoken import keyed
from everytoken.errors import EverytokenError
from everytoken.files import append, make_inside, refuse_link, write_atomically
from everytoken_lab.annotators.annotator import weights_hash
from everytoken_lab.classes import ClassMatch, imagenet_numbers, match_classes
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.data.datasets import DataSet, Subset
from everytoken_lab.data.decode import ImageError, Picture
from everytoken_lab.engine.accuracy import Predictions, read_real, real_sets
from everytoken_lab.engine.held_out import open_part
from everytoken_lab.evaluation import InferenceOptions
from everytoken_lab.evaluation.run import Inference, Voter, open_with
from everytoken_lab.models.open import OpenModel
from everytoken_lab.robust import Progress, RobustOptions, autoattack
from everytoken_lab.robust.corruptions import corrupt, stored
from everytoken_lab.robust.gradient_attacks import AttackBatch, Model
from everytoken_lab.robust.suites import Suite, corruption_names, parse_suites
from everytoken_lab.robust.tables import Result, Table, make_table
from everytoken_lab.schema import counted

STORED_QUALITY = 85  # of the published ImageNet-C files
ATTACK_BATCH = 16  # images that are attacked together, and written to the log together
_OWN_IMAGES = ("val", "own", "corrupt", "attack")  # suites whose images may be the user's training images
Record = dict[str, Any]


@dataclass(frozen=True)
class TestedModel:
    """A model under test."""

    __test__ = False  # for pytest, which takes the name for a test's

    name: str
    opened: OpenModel
    net: Voter  # normalised images -> logits, with the vote of the tokens, in evaluation mode
    weights: str  # a hash of all weights

    @property
    def view(self) -> EvalTransform:
        """How it wants its images."""
        return eval_view(self.opened.info)

    @property
    def folder(self) -> str:
        """A folder's name for its results, which is another one for other weights or another vote."""
        vote = f"-vote{self.net.vote:g}" if self.net.vote else ""
        return slug(f"{self.name}-{self.weights[:6]}{vote}")


def open_tested(source: str, options: InferenceOptions) -> TestedModel:
    """Open what `source` names."""
    opened = open_with(source, options)
    if opened.info.multi_label:
        raise EverytokenError(
            f"{opened.source} is a multi-label model, and robustness is measured by top-1 accuracy; `everytoken eval` "
            "gives its mAP on other images"
        )
    net = Voter(opened, options.token_vote).eval().requires_grad_(False)
    path = Path(source)
    name = source if ":" in source or path.is_dir() else path.name
    return TestedModel(name, opened, net, weights_hash(net)[:24])


def slug(name: str) -> str:
    """A name that can be a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def from_pixels(net: nn.Module, view: EvalTransform, columns: np.ndarray | None = None) -> Model:
    """Images in 0..1 -> logits of the classes `columns` (None: all), as evaluation has them."""
    normalise = Normalize(view.mean, view.std)
    kept = slice(None) if columns is None else torch.from_numpy(columns).to(next(net.parameters()).device)
    return lambda images: net(normalise(images)).float()[:, kept]


# Its images


class _KeyedSet(Subset):
    """Pictures that know the key of their image."""

    def picture(self, i: int) -> Picture:
        picture = super().picture(i)
        picture.key = self.key(i)  # type: ignore[attr-defined]
        return picture


class CorruptTransform:
    """The evaluation crop, corrupted; random numbers are keyed by the image, and the same for all severities."""

    def __init__(self, view: EvalTransform, suite: Suite, textures: str = "") -> None:
        self.view, self.suite, self.textures = view, suite, textures

    def __call__(self, image: Picture, rng: np.random.Generator | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(pixels, placement); everything is decided by the key."""
        pixels, placement = self.view(image)
        generator = keyed.generator(0, getattr(image, "key", ""), "corrupt", self.suite.corruption)
        pixels = corrupt(pixels, self.suite.corruption, self.suite.severity, generator, frost_textures=self.textures)
        return np.array(stored(Image.fromarray(pixels), STORED_QUALITY)), placement


def open_images(suite: Suite, limit: int = 0, sources: Sequence[str] = ()) -> tuple[DataSet, list[str]]:
    """The suite's images, or `limit` of them, never those that one of the runs `sources` was trained on; and notes."""
    data, note = open_part(sources, suite.path, doubt=suite.kind in _OWN_IMAGES)
    chosen = np.arange(len(data))
    if limit and limit < len(data):
        draws = [keyed.uniform(0, "limit", key) for key in data.keys()]  # noqa: SIM118
        chosen = np.sort(np.argsort(draws, kind="stable")[:limit])
    return _KeyedSet(data, chosen), [note] if note else []


# Suites


class SuiteRunner:
    """One model on suites.

    Args:
        folder: for predictions and logs, which are used again while everything that decides them is the same.
        sources: what is compared; of data that one of these runs was trained on, only what it held out is used.
        progress: hears the suite, how many images are done, of how many, and perhaps the attack.
    """

    def __init__(
        self,
        tested: TestedModel,
        options: RobustOptions,
        folder: Path,
        sources: Sequence[str] = (),
        progress: Progress = lambda *_: None,
    ) -> None:
        refuse_link(folder)
        self.tested, self.options, self.folder = tested, options, folder
        self.sources, self.progress = sources, progress

    def run(self, suites: Sequence[Suite]) -> list[Result]:
        """All of them."""
        attacks = [suite for suite in suites if suite.kind == "attack"]
        return [self.evaluate(s) for s in suites if s.kind != "attack"] + self.attack(attacks)

    def match(self, data: DataSet, suite: Suite) -> ClassMatch:
        """The data's classes among the model's."""
        where = f"{suite.name} ({suite.path})"
        classes, restrict = self.tested.opened.classes, self.options.restrict
        return match_classes(classes, data.class_names, where, subset=suite.subset, restrict=restrict)

    def evaluate(self, suite: Suite) -> Result:
        """Predictions on one suite (not an attack), from the folder if they are there."""
        data, notes = open_images(suite, self.options.limit, self.sources)
        match = self.match(data, suite)
        keys = list(data.keys())
        view = self.tested.view
        if suite.kind == "c":  # images are the 224 px centre already: resized to the input, nothing is cut off
            view = replace(view, crop_pct=1.0)
        facts = self._facts(data, match, keys, view)
        if suite.kind == "corrupt":
            facts |= {"corruption": suite.corruption, "severity": suite.severity}
            facts |= {"program": 3}  # counts changes of what corruptions give
            facts |= {"frost": self.options.frost_textures} if suite.corruption == "frost" else {}
            stem = f"{suite.corruption}-{suite.severity}-{facts['keys'][:8]}"
        else:  # by path, so that val and real have theirs in common
            stem = f"{Path(suite.path).name}-{_digest([suite.path, facts['keys'], suite.subset])[:8]}"
        path = self.folder / "predictions" / f"{stem}.npz"
        note = json.dumps(facts, sort_keys=True, default=str)
        saved = Predictions.saved(path, note)
        if saved is None:
            saved = self._predict(data, suite, match, view)
            make_inside(self.folder, path.parent.name)
            saved[0].save(path, note, saved[1])
        predictions, skipped = saved
        if skipped:
            notes.append(f"{suite.name}: left out {counted(len(skipped), 'unreadable image')}")
        keys = [keys[i] for i in predictions.index]
        if suite.kind == "real":
            return self._real(suite, predictions, keys, match, notes)
        numbers = predictions.summary()
        return Result(suite, predictions.correct, keys, numbers["top5"], numbers["ece"], tuple(notes))

    def _facts(self, data: DataSet, match: ClassMatch, keys: Sequence[str], view: EvalTransform) -> dict[str, Any]:
        """What decides the answers of a model, as far as predictions and attacks have it in common."""
        return {
            "weights": self.tested.weights,
            "token vote": self.tested.net.vote,
            "keys": _digest(keys),
            "labels": _digest(map(str, match.labels[data.labels])),
            "columns": None if match.columns is None else _digest(map(str, match.columns)),
            "view": asdict(view),
        }

    def _predict(
        self, data: DataSet, suite: Suite, match: ClassMatch, view: EvalTransform
    ) -> tuple[Predictions, dict[str, str]]:
        """Predictions, and the images that could not be read (key -> reason)."""
        textures = self.options.frost_textures
        inference = Inference(
            self.tested.net,
            data,
            view,
            self.options,
            progress=lambda done, total: self.progress(suite.name, done, total),
            transform=CorruptTransform(view, suite, textures) if suite.kind == "corrupt" else None,
        )
        columns = None if match.columns is None else torch.from_numpy(match.columns)
        predictions = inference.predictions(torch.from_numpy(match.labels), columns)
        assert isinstance(predictions, Predictions)  # multi-label models are refused
        return predictions, dict(inference.bad_images.seen)

    def _real(
        self, suite: Suite, predictions: Predictions, keys: list[str], match: ClassMatch, notes: list[str]
    ) -> Result:
        """Judged by ReaL labels: from a file, or the copy that timm carries."""
        path = self.options.real
        if not path:
            import timm.data

            path = str(Path(timm.data.__file__).parent / "_info" / "imagenet_real_labels.json")
        numbers = imagenet_numbers(self.tested.opened.classes)
        numbers = numbers if match.columns is None else numbers[match.columns]
        sets = real_sets(keys, read_real(path))
        judged = [i for i, labels in enumerate(sets) if labels]
        hits = np.array([numbers[predictions.top[i, 0]] in sets[i] for i in judged], dtype=np.bool_)
        return Result(suite, hits, [keys[i] for i in judged], notes=tuple(notes))

    def attack(self, suites: Sequence[Suite]) -> list[Result]:
        """Robust accuracy for each eps, smallest first. An image that fell at a smaller eps has fallen at a larger."""
        results: list[Result] = []
        fallen: dict[str, str] = {}
        for suite in sorted(suites, key=lambda s: s.eps):
            data, notes = open_images(suite, self.options.attack_limit or self.options.limit, self.sources)
            every = self._attack(data, suite, fallen)
            records = [r for r in every if "unreadable" not in r]
            fallen |= {r["key"]: r["by"] for r in records if r["by"]}
            correct = np.array([not r["by"] for r in records], dtype=np.bool_)
            broke = [r["by"] for r in records if r["by"] not in ("", "clean")]
            counts = [f"{name} broke {broke.count(name)}" for name in sorted(set(broke))]
            notes.append(f"{suite.name}: " + (", ".join(counts) or "nothing broke"))
            if len(records) < len(every):
                notes.append(f"{suite.name}: left out {counted(len(every) - len(records), 'unreadable image')}")
            results.append(Result(suite, correct, [r["key"] for r in records], notes=tuple(notes)))
        return results

    def _attack(self, data: DataSet, suite: Suite, fallen: dict[str, str]) -> list[Record]:
        """One record for each image, from the log as far as it goes."""
        options, view, match = self.options, self.tested.view, self.match(data, suite)
        facts = {
            **self._facts(data, match, list(data.keys()), view),
            "attack": (options.attack, suite.eps, budget_of(options), ATTACK_BATCH),
            "fallen": _digest(sorted(fallen)),
        }
        digest = _digest([json.dumps(facts, sort_keys=True, default=str)])[:8]  # other settings, another log
        path = self.folder / "attacks" / f"{options.attack}-{suite.eps:.6g}-{digest}.jsonl"
        batches = [range(i, min(i + ATTACK_BATCH, len(data))) for i in range(0, len(data), ATTACK_BATCH)]
        log = AttackLog(path, facts, [len(batch) for batch in batches])
        model = from_pixels(self.tested.net, view, match.columns)
        for samples in batches[len(log.batches) :]:
            log.add(self._attack_batch(model, data, samples, match.labels[data.labels], suite, fallen))
            self.progress(suite.name, samples.stop, len(data))
        return [record for records in log.batches for record in records]

    def _attack_batch(
        self, model: Model, data: DataSet, samples: range, labels: np.ndarray, suite: Suite, fallen: dict[str, str]
    ) -> list[Record]:
        """A record for each image; those that have fallen already are not attacked again."""
        options, view = self.options, self.tested.view
        records: list[Record] = []
        pixels, rows = [], []
        for i in samples:
            key = data.key(i)
            records.append({"key": key, "by": fallen.get(key, ""), "smaller eps": key in fallen})
            try:
                if key not in fallen:
                    pixels.append(view(data.picture(i))[0])
                    rows.append(len(records) - 1)
            except ImageError as error:
                if options.on_bad_image == "raise":
                    raise
                records[-1] = {"key": key, "by": "", "unreadable": str(error)}
        if not rows:
            return records
        device = next(self.tested.net.parameters()).device
        images = torch.from_numpy(np.stack(pixels)).to(device).permute(0, 3, 1, 2).float() / 255
        wanted = torch.from_numpy(labels[samples.start : samples.stop][rows]).to(device)
        batch = AttackBatch(model, images, wanted, [records[i]["key"] for i in rows], suite.eps)
        attacks = autoattack.attacks(options.attack, **budget_of(options))
        outcome = autoattack.run(
            batch, attacks, lambda attack, left: self.progress(suite.name, samples.start, len(data), attack)
        )
        for i, row in enumerate(rows):
            records[row] |= {
                "by": outcome.by[i],
                "label": int(wanted[i]),
                "clean": int(outcome.clean[i]),
                "attacked": int(outcome.attacked[i]),
                "distance": round(float(outcome.distance[i]), 7),
            }
        return records


def budget_of(options: RobustOptions) -> dict[str, int]:
    """How hard attacks try."""
    return {"steps": options.attack_steps, "queries": options.queries, "targets": options.targets}


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


class AttackLog:
    """The log of an attack: its settings, then one JSON line per image, appended batch by batch.

    A batch is appended by one write after all of its attacks, and counts only if all its lines are there; what a kill
    left half-written is cut off. An attack that was stopped ends with the same log as one that was not. `sizes` are
    those of the batches; `batches` are the records of the complete ones.
    """

    def __init__(self, path: Path, settings: Record, sizes: Sequence[int]) -> None:
        self.path = path
        self.batches: list[list[Record]] = []
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what follows the last newline was torn
        make_inside(path.parent.parent, path.parent.name)
        start = 1
        for size in sizes:
            batch = [record for line in lines[start : start + size] if (record := _record(line)) is not None]
            if len(batch) < size:
                break
            self.batches.append(batch)
            start += size
        header = json.dumps(settings, sort_keys=True, default=str).encode()
        write_atomically(path, b"".join(line + b"\n" for line in (header, *lines[1:start])))

    def add(self, records: Sequence[Record]) -> None:
        """Append the records of the next batch."""
        append(self.path, "".join(json.dumps(record) + "\n" for record in records).encode(), sync=True)
        self.batches.append(list(records))


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"key", "by"} <= set(record) else None


# All of it


@dataclass(frozen=True)
class Robustness:
    """What one or two models did: the table, the results of each model, and the folder."""

    table: Table
    results: list[list[Result]]
    folder: Path


def radius(text: str) -> float:
    """'4/255' or '0.5' -> a number above 0."""
    upper, slash, lower = text.partition("/")
    try:
        value = float(upper) / (float(lower) if slash else 1.0)
    except (ValueError, ZeroDivisionError) as error:
        raise EverytokenError(f"eps takes numbers such as 4/255 or 0.5, not {text!r}") from error
    if not value > 0:
        raise EverytokenError(f"eps must be above 0, not {text}")
    return value


def run_robustness(source: str, out: str, options: RobustOptions, progress: Progress) -> Robustness:
    """See `robustness`."""
    eps = [radius(text) for text in options.eps]
    corruptions = corruption_names(options.corruptions)
    suites = parse_suites(options.suite, corruptions, sorted(set(options.severities)), eps)
    autoattack.attacks(options.attack, **budget_of(options))  # a wrong name is found before hours of evaluation
    models = [(source, options.weights)]
    models += [(options.compare, "")] if options.compare else []
    sources = [weights or name for name, weights in models]
    folder = Path(out) if out else default_folder(source, "robust")
    names, results = [], []
    for name, weights in models:
        tested = open_tested(name, replace(options, weights=weights))
        runner = SuiteRunner(
            tested,
            options,
            folder / tested.folder,
            sources,
            lambda suite, *rest, name=tested.name: progress(f"{name}: {suite}", *rest),
        )
        results.append(runner.run(suites))
        names.append(f"{tested.name} ({tested.opened.parameters / 1e6:.1f} M parameters)")
    table = make_table(names, results)
    table.write(folder)
    return Robustness(table, results, folder)


def default_folder(source: str, name: str) -> Path:
    """RUN/name for a run folder, else name/SOURCE."""
    path = Path(source) / name if Path(source).is_dir() else Path(name) / slug(source)
    refuse_link(path)
    return path

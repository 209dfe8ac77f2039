"""Evaluate a model on suites. Predictions and logs of attacks are kept on disk: a stopped job goes on with the next."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm.data
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import Normalize

from everytoken import keyed
from everytoken.errors import EverytokenError
from everytoken.files import make_inside, read_bytes, refuse_link, write_atomically
from everytoken_lab.classes import ClassMatch, imagenet_numbers, match_classes
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.decode import ImageError, Picture
from everytoken_lab.engine.accuracy import Predictions, read_real, real_sets
from everytoken_lab.engine.run_folder import open_part
from everytoken_lab.evaluation.run import Inference, Voter, open_with
from everytoken_lab.models.description import weights_hash
from everytoken_lab.robust import Progress, RobustOptions, attacks
from everytoken_lab.robust.attacks import Attack, AttackBatch, Model
from everytoken_lab.robust.corruptions import corrupt, stored
from everytoken_lab.robust.suites import Suite, corruption_names, parse_suites
from everytoken_lab.robust.tables import Result, Table, make_table
from everytoken_lab.schema import counted, from_keywords

STORED_QUALITY = 85  # of the published ImageNet-C files
ATTACK_BATCH = 16  # images that are attacked together
_OWN_IMAGES = ("val", "own", "corrupt", "attack")  # suites whose images may be the user's training images
Record = dict[str, Any]


def slug(name: str) -> str:
    """A name that can be a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def from_pixels(net: nn.Module, view: EvalTransform, columns: np.ndarray | None = None) -> Model:
    """Images in 0..1 -> logits of the classes `columns` (None: all), as evaluation has them."""
    normalise = Normalize(view.mean, view.std)
    kept = slice(None) if columns is None else torch.from_numpy(columns).to(next(net.parameters()).device)
    return lambda images: net(normalise(images)).float()[:, kept]


class CorruptedSet(DataSet):
    """The evaluation crops of images, corrupted; random numbers are keyed by image, and the same for all severities."""

    def __init__(self, data: DataSet, view: EvalTransform, suite: Suite) -> None:
        self.data, self.view, self.suite = data, view, suite
        self.name, self.class_names, self.labels = data.name, data.class_names, data.labels

    def key(self, i: int) -> str:
        return self.data.key(i)

    def open_bytes(self, i: int) -> bytes:
        return self.data.open_bytes(i)

    def picture(self, i: int) -> Picture:
        pixels, _ = self.view(self.data.picture(i))
        rng = keyed.generator(0, self.key(i), "corrupt", self.suite.corruption)
        corrupted = corrupt(pixels, self.suite.corruption, self.suite.severity, rng)
        return Picture(stored(Image.fromarray(corrupted), STORED_QUALITY))


def open_images(suite: Suite, limit: int = 0, sources: Sequence[str] = ()) -> tuple[DataSet, list[str]]:
    """The suite's images, or `limit` of them, never those that one of the runs `sources` was trained on; and notes."""
    data, note = open_part(sources, suite.path, doubt=suite.kind in _OWN_IMAGES)
    if limit and limit < len(data):
        draws = [keyed.uniform(0, "limit", key) for key in data.keys()]  # noqa: SIM118
        data = data.subset(np.sort(np.argsort(draws, kind="stable")[:limit]))
    return data, [note] if note else []


class SuiteRunner:
    """One model on suites.

    Args:
        source: names the model, which is opened as `options` say.
        folder: gets a folder for these weights and this vote, with predictions and logs, which are used again while
            everything that decides them is the same.
        sources: what is compared; of data that one of these runs was trained on, only what it held out is used.
        progress: hears model and suite, how many images are done, of how many, and perhaps the attack.
    """

    def __init__(
        self,
        source: str,
        options: RobustOptions,
        folder: Path,
        sources: Sequence[str] = (),
        progress: Progress = lambda *_: None,
    ) -> None:
        self.opened = open_with(source, options)
        if self.opened.info.multi_label:
            raise EverytokenError(
                f"{self.opened.source} is a multi-label model, and robustness is measured by top-1 accuracy; "
                "`everytoken eval` gives its mAP on other images"
            )
        self.name = source if ":" in source or Path(source).is_dir() else Path(source).name
        self.view = eval_view(self.opened.info)
        self.net = Voter(self.opened, options.token_vote).eval().requires_grad_(False)  # normalised images -> logits
        self.weights = weights_hash(self.net)[:24]
        vote = f"-vote{self.net.vote:g}" if self.net.vote else ""
        self.folder = folder / slug(f"{self.name}-{self.weights[:6]}{vote}")
        refuse_link(self.folder)
        self.options, self.sources, self.progress = options, sources, progress

    def run(self, suites: Sequence[Suite]) -> list[Result]:
        """All of them; attacks last, the smallest eps first: an image that fell has fallen at a larger eps, too."""
        fallen: dict[str, str] = {}
        in_order = sorted(suites, key=lambda suite: suite.eps)  # 0 of all others
        return [self.attack(one, fallen) if one.kind == "attack" else self.evaluate(one) for one in in_order]

    def _tell(self, suite: Suite, *progress: Any) -> None:
        self.progress(f"{self.name}: {suite.name}", *progress)

    def _open(self, suite: Suite, view: EvalTransform, limit: int) -> tuple[DataSet, list[str], ClassMatch, Record]:
        """The images, notes on them, their classes among the model's, and what decides the model's answers."""
        data, notes = open_images(suite, limit, self.sources)
        where, restrict = f"{suite.name} ({suite.path})", self.options.restrict
        subset = suite.kind if suite.kind in ("a", "r") else ""  # of 200 classes
        match = match_classes(self.opened.classes, data.class_names, where, subset=subset, restrict=restrict)
        facts = {
            "weights": self.weights,
            "token vote": self.net.vote,
            "keys": _digest(data.keys()),
            "labels": _digest(map(str, match.labels[data.labels])),
            "columns": None if match.columns is None else _digest(map(str, match.columns)),
            "view": asdict(view),
        }
        return data, notes, match, facts

    def evaluate(self, suite: Suite) -> Result:
        """Predictions on one suite (not an attack), from the folder if they are there."""
        whole = replace(self.view, crop_pct=1.0)  # for images that are crops already: nothing is cut off
        view = whole if suite.kind == "c" else self.view
        data, notes, match, facts = self._open(suite, view, self.options.limit)
        if suite.kind == "corrupt":
            data, view = CorruptedSet(data, view, suite), whole
            facts |= {"corruption": suite.corruption, "severity": suite.severity, "program": 3}  # counts its changes
        note = json.dumps(facts, sort_keys=True, default=str)
        name = suite.corruption or Path(suite.path).name  # not the suite's: val and real have theirs in common
        path = self.folder / "predictions" / f"{name}-{_digest([suite.path, note])[:8]}.npz"
        saved = Predictions.saved(path, note)
        if saved is None:
            saved = self._predict(data, suite, match, view)
            make_inside(self.folder, path.parent.name)
            saved[0].save(path, note, saved[1])
        predictions, skipped = saved
        if skipped:
            notes.append(f"{suite.name}: left out {counted(len(skipped), 'unreadable image')}")
        keys = [data.key(i) for i in predictions.index.tolist()]
        if suite.kind == "real":
            correct, keys = self._judge_by_real(predictions, keys, match)
            return Result(suite, correct, keys, notes=tuple(notes))
        numbers = predictions.summary()
        return Result(suite, predictions.correct, keys, numbers["top5"], numbers["ece"], tuple(notes))

    def _predict(
        self, data: DataSet, suite: Suite, match: ClassMatch, view: EvalTransform
    ) -> tuple[Predictions, dict[str, str]]:
        """Predictions, and the images that could not be read (key -> reason)."""
        inference = Inference(self.net, data, view, self.options, progress=partial(self._tell, suite))
        predictions = inference.predictions(match)
        assert isinstance(predictions, Predictions)  # multi-label models are refused
        return predictions, dict(inference.bad_images.seen)

    def _judge_by_real(
        self, predictions: Predictions, keys: list[str], match: ClassMatch
    ) -> tuple[np.ndarray, list[str]]:
        """Which answers are among the ReaL labels of a file, or of timm's copy; and the images that have any."""
        path = self.options.real or str(Path(timm.data.__file__).parent / "_info" / "imagenet_real_labels.json")
        numbers = imagenet_numbers(self.opened.classes)[slice(None) if match.columns is None else match.columns]
        sets = real_sets(keys, read_real(path))
        judged = [i for i, labels in enumerate(sets) if labels]
        hits = np.array([numbers[predictions.top[i, 0]] in sets[i] for i in judged], dtype=np.bool_)
        return hits, [keys[i] for i in judged]

    def attack(self, suite: Suite, fallen: dict[str, str]) -> Result:
        """Robust accuracy for one eps. `fallen`: key -> attack, of images that fell at a smaller one; it is extended.

        The log, which appears when all images were attacked, has the settings, then one line per image.
        """
        options = self.options
        data, notes, match, facts = self._open(suite, self.view, options.attack_limit or options.limit)
        budget = {"steps": options.attack_steps, "queries": options.queries, "targets": options.targets}
        facts |= {"attack": (options.attack, suite.eps, budget, ATTACK_BATCH), "fallen": _digest(sorted(fallen))}
        header = json.dumps(facts, sort_keys=True, default=str)
        name = f"{options.attack}-{suite.eps:.6g}-{_digest([header])[:8]}.jsonl"  # other settings, another log
        path = make_inside(self.folder, "attacks") / name
        if path.exists():
            records = [json.loads(line) for line in read_bytes(path).decode().splitlines()[1:]]
        else:
            parts = attacks.chosen(options.attack, **budget)
            records = list(self._attacked(data, match, suite, parts, fallen))
            write_atomically(path, "\n".join([header, *map(json.dumps, records), ""]).encode())
        judged = [record for record in records if "unreadable" not in record]
        fallen |= {record["key"]: record["by"] for record in judged if record["by"]}
        broke = Counter(record["by"] for record in judged if record["by"] not in ("", "clean"))
        counts = ", ".join(f"{name} broke {count}" for name, count in sorted(broke.items()))
        notes.append(f"{suite.name}: {counts or 'nothing broke'}")
        if bad := len(records) - len(judged):
            notes.append(f"{suite.name}: left out {counted(bad, 'unreadable image')}")
        correct = np.array([not record["by"] for record in judged], np.bool_)
        return Result(suite, correct, [record["key"] for record in judged], notes=tuple(notes))

    def _attacked(
        self, data: DataSet, match: ClassMatch, suite: Suite, parts: dict[str, Attack], fallen: dict[str, str]
    ) -> Iterator[Record]:
        """A record for each image; those that have fallen already are not attacked again."""
        device = next(self.net.parameters()).device
        model = from_pixels(self.net, self.view, match.columns)
        for start in range(0, len(data), ATTACK_BATCH):
            keys = {i: data.key(i) for i in range(start, min(start + ATTACK_BATCH, len(data)))}
            records: dict[int, Record] = {}
            pixels: dict[int, np.ndarray] = {}
            for i, key in keys.items():
                records[i] = {"key": key, "by": fallen.get(key, ""), "smaller eps": key in fallen}
                try:
                    if key not in fallen:
                        pixels[i] = self.view(data.picture(i))[0]
                except ImageError as error:
                    if self.options.on_bad_image == "raise":
                        raise
                    records[i]["unreadable"] = str(error)
            if pixels:
                images = torch.from_numpy(np.stack(list(pixels.values()))).to(device).permute(0, 3, 1, 2).float() / 255
                wanted = torch.from_numpy(match.labels[data.labels[list(pixels)]]).to(device)
                batch = AttackBatch(model, images, wanted, [keys[i] for i in pixels], suite.eps)
                out = attacks.run(batch, parts, partial(self._tell, suite, start, len(data)))
                columns = (out.by, *(values.tolist() for values in (wanted, out.clean, out.attacked, out.distance)))
                for i, by, label, clean, attacked, far in zip(pixels, *columns, strict=True):
                    found = {"by": by, "label": label, "clean": clean, "attacked": attacked}
                    records[i] |= {**found, "distance": round(far, 7)}
            yield from records.values()
            self._tell(suite, start + len(keys), len(data))


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogateescape") + b"\n")
    return digest.hexdigest()


@dataclass(frozen=True)
class Robustness:
    """What one or two models did: the table, the results of each model, and the folder."""

    table: Table
    results: list[list[Result]]
    folder: Path


def radius(text: str) -> float:
    """'4/255' or '0.5' -> a number above 0."""
    upper, _, lower = text.partition("/")
    try:
        value = float(upper) / float(lower or 1)
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value < math.inf:
        raise EverytokenError(f"eps must be a number above 0, such as 4/255 or 0.5, got {text!r}")
    return value


def robustness(
    source: str | Path, out: str | Path = "", *, progress: Progress | None = None, **settings: Any
) -> Robustness:
    """Test a model, or two side by side, on several suites. Predictions and attack logs are cached.

    Args:
        source: a run folder, a weights file, timm:NAME, hf-hub:USER/NAME or registry:NAME.
        out: folder for tables, predictions and logs; default: RUN/robust, else robust/NAME.
        settings: fields of `RobustOptions`.
    """
    options = from_keywords(RobustOptions, settings, "robustness()")
    corruptions, severities = corruption_names(options.corruptions), sorted(set(options.severities))
    suites = parse_suites(options.suite, corruptions, severities, [radius(text) for text in options.eps])
    models = [(str(source), options.weights), *([(options.compare, "")] if options.compare else [])]
    sources = [weights or name for name, weights in models]
    folder = Path(out) if out else default_folder(str(source), "robust")
    names, results = [], []
    for name, weights in models:
        runner = SuiteRunner(name, replace(options, weights=weights), folder, sources, progress or (lambda *_: None))
        results.append(runner.run(suites))
        names.append(f"{runner.name} ({runner.opened.parameters / 1e6:.1f} M parameters)")
    table = make_table(names, results)
    table.write(folder)
    return Robustness(table, results, folder)


def default_folder(source: str, name: str) -> Path:
    """RUN/name for a run folder, else name/SOURCE."""
    path = Path(source) / name if Path(source).is_dir() else Path(name) / slug(source)
    refuse_link(path)
    return path

"""A model over images: evaluation with labels, prediction without, and what a run keeps of them.

A run is calibrated on its held-out images once, and keeps it in RUN/calibration.json for these weights. Weights that
`export` wrote carry theirs in their description. Published weights have none: nobody knows here which images they have
not seen.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.data.batch import Batch, Prefetcher, normalise
from everytoken.errors import EverytokenError
from everytoken.files import plain_json, sha256_of, write_atomically
from everytoken.models.common import make_attention_explicit
from everytoken.models.token_model import probe
from everytoken_lab import schema
from everytoken_lab.calibration import Calibration, calibrate
from everytoken_lab.classes import ClassMatch, imagenet_numbers, match_classes
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.decode import Picture
from everytoken_lab.data.loader import BadImages, Loader
from everytoken_lab.engine.accuracy import (
    AnyPredictions,
    Predictions,
    join_predictions,
    predictions_of,
    read_real,
    real_accuracy,
)
from everytoken_lab.engine.distributed import pick_device
from everytoken_lab.engine.options import TrainOptions, apply
from everytoken_lab.engine.run_folder import Run, open_part, run_of
from everytoken_lab.evaluation import EvalOptions, InferenceOptions, Progress
from everytoken_lab.maps.summary import sample_positions
from everytoken_lab.models.description import Description
from everytoken_lab.models.onnx import OnnxModel, faster
from everytoken_lab.models.open import OpenModel, open_model
from everytoken_lab.stats import Estimate

CALIBRATION, ANSWERS = "calibration.json", "report-predictions.npz"
"""Files of a run: calibration and answers of its best weights, on its validation images."""
FEWEST, MOST = 20, 1000  # images to calibrate on
NOT_FINITE = "the model's answers are not finite numbers: its weights are damaged, or mixed precision overflows (amp)."
LOGITS = 50_000_000  # numbers that are kept at most to calibrate: of an even sample of the images
WORTH_EXPORTING = 64 * 224 * 224  # pixels of all images from which on a faster program is made of the network first
CONVOLUTIONS = 10  # layers; networks with fewer are matrix products, and no faster in ONNX Runtime


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating one model on one dataset.

    `numbers` are top1, top5, loss, ece (and real_*), plus images, images_per_second and parameters; of multi-label
    models mAP, f1 and loss instead of the first four.
    """

    numbers: dict[str, float]
    predictions: AnyPredictions
    class_names: list[str]
    keys: list[str]
    skipped: dict[str, str] = field(default_factory=dict)  # unreadable images, key -> reason
    notes: tuple[str, ...] = ()  # what to know about the images that were used
    calibration: Calibration | None = None  # if it was asked for

    @property
    def top1(self) -> Estimate:
        """Top-1 accuracy, or mAP of multi-label models, in percent with its 95 % interval."""
        return self.predictions.accuracy

    def per_class(self) -> list[dict[str, Any]]:
        """For each class that has images: images, recall, precision (percent) and what it is taken for most."""
        return [row for row in self.predictions.per_class(self.class_names) if row["images"]]

    def to_csv(self, path: str | Path) -> None:
        """One line per image: key, label, prediction, confidence, loss; multi-label: no loss, ";" between labels."""
        p, names = self.predictions, self.class_names
        header, rows = ["key", "label", "prediction", "confidence"], []
        for i, (index, confidence) in enumerate(zip(p.index, p.confidence, strict=True)):
            if isinstance(p, Predictions):
                answer, loss = [names[p.label[i]], names[p.top[i, 0]]], [f"{p.loss[i]:.4f}"]
            else:
                chosen = (p.label[i], p.logits[i] > 0)
                answer, loss = [";".join(names[k] for k in np.flatnonzero(row)) for row in chosen], []
            rows.append([self.keys[index], *answer, f"{confidence:.4f}", *loss])
        write_csv(Path(path), [*header, "loss"] if isinstance(p, Predictions) else header, rows)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table; a cell that a spreadsheet would take for a formula gets a quote before it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in (header, *rows):
        writer.writerow([f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell for cell in row])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, schema.printable(text.getvalue()).encode())


class Voter(nn.Module):
    """Images -> class logits, plus `vote` times the strongest token logit of each class (the released evaluation).

    None is the vote that the run was validated with.
    """

    def __init__(self, opened: OpenModel, vote: float | None = None) -> None:
        super().__init__()
        self.model, self.vote = opened.model, opened.info.token_vote if vote is None else vote
        self._faster: list[Callable[[Tensor], Tensor]] = []  # in a list, or it might become a part of itself
        has_head = opened.model.uses_own_head or opened.model.token_head is not None
        if self.vote and (not has_head or opened.token_classes.count != opened.classes.count):
            raise EverytokenError(f"{opened.source} has no token head for its classes, so token_vote cannot be used")

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K]"""
        return self.model(images).voted(self.vote)

    def accelerated(self, example: Tensor) -> Callable[[Tensor], Tensor]:
        """The same by ONNX Runtime, for convolutional networks. Made once: the weights must not change."""
        layers = sum(isinstance(module, nn.Conv2d) for module in self.model.modules())
        if isinstance(self.model, OnnxModel) or layers < CONVOLUTIONS:
            return self
        if not self._faster:
            self._faster.append(faster(self, example))
        return self._faster[0]


def open_with(source: str | Path | OpenModel, options: InferenceOptions) -> OpenModel:
    """The model that options ask for, on their device; a loaded one is used as it is, but for crop and device."""
    device = pick_device(options.device)
    if not isinstance(source, OpenModel):
        source = open_model(source, architecture=options.model, weights=options.weights, img_size=options.img_size)
    source.model.to(device)
    return replace(source, info=replace(source.info, crop_pct=options.crop_pct or source.info.crop_pct))


def network_inputs(
    info: Description, pictures: Iterable[Picture], device: torch.device | str = "cpu"
) -> tuple[list[np.ndarray], Tensor]:
    """What evaluation shows a network of images: uint8 [H, W, 3] of each, and normalised [B, 3, H, W]."""
    view = eval_view(info)
    pixels = [np.ascontiguousarray(view(picture)[0]) for picture in pictures]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous().to(device)
    return pixels, normalise(images, view.mean, view.std)


class Inference:
    """A model (normalised images -> logits) over images, prepared by `view`; `dtype`: of mixed precision, or None."""

    def __init__(
        self,
        model: nn.Module,
        data: DataSet,
        view: EvalTransform,
        options: InferenceOptions,
        dtype: torch.dtype | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.data, self.view, self.dtype, self.progress = model, data, view, dtype, progress
        self.device = next(model.parameters()).device
        if dtype is not None and self.device.type == "cpu" and isinstance(model, Voter):
            sides = view.img_size if isinstance(view.img_size, tuple) else (view.img_size, view.img_size)
            make_attention_explicit(model, probe(model.model, sides))  # as training does, and so validation
        self.bad_images = BadImages(options.on_bad_image)
        how: dict[str, Any] = {"workers": options.workers, "pin_memory": self.device.type == "cuda"}
        size = options.batch_size or (8 if self.device.type == "cpu" else 64)
        self.loader = Loader(data, view, size, train=False, bad_images=self.bad_images, **how)

    @torch.no_grad()
    def batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """Every image once, with its logits."""
        forward: Callable[[Tensor], Tensor] = self.model
        for number, batch in enumerate(self.views()):
            if number == 0 and self.dtype is None and isinstance(self.model, Voter) and len(batch) > 2:
                pixels = len(self.data) * batch.images[0, 0].numel()
                forward = self.model.accelerated(batch.images[:3]) if pixels >= WORTH_EXPORTING else forward
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
                logits = forward(batch.images)
            yield batch, logits.float()

    @torch.no_grad()
    def views(self) -> Iterator[Batch]:
        """Every image once, as the network sees it, on the device."""
        done, tell = 0, self.progress or (lambda _done, _total: None)
        tell(done, len(self.data))
        with contextlib.closing(self.loader):
            for batch in Prefetcher(self.loader.epoch(0), self.device, self.view.mean, self.view.std):
                yield batch
                done += len(batch)
                tell(done, len(self.data))

    def predictions(
        self,
        match: ClassMatch,
        keep: Callable[[Tensor, Tensor, Tensor], None] | None = None,
        multi_label: bool = False,
    ) -> AnyPredictions:
        """What each image got; `keep` is called with positions, labels and logits of each batch."""
        parts: list[AnyPredictions] = []
        labels = torch.from_numpy(match.labels).to(self.device)
        columns = slice(None) if match.columns is None else torch.from_numpy(match.columns).to(self.device)
        for batch, logits in self.batches():
            assert batch.labels is not None
            assert batch.indices is not None
            chosen = logits[:, columns]
            truth = _many_labels(batch.labels, labels, chosen) if multi_label else labels[batch.labels]
            parts.append(predictions_of(batch.indices, truth, chosen))
            if keep is not None:
                keep(batch.indices, truth, chosen)
        predictions = join_predictions(parts)
        if not np.isfinite(predictions.confidence).all():
            raise EverytokenError(NOT_FINITE)
        return predictions


def _many_labels(labels: Tensor, numbers: Tensor, logits: Tensor) -> Tensor:
    """[B, K] labels in the model's classes, of one label [B] or several [B, classes of the data]."""
    out = torch.zeros(logits.shape, dtype=torch.uint8, device=logits.device)
    if labels.dim() == 1:
        return out.scatter_(1, numbers[labels][:, None], 1)
    return out.scatter_reduce_(1, numbers.expand(len(labels), -1), labels.to(torch.uint8), "amax")


def evaluate(
    source: str | Path | OpenModel,
    data: str | Path | DataSet,
    *,
    progress: Progress | None = None,
    calibrates: bool = False,
    **settings: Any,
) -> Evaluation:
    """Accuracy of a model: top-1, top-5, loss, calibration error, a table of classes, what each image got.

    Example:
        >>> lab.evaluate("runs/first", "photos").numbers["top1"]

    Args:
        source: as for `load`, or a loaded model.
        data: a folder with val/, a folder of class folders, tar shards, torchvision:NAME, or an open dataset.
        calibrates: also say what the images tell about the model's probabilities.
        settings: fields of `EvalOptions`.
    """
    options = schema.from_keywords(EvalOptions, settings, "evaluate()")
    opened = open_with(source, options)
    dataset, note = data, ""
    if not isinstance(dataset, DataSet):
        name = opened.source if isinstance(source, OpenModel) else options.weights or str(source)
        dataset, note = open_part([name], str(data), options.split)
    match = match_classes(opened.classes, dataset.class_names, dataset.name)
    multi_label = opened.info.multi_label
    if dataset.multi_label and not multi_label:
        raise EverytokenError(f"{dataset.name} is multi-label, but {opened.source} answers one class per image")
    if multi_label and options.real:
        raise EverytokenError(f"{opened.source} is a multi-label model, which has no ReaL accuracy")
    imagenet = imagenet_numbers(opened.classes) if options.real else None
    model = Voter(opened, options.token_vote).eval()
    dtype = opened.info.amp_dtype(options.amp)
    inference = Inference(model, dataset, eval_view(opened.info), options, dtype, progress)
    kept: list[list[Tensor]] = []
    step = -(-len(dataset) * opened.num_classes // LOGITS)

    def keep(*batch: Tensor) -> None:
        chosen = torch.where(batch[0].cpu() % step == 0)[0]
        kept.append([values[chosen.to(values.device, non_blocking=True)].cpu() for values in batch])

    started = time.perf_counter()
    predictions = inference.predictions(match, keep=keep if calibrates else None, multi_label=multi_label)
    seconds = time.perf_counter() - started
    keys = list(dataset.keys())
    numbers: dict[str, float] = predictions.summary()
    numbers |= {"images": len(predictions), "images_per_second": len(predictions) / seconds}
    numbers["parameters"] = opened.parameters
    if options.real and isinstance(predictions, Predictions):
        numbers |= real_accuracy(predictions, keys, read_real(options.real), imagenet)
    names = list(opened.class_names)
    if not opened.classes.or_imagenet().names:
        for folder, output in zip(dataset.class_names, match.labels.tolist(), strict=True):
            names[output] = folder
    calibration = None
    if calibrates:
        indices, truth, logits = (torch.cat(values).numpy() for values in zip(*kept, strict=True))
        order = np.argsort(indices)  # batches come in any order
        calibration = calibrate(logits[order], truth[order])
    notes, skipped = (note,) if note else (), dict(inference.bad_images.seen)
    return Evaluation(numbers, predictions, names, keys, skipped, notes, calibration)


# -- what a run keeps --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunCalibration:
    """The content of the file. weights: hash of the weights file that it is about."""

    weights: str
    calibration: Calibration


def splits(run: Run, data: str = "") -> tuple[DataSet, DataSet]:
    """Training and validation images of a run; `data`: where its images are now, if they have moved.

    They are the same where cross-validation judged it.
    """
    from everytoken_lab.training.build import Inputs

    settings = {name: value for name, value in run.config.items() if name == "val_split"}
    settings["data"] = data or run.own_data()
    for name in ("corrections", *(("exclude",) if run.cross_validated else ())):
        if (file := run.place(name)) is not None:
            settings[name] = str(file)
    options = apply(TrainOptions(), settings, f"{run.path}/config.yaml")
    if run.cross_validated:
        whole = Inputs().undivided(options)
        return whole, whole
    train, val, _ = Inputs().splits(options)
    return train, val


def validation_set(run: Run, data: str = "") -> DataSet:
    """The validation images of a run."""
    return splits(run, data)[1]


def read_calibration(run: Run, weights: Path) -> Calibration | None:
    """What the run keeps about these weights; None if nothing, or if it is about others."""
    with contextlib.suppress(schema.SchemaError, OSError):  # a torn file is made again
        kept = schema.read_json(run.path / CALIBRATION, RunCalibration)
        if kept.weights == sha256_of(weights):
            return kept.calibration
    return None


def keep_calibration(run: Run, weights: Path, calibration: Calibration) -> None:
    """Write it to the run, for the next time; a folder that cannot be written is only slower then."""
    with contextlib.suppress(OSError, EverytokenError):
        content = plain_json(asdict(RunCalibration(sha256_of(weights), calibration)))
        write_atomically(run.path / CALIBRATION, content.encode())


def stamp(weights: Path, images: DataSet) -> str:
    """Changes when the weights or the images do."""
    content = hashlib.sha256(sha256_of(weights).encode())
    names = json.dumps([images.name, images.class_names, list(images.keys())])
    content.update(names.encode("utf-8", "surrogateescape"))
    content.update(images.labels.tobytes())
    return content.hexdigest()


def calibrated(opened: OpenModel, options: InferenceOptions) -> tuple[OpenModel, str]:
    """The model with the calibration of its run, and a remark if that was made now or cannot be made."""
    run = run_of(opened.source) if Path(opened.source).is_file() else None
    if opened.info.calibration is not None or run is None:
        return opened, ""
    weights, remark = Path(opened.source), ""
    calibration = read_calibration(run, weights)
    if calibration is None:
        try:
            calibration = _calibrate(opened, run, options)
        except (EverytokenError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            return opened, f"probabilities are not calibrated: the run's held-out images cannot be used ({reason})"
        keep_calibration(run, weights, calibration)
        remark = (
            f"calibrated on {calibration.images:,} images that the run held out (temperature "
            f"{calibration.temperature:.2f})"
        )
    return replace(opened, info=replace(opened.info, calibration=calibration)), remark


def shown_probabilities(info: Description, logits: Tensor) -> Tensor:
    """What people are shown, [..., K]: with the temperature of the calibration, if there is one."""
    if not logits.isfinite().all():
        raise EverytokenError(NOT_FINITE)
    scaled = logits.float() / (1.0 if info.calibration is None else info.calibration.temperature)
    return scaled.sigmoid() if info.multi_label else scaled.softmax(-1)


def _calibrate(opened: OpenModel, run: Run, options: InferenceOptions) -> Calibration:
    if run.cross_validated:
        raise EverytokenError("it was trained on all of its images, and what cross-validation found is not kept")
    images = validation_set(run)
    if len(images) < FEWEST:
        raise EverytokenError(f"there are fewer than {FEWEST}")
    some = images.subset(sample_positions(len(images), MOST))
    how: dict[str, Any] = {name: getattr(options, name) for name in ("batch_size", "workers", "device")}
    calibration = evaluate(opened, some, calibrates=True, on_bad_image="skip", **how).calibration
    assert calibration is not None
    return calibration

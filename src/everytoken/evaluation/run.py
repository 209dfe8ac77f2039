"""A model over images: evaluation with labels, prediction without."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.classes import imagenet_numbers, match_classes
from everytoken.data.augment import EvalTransform
from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.datasets import DataSet, FolderReader, ReaderSet, gather_images
from everytoken.data.loader import BadImages, Loader
from everytoken.engine.accuracy import Predictions, read_real, real_accuracy
from everytoken.engine.distributed import pick_device
from everytoken.engine.held_out import open_part
from everytoken.errors import EverytokenError
from everytoken.evaluation import EvalOptions, InferenceOptions, PredictOptions, Progress
from everytoken.files import write_atomically
from everytoken.models.open import Description, OpenModel, open_model
from everytoken.stats import Estimate


@dataclass(frozen=True)
class LoadedModel(OpenModel):
    """An opened model that can be asked: `et.load`."""

    def predict(self, images: str | Path | Sequence[str | Path], **options: Any) -> ImagePredictions:
        """The classes of images: files and folders. Options: fields of `PredictOptions`."""
        from everytoken.evaluation import predict

        return predict(self, images, **options)

    def evaluate(self, data: str | Path | DataSet, **options: Any) -> Evaluation:
        """Accuracy on labelled images. Options: fields of `EvalOptions`."""
        from everytoken.evaluation import evaluate

        return evaluate(self, data, **options)


@dataclass(frozen=True)
class Evaluation:
    """The result of evaluating one model on one dataset.

    Attributes:
        numbers: top1, top5, loss, ece (and real_*), plus images, images_per_second and parameters.
        predictions: what each image got.
        class_names: of the model's answers.
        keys: of the images.
        skipped: unreadable images, key -> reason.
        notes: what to know about the images that were used.
    """

    numbers: dict[str, float]
    predictions: Predictions
    class_names: list[str]
    keys: list[str]
    skipped: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def top1(self) -> Estimate:
        """Top-1 accuracy in percent with its 95 % interval."""
        return self.predictions.accuracy

    def per_class(self) -> list[dict[str, Any]]:
        """For each class that has images: images, recall, precision (percent) and what it is taken for most."""
        return [row for row in self.predictions.per_class(self.class_names) if row["images"]]

    def to_csv(self, path: str | Path) -> None:
        """One line per image: key, label, prediction, confidence, loss."""
        p, names = self.predictions, self.class_names
        rows = [
            [self.keys[i], names[label], names[top[0]], f"{confidence:.4f}", f"{loss:.4f}"]
            for i, label, top, confidence, loss in zip(p.index, p.label, p.top, p.confidence, p.loss, strict=True)
        ]
        write_csv(Path(path), ["key", "label", "prediction", "confidence", "loss"], rows)


@dataclass(frozen=True)
class ImagePrediction:
    """The most likely classes of one image, best first."""

    path: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class ImagePredictions(Sequence[ImagePrediction]):
    """Predictions in the order of the images; `skipped` says which images could not be read, and why."""

    images: tuple[ImagePrediction, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: Any) -> Any:
        return self.images[i]

    def __iter__(self) -> Iterator[ImagePrediction]:
        return iter(self.images)

    def to_csv(self, path: str | Path) -> None:
        """One line per image: its path, class, probability, and the next best classes."""
        count = max((len(image.classes) for image in self.images), default=1)
        more = [f"{what} {i}" for i in range(2, count + 1) for what in ("class", "probability")]
        rows = []
        for image in self.images:
            pairs = zip(image.classes, image.probabilities, strict=True)
            rows.append([image.path, *(cell for name, p in pairs for cell in (name, f"{p:.4f}"))])
        write_csv(Path(path), ["image", "class", "probability", *more], rows)


def write_csv(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table; a cell that a spreadsheet would take for a formula gets a quote before it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in (header, *rows):
        writer.writerow([f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell for cell in row])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.getvalue().encode())


class Voter(nn.Module):
    """Images -> class logits, plus `vote` times the strongest token logit of each class (the released evaluation).

    None is the vote that the run was validated with.
    """

    def __init__(self, opened: OpenModel, vote: float | None = None) -> None:
        super().__init__()
        self.model, self.vote = opened.model, opened.info.token_vote if vote is None else vote
        if self.vote and not (opened.model.uses_own_head or opened.model.token_head is not None):
            raise EverytokenError(f"{opened.source} has no token head, so token_vote cannot be used")
        if self.vote and opened.token_classes.count != opened.classes.count:
            raise EverytokenError(
                f"the token head of {opened.source} has other classes than its class head, so token_vote cannot be used"
            )

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, K]"""
        return self.model(images).voted(self.vote)


def eval_view(info: Description) -> EvalTransform:
    """How a model wants to see images in evaluation."""
    return EvalTransform(
        img_size=(info.img_size[0], info.img_size[1]),
        crop_pct=info.crop_pct,
        interpolation=info.interpolation,
        mean=info.mean,
        std=info.std,
    )


def open_with(source: str | Path | OpenModel, options: InferenceOptions) -> OpenModel:
    """The model that options ask for, on their device; a loaded one is used as it is, but for crop and device."""
    device = pick_device(options.device)
    if isinstance(source, OpenModel):
        source.model.to(device)
        crop_pct = options.crop_pct or source.info.crop_pct
        return replace(source, info=replace(source.info, crop_pct=crop_pct))
    return open_model(
        source,
        architecture=options.model,
        weights=options.weights,
        img_size=options.img_size,
        crop_pct=options.crop_pct,
        device=device,
    )


class Inference:
    """A model over images. `batches` gives (batch, logits), each image once.

    Args:
        model: normalised images -> logits.
        view: how it wants to see them.
        options: batch size, workers, what to do with images that cannot be read.
        transform: another way to make the view, which may change the pixels.
    """

    def __init__(
        self,
        model: nn.Module,
        data: DataSet,
        view: EvalTransform,
        options: InferenceOptions,
        amp: bool = False,
        progress: Progress | None = None,
        transform: Callable[..., tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> None:
        self.model, self.data, self.view, self.amp, self.progress = model, data, view, amp, progress
        self.device = next(model.parameters()).device
        self.bad_images = BadImages(options.on_bad_image)
        self.loader = Loader(
            data,
            transform or view,
            options.batch_size,
            train=False,
            workers=options.workers,
            bad_images=self.bad_images,
            pin_memory=self.device.type == "cuda",
        )

    @torch.no_grad()
    def batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """Every image once."""
        done = 0
        with closing(self.loader):
            for batch in Prefetcher(self.loader.epoch(0), self.device, self.view.mean, self.view.std):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
                    logits = self.model(batch.images)
                yield batch, logits.float()
                done += len(batch)
                if self.progress is not None:
                    self.progress(done, len(self.data))

    def predictions(self, labels: Tensor, columns: Tensor | None = None) -> Predictions:
        """What each image got.

        Args:
            labels: the class of the model (or column) for each class of the data.
            columns: outputs that may be answered; None: all.
        """
        parts = []
        labels = labels.to(self.device)
        for batch, logits in self.batches():
            assert batch.labels is not None
            assert batch.indices is not None
            chosen = logits if columns is None else logits[:, columns.to(logits.device)]
            parts.append(Predictions.of_batch(batch.indices, labels[batch.labels], chosen))
        return Predictions.join(parts)


def run_evaluation(
    source: str | Path | OpenModel, data: str | Path | DataSet, options: EvalOptions, progress: Progress | None
) -> Evaluation:
    """See `evaluate`."""
    opened = open_with(source, options)
    notes: tuple[str, ...] = ()
    if isinstance(data, DataSet):
        dataset = data
    else:
        name = opened.source if isinstance(source, OpenModel) else options.weights or str(source)
        dataset, note = open_part([name], str(data), options.split)
        notes = (note,) if note else ()
    labels = torch.from_numpy(match_classes(opened.classes, dataset.class_names, dataset.name).labels)
    imagenet = imagenet_numbers(opened.classes) if options.real else None
    model = Voter(opened, options.token_vote).eval()
    inference = Inference(model, dataset, eval_view(opened.info), options, options.amp, progress)
    started = time.perf_counter()
    predictions = inference.predictions(labels)
    seconds = time.perf_counter() - started
    keys = [dataset.key(i) for i in range(len(dataset))]
    numbers: dict[str, float] = predictions.summary()
    numbers |= {"images": len(predictions), "images_per_second": len(predictions) / seconds}
    numbers["parameters"] = opened.parameters
    if options.real:
        numbers |= real_accuracy(predictions, keys, read_real(options.real), imagenet)
    names = list(opened.class_names)
    if not opened.classes.or_imagenet().names:
        for folder, output in zip(dataset.class_names, labels.tolist(), strict=True):
            names[output] = folder
    return Evaluation(numbers, predictions, names, keys, dict(inference.bad_images.seen), notes)


def run_prediction(
    source: str | Path | OpenModel, images: Sequence[str], options: PredictOptions, progress: Progress | None
) -> ImagePredictions:
    """See `predict`."""
    if options.top < 1:
        raise EverytokenError(f"top is {options.top}; it takes 1 or more")
    root, names = gather_images(images)
    opened = open_with(source, options)
    data = ReaderSet(str(root), FolderReader(root, names), range(len(names)), names, [-1] * len(names), [])
    model = Voter(opened, options.token_vote).eval()
    inference = Inference(model, data, eval_view(opened.info), options, options.amp, progress)
    out: dict[int, ImagePrediction] = {}
    for batch, logits in inference.batches():
        assert batch.indices is not None
        values, classes = logits.softmax(-1).topk(min(options.top, logits.shape[1]))
        for i, row, numbers in zip(batch.indices.tolist(), values.tolist(), classes.tolist(), strict=True):
            named = tuple(opened.class_names[number] for number in numbers)
            out[i] = ImagePrediction(str(root / names[i]), named, tuple(row))
    return ImagePredictions(tuple(out[i] for i in sorted(out)), dict(inference.bad_images.seen))

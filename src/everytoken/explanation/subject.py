"""A model to be explained: where it comes from, what its classes are called, and how it looks at an image file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.data import infer_imagenet_subset, resolve_data_config
from torch import Tensor

from everytoken.annotators.imagenet_registry import MEAN, STD, registry_model
from everytoken.classes import ClassList, imagenet_classes
from everytoken.data import placement as pl
from everytoken.data.decode import Picture
from everytoken.data.evaluation import EvalTransform
from everytoken.errors import EverytokenError, did_you_mean
from everytoken.evaluation.run import view_of
from everytoken.models import TokenModel
from everytoken.models.load import Description, create_sized, load_model

Area = tuple[float, float, float, float]


@dataclass(frozen=True)
class Look:
    """What a model sees of an image.

    Attributes:
        pixels: uint8 [H, W, 3], the network's input before normalisation.
        images: float32 [1, 3, H, W], the network's input.
        area: (x0, y0, x1, y1) of the source image, in fractions, that it shows.
    """

    pixels: np.ndarray
    images: Tensor
    area: Area


@dataclass(frozen=True)
class Subject:
    """A model in evaluation mode, and what one needs to know of it.

    Attributes:
        name: short, for pictures.
        source: as the user named it.
        model: its token view.
        classes: of the class head; token_classes: of the token head (those of the class head without one).
        view: how it looks at images.
        remark: something odd about it (random weights), or "".
    """

    name: str
    source: str
    model: TokenModel
    classes: ClassList
    token_classes: ClassList
    view: EvalTransform
    remark: str = ""

    def look(self, path: str | Path) -> Look:
        """Read an image file as evaluation does: upright, resized, centre crop."""
        if not Path(path).is_file():
            more = " It is a folder: name the files, such as folder/*.jpg." if Path(path).is_dir() else ""
            raise EverytokenError(f"there is no image file {path}.{more}")
        pixels, placement = self.view(Picture(path, str(path)))
        pixels = np.ascontiguousarray(pixels)
        config = self.view.config
        mean, std = (torch.tensor(v)[:, None, None] for v in (config.mean, config.std))
        device = next(self.model.parameters()).device
        images = (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - mean) / std
        return Look(pixels, images[None].to(device), pl.box(placement))

    def find_class(self, text: str) -> int:
        """The class that --class names: its name, a part of it that ImageNet knows, or its number."""
        found = self.classes.find(text)
        if found is None and text.isdigit():
            found = int(text)
        if found is None or not 0 <= found < self.classes.count:
            some = ", ".join(self.classes.names[:4]) or "not named"
            raise EverytokenError(
                f"{self.name} has no class {text!r}.{self.classes.near(text)} Its {self.classes.count} classes are "
                f"{some}{', ...' if self.classes.count > 4 else ''}; a number from 0 to {self.classes.count - 1} will "
                "do, too."
            )
        return found


def name_of(classes: ClassList, number: int) -> str:
    """A class's name for people."""
    return classes.names[number] if number < len(classes.names) else f"class {number}"


def load_subject(
    source: str,
    checkpoint: str = "",
    architecture: str = "",
    img_size: int = 0,
    names: Sequence[str] = (),
    untrained: bool = False,
    device: str = "cpu",
) -> Subject:
    """The model that `source` names.

    Args:
        source: a run folder, a weights file, timm:NAME or registry:efficientnet_lite0|1|2.
        checkpoint: with timm:NAME, the weights to use instead of pretrained ones.
        architecture: timm name, for a weights file that does not say it itself.
        img_size: side of the input; 0: the model's own.
        names: of the classes, where the weights do not say them.
        untrained: with timm:NAME, random weights. To see that a method works, not what a model has learnt.
    """
    kind, _, name = source.partition(":")
    if (checkpoint or untrained) and kind != "timm":
        raise EverytokenError(f"--checkpoint and --untrained go with timm:NAME, not with {source!r}.")
    if kind == "registry":
        subject = _from_registry(source, name, img_size)
    elif kind == "timm" and untrained:
        subject = _untrained(source, name, img_size)
    else:
        where = checkpoint or source
        loaded = load_model(where, name if checkpoint else architecture, img_size=img_size or None)
        subject = _subject(source, loaded.model, loaded.description, kind == "timm" and not checkpoint)
    if names:
        if len(names) != subject.classes.count:
            raise EverytokenError(f"{len(names)} class names were given; {source} has {subject.classes.count} classes.")
        same = subject.token_classes == subject.classes
        classes = ClassList(len(names), tuple(names))
        subject = replace(subject, classes=classes, token_classes=classes if same else subject.token_classes)
    subject.model.to(device).eval()
    return subject


def _subject(source: str, model: TokenModel, about: Description, pretrained: bool, remark: str = "") -> Subject:
    count = int(model.backbone.num_classes)  # type: ignore[arg-type]
    if count < 1:
        raise EverytokenError(f"{source} has no classifier (0 classes), so there is nothing to explain.")
    subset = infer_imagenet_subset(model.backbone) if pretrained else None
    if len(about.class_names) == count:
        classes = ClassList(count, about.class_names)
    else:
        classes = imagenet_classes(subset) if subset else ClassList(count)
    own: Any = getattr(model.backbone, "aux_head", None)
    if model.token_head is None and not model.uses_own_head and getattr(own, "out_features", 0) == count:
        model.add_token_head(count)  # the one that the backbone brought
    tokens = classes
    if about.token_class_names and about.token_class_names != about.class_names:
        tokens = ClassList(len(about.token_class_names), about.token_class_names)
    view = EvalTransform(view_of(about))
    return Subject(_short(source, about.architecture), source, model, classes, tokens, view, remark)


def _short(source: str, architecture: str) -> str:
    """`runs/first` -> 'first · deit_tiny...'; timm:NAME and registry:NAME as they are."""
    if source.partition(":")[0] in ("timm", "registry"):
        return source
    path = Path(source)
    place = path.parent if path.is_file() and path.suffix == ".safetensors" else path
    return f"{place.name} · {architecture}"


def _from_registry(source: str, name: str, img_size: int) -> Subject:
    backbone = registry_model(name)
    config = resolve_data_config({}, model=backbone)
    side = img_size or -(-config["input_size"][1] // 32) * 32  # whole cells
    about = Description(name, img_size=(side, side), mean=MEAN, std=STD, crop_pct=config["crop_pct"])
    subject = _subject(source, TokenModel(backbone).eval(), about, pretrained=False)
    return replace(subject, classes=imagenet_classes(), token_classes=imagenet_classes())


def _untrained(source: str, name: str, img_size: int) -> Subject:
    if not timm.is_model(name.split(".")[0]):
        raise EverytokenError(f"timm knows no model {name!r}.{did_you_mean(name, timm.list_models())}")
    torch.manual_seed(0)
    backbone, _ = create_sized(name, {"img_size": (img_size, img_size)} if img_size else {})
    config = resolve_data_config({}, model=backbone)
    side = (img_size, img_size) if img_size else (config["input_size"][1], config["input_size"][2])
    about = Description(
        name, img_size=side, mean=config["mean"], std=config["std"], crop_pct=config["crop_pct"],
        interpolation=config["interpolation"],
    )  # fmt: skip
    return _subject(source, TokenModel(backbone).eval(), about, True, "random weights: this means nothing")

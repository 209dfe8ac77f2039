"""The segmenter: backbone, pyramid for plain transformers, head and auxiliary head.

The papers' models come out with the parameters of their tables (millions; ADE20K's 150 classes, 512 px):
LV-ViT-S + FCN 30, LV-ViT-S / M / L + UperNet 44 / 77 / 209, Swin-T / S / B + UperNet 60 / 81 / 121. Tests count them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.models.open import Description, find_weights
from everytoken.models.weights import load_weights
from everytoken.tasks.backbone import Features, build_features, description_from, read_note, rebuild_features
from everytoken.tasks.options import BackboneOptions
from everytoken.tasks.pyramid import SideLayers
from everytoken.tasks.segment.heads import FcnHead, UperHead, resize
from everytoken.tasks.segment.options import DecoderOptions

METADATA = "everytoken-segment"  # the key in the weights file


@dataclass(frozen=True)
class SegmenterDescription:
    """What somebody needs to know to use a segmenter's weights.

    Attributes:
        backbone: how its timm model was made, and the input's normalisation; img_size is the training crop.
        decoder: `DecoderOptions` as a dict.
        class_names: of the outputs.
        evaluation: how it was validated, as a dict of `EvalOptions`.
    """

    backbone: Description
    decoder: dict[str, Any]
    class_names: tuple[str, ...]
    taps: tuple[int, ...] = ()
    evaluation: dict[str, Any] = field(default_factory=dict)

    def to_metadata(self) -> dict[str, str]:
        """As safetensors keeps it, in one entry."""
        return {METADATA: json.dumps(asdict(self))}

    @staticmethod
    def from_file(path: Path) -> SegmenterDescription | None:
        """Of a weights file; None if it is not a segmenter's."""
        values = read_note(path, METADATA)
        if values is None:
            return None
        return SegmenterDescription(
            description_from(values["backbone"]), values["decoder"], tuple(values["class_names"]),
            tuple(values["taps"]), values["evaluation"],
        )  # fmt: skip


class Segmenter(nn.Module):
    """Images -> class logits for every pixel.

    Args:
        features: the backbone.
        options: head and auxiliary head.
        classes: outputs.
    """

    def __init__(self, features: Features, options: DecoderOptions, classes: int) -> None:
        super().__init__()
        self.features = features
        dims = features.dims
        self.pyramid: nn.Module = nn.Identity()
        if features.plain:
            fcn = options.head == "fcn"
            last = options.pyramid_channels or (768 if fcn else 2048)
            finer = (1, 2) if fcn else (4, 2, 1, 1)
            if len(dims) < len(finer):
                raise EverytokenError(f"--taps: the {options.head} head wants {len(finer)} blocks, got {len(dims)}")
            self.pyramid = SideLayers(dims, features.strides, last, finer)
            dims = self.pyramid.dims
        channels = options.channels or (256 if options.head == "fcn" else 512)
        self.head: nn.Module
        if options.head == "fcn":
            self.head = FcnHead(dims, classes, channels, options.convs, dropout=options.dropout)
        else:
            self.head = UperHead(dims, classes, channels, options.dropout)
        self.aux: nn.Module | None = None
        if options.aux_weight:
            aux_channels = options.aux_channels or 256
            self.aux = FcnHead(dims, classes, aux_channels, index=max(len(dims) - 2, 0), dropout=options.dropout)
        if options.head == "fcn":
            for i in range(len(features.norms) - (2 if self.aux is not None else 1)):
                features.norms[i] = nn.Identity()  # of maps that nothing looks at

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] -> logits [B, K, H, W]."""
        return self._to_pixels(self.head(self.pyramid(self.features(images))), images)

    def both(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits of the head and of the auxiliary head, [B, K, H, W] each."""
        maps = self.pyramid(self.features(images))
        aux = None if self.aux is None else self._to_pixels(self.aux(maps), images)
        return self._to_pixels(self.head(maps), images), aux

    def _to_pixels(self, logits: Tensor, images: Tensor) -> Tensor:
        """Interpolate to the padded image that the backbone saw, and cut off the padding."""
        m, (height, width) = self.features.multiple, images.shape[-2:]
        padded = (-(-height // m) * m, -(-width // m) * m)
        return resize(logits, padded)[..., :height, :width]


@dataclass(frozen=True)
class LoadedSegmenter:
    """A segmenter in evaluation mode with its description."""

    model: Segmenter
    description: SegmenterDescription
    source: str


def build_segmenter(
    backbone: BackboneOptions, decoder: DecoderOptions, size: int | tuple[int, int], class_names: tuple[str, ...]
) -> tuple[Segmenter, SegmenterDescription]:
    """A segmenter to be trained, its backbone with the weights that the options name."""
    features, about = build_features(backbone, size)
    model = Segmenter(features, decoder, len(class_names))
    return model, SegmenterDescription(about, asdict(decoder), class_names, tuple(features.indices))


def load_segmenter(source: str | Path) -> LoadedSegmenter:
    """A trained segmenter from its run folder or a weights file of it."""
    path = find_weights(source)
    about = SegmenterDescription.from_file(path) if path.suffix == ".safetensors" else None
    if about is None:
        raise EverytokenError(
            f"{path} is not a segmenter of `everytoken segment train`. To read a classifier's token head as a "
            "segmenter, add --head token."
        )
    features = rebuild_features(about.backbone, about.taps)
    model = Segmenter(features, DecoderOptions(**about.decoder), len(about.class_names))
    report = load_weights(model, path)
    if report.missing or report.left_out:
        raise EverytokenError(f"{path} does not fit the segmenter that it describes:\n{report}")
    return LoadedSegmenter(model.eval(), about, str(path))


@torch.no_grad()
def count(model: nn.Module) -> int:
    """Trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)

"""The detector: backbone, pyramid, proposals and heads.

Backbones with stages (Swin, ConvNeXt, ResNet) get a feature pyramid (Lin et al. 2017); plain transformers a simple one
from their last map (Li et al. 2022). Levels at strides 4 to 32 feed the heads; one more, at 64, is for proposals only.
The papers' models come out with the parameters of their tables (millions; COCO's 80 classes): Cascade Mask R-CNN with
Swin-T / S / B 86 / 107 / 145 (with boxes per class, as the recipes have it; class-agnostic boxes save 1.0), Mask R-CNN
with Swin-T / S 48 / 69. Tests count them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FeaturePyramidNetwork

from everytoken.errors import EverytokenError
from everytoken.models.open import Description, find_weights
from everytoken.models.weights import load_weights
from everytoken.tasks.backbone import Features, build_features, description_from, read_note, rebuild_features
from everytoken.tasks.detect.data import Objects
from everytoken.tasks.detect.heads import LEVELS, CascadeHeads, Size
from everytoken.tasks.detect.options import DetectorOptions, FindOptions
from everytoken.tasks.options import BackboneOptions
from everytoken.tasks.pyramid import SimplePyramid

METADATA = "everytoken-detect"  # the key in the weights file
RATIOS = (0.5, 1.0, 2.0)  # height / width of the anchors
STRIDES = [4, 8, 16, 32]


@dataclass(frozen=True)
class DetectorDescription:
    """What somebody needs to know to use a detector's weights.

    Attributes:
        backbone: how its timm model was made, and the input's normalisation.
        detector: `DetectorOptions` as a dict. find: `FindOptions` as a dict, resolved.
        class_names: of the objects. taps: blocks of a plain transformer.
    """

    backbone: Description
    detector: dict[str, Any]
    class_names: tuple[str, ...]
    taps: tuple[int, ...] = ()
    find: dict[str, Any] = field(default_factory=dict)

    def to_metadata(self) -> dict[str, str]:
        """As safetensors keeps it, in one entry."""
        return {METADATA: json.dumps(asdict(self))}

    @staticmethod
    def from_file(path: Path) -> DetectorDescription | None:
        """Of a weights file; None if it is not a detector's."""
        values = read_note(path, METADATA)
        if values is None:
            return None
        return DetectorDescription(
            description_from(values["backbone"]), values["detector"], tuple(values["class_names"]),
            tuple(values["taps"]), values["find"],
        )  # fmt: skip


class Anchors(AnchorGenerator):
    """Anchors at exact strides, in float32; torchvision infers strides from the maps, which are rounded up."""

    def __init__(self, strides: Sequence[int], scale: float) -> None:
        super().__init__(tuple((int(scale * s),) for s in strides), (RATIOS,) * len(strides))
        self.level_strides = list(strides)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """[n, 4] for each image."""
        device = feature_maps[0].device
        self.set_cell_anchors(torch.float32, device)
        steps = [[torch.tensor(s, device=device)] * 2 for s in self.level_strides]
        grids = [list(m.shape[-2:]) for m in feature_maps]
        return [torch.cat(self.grid_anchors(grids, steps))] * len(image_list.image_sizes)


class ProposalHead(RPNHead):
    """Answers in float32, whatever the precision of the maps, because boxes are decoded in the type of the answers."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Objectness and box codes of each level."""
        logits, codes = super().forward(x)
        return [t.float() for t in logits], [t.float() for t in codes]


class Detector(nn.Module):
    """Images -> objects.

    Args:
        features: the backbone.
        options: pyramid and heads.
        classes: of objects.
    """

    def __init__(self, features: Features, options: DetectorOptions, classes: int) -> None:
        super().__init__()
        name = type(features.backbone).__name__
        if features.fixed_size is not None:
            raise EverytokenError(
                f"{name} takes images of one size only, and detection feeds images of many; take a backbone that takes "
                "any size, such as Swin, ConvNeXt, ResNet, ViT or LV-ViT"
            )
        self.features, self.options = features, options
        channels = options.channels
        if features.plain:
            self.pyramid: nn.Module = SimplePyramid(features.dims, features.strides, channels)
            strides: list[int] = self.pyramid.strides
        else:
            self.pyramid = FeaturePyramidNetwork(features.dims, channels)
            strides = features.strides
        if strides != STRIDES:
            raise EverytokenError(
                f"{name} gives feature maps at strides {strides}, and the detector wants {STRIDES}: take a transformer "
                "with patches of 16 pixels, or a network with stages at these strides"
            )
        count = {"training": options.proposals, "testing": max(options.proposals // 2, 1)}
        anchors = Anchors([*strides, 64], options.anchor_scale)
        head = ProposalHead(channels, len(RATIOS))
        self.rpn = RegionProposalNetwork(anchors, head, 0.7, 0.3, 256, 0.5, count, count, 0.7)
        cascade = options.detector == "cascade"
        agnostic = options.class_agnostic if options.class_agnostic is not None else cascade
        self.heads = CascadeHeads(
            3 if cascade else 1, options.regions, options.box_loss, classes=classes, channels=channels,
            hidden=options.hidden, conv=options.box_head == "conv" or (options.box_head == "auto" and cascade),
            agnostic=agnostic, masks=options.masks,
        )  # fmt: skip

    def train(self, mode: bool = True) -> Detector:
        """Training mode; batch norms of the backbone stay as they are if the options say so."""
        super().train(mode)
        if self.options.norm_eval:
            for module in self.features.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def levels(self, images: Tensor) -> tuple[dict[str, Tensor], Tensor, Size]:
        """Levels of the pyramid, the images padded to whole cells of the coarsest stage, and their size."""
        images = F.pad(images, (0, -images.shape[-1] % STRIDES[-1], 0, -images.shape[-2] % STRIDES[-1]))
        maps = self.features(images)
        if self.features.plain:
            made = self.pyramid(maps)
        else:
            made = list(self.pyramid(dict(zip(LEVELS, maps, strict=True))).values())
        levels = dict(zip(LEVELS, made, strict=True))
        levels["pool"] = F.max_pool2d(made[-1], 1, 2)
        return levels, images, (images.shape[-2], images.shape[-1])

    def losses(self, images: Tensor, objects: Objects) -> dict[str, Tensor]:
        """Loss terms by name: objectness and anchor (of the proposals), and those of the heads."""
        levels, images, canvas = self.levels(images)
        truth = objects.per_image()
        sizes = list(objects.sizes)
        proposals, terms = self.rpn(ImageList(images, sizes), levels, truth)
        made = {"objectness": terms["loss_objectness"], "anchor": terms["loss_rpn_box_reg"]}
        return {**made, **self.heads.losses(levels, proposals, sizes, canvas, truth)}

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Sequence[Size], find: FindOptions) -> list[dict[str, Tensor]]:
        """Objects of each image, in its own pixels of the canvas; see `CascadeHeads.detect`.

        Args:
            images: normalised [B, 3, H, W]. sizes: (height, width) of each on this canvas.
        """
        levels, images, canvas = self.levels(images)
        proposals, _ = self.rpn(ImageList(images, list(sizes)), levels)
        return self.heads.detect(
            levels, proposals, sizes, canvas, find.score_thresh, find.nms_thresh, find.max_detections
        )


@dataclass(frozen=True)
class LoadedDetector:
    """A detector in evaluation mode with its description."""

    model: Detector
    description: DetectorDescription
    source: str


def build_detector(
    backbone: BackboneOptions, options: DetectorOptions, size: int, class_names: tuple[str, ...]
) -> tuple[Detector, DetectorDescription]:
    """A detector to be trained, its backbone with the weights that the options name.

    Args:
        size: of the position embeddings, if the backbone has any; they are resized for every image.
    """
    features, about = build_features(backbone, -(-size // STRIDES[-1]) * STRIDES[-1])
    model = Detector(features, options, len(class_names))
    taps = tuple(features.indices) if features.plain else ()
    return model, DetectorDescription(about, asdict(options), class_names, taps)


def load_detector(source: str | Path) -> LoadedDetector:
    """A trained detector from its run folder or a weights file of it."""
    path = find_weights(source)
    about = DetectorDescription.from_file(path) if path.suffix == ".safetensors" else None
    if about is None:
        raise EverytokenError(
            f"{path} is not a detector of `everytoken detect train`. To train one on these weights, give them to "
            "`everytoken detect train --initial-checkpoint`."
        )
    features = rebuild_features(about.backbone, about.taps)
    model = Detector(features, DetectorOptions(**about.detector), len(about.class_names))
    report = load_weights(model, path)
    if report.missing or report.left_out:
        raise EverytokenError(f"{path} does not fit the detector that it describes:\n{report}")
    return LoadedDetector(model.eval(), about, str(path))

"""The detector: backbone, pyramid, proposals, and the heads of Mask R-CNN or Cascade Mask R-CNN.

Backbones with stages (Swin, ConvNeXt, ResNet) get a feature pyramid (Lin et al. 2017); plain transformers a simple one
from their last map (Li et al. 2022, section 3). Levels at strides 4 to 32 feed the heads; one more, at 64, is for
proposals only. The papers' models come out with the parameters of their tables (millions; COCO's 80 classes): Cascade
Mask R-CNN with Swin-T / S / B 86 / 107 / 145 (with boxes per class, as the recipes have it; class-agnostic boxes save
1.0), Mask R-CNN with Swin-T / S 48 / 69. Tests count them.

Cai and Vasconcelos 2018 (Cascade R-CNN, section 4): stage t looks at the boxes that stage t - 1 refined, is trained on
proposals that overlap an object by IoU 0.5, 0.6, 0.7, and regresses with finer steps: the differences (dx, dy, dw, dh)
are multiplied by (10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15). The losses of the stages weigh 1, 0.5, 0.25.
Mask R-CNN (He et al. 2017) is the first stage alone. At test time class scores are averaged over the stages, each on
its own boxes; the boxes are those of the last stage; masks are predicted in the final boxes by all stages and averaged.

Between the stages of a training step, the sampled regions are refined and sampled anew; true boxes, which are added to
every stage's proposals, are not passed on. With boxes per class, a region is refined with the box of its true class, or
of its likeliest class if it has none. No gradient flows through the refined boxes.

Matching, sampling, coding of boxes, RoIAlign and the mask loss are torchvision's; what is computed from box coordinates
stays in float32 under mixed precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.models.detection import _utils as parts
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import maskrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import (
    FeaturePyramidNetwork,
    MultiScaleRoIAlign,
    batched_nms,
    box_iou,
    clip_boxes_to_image,
    generalized_box_iou_loss,
)

from everytoken.errors import EverytokenError
from everytoken.tasks.backbone import Features, build_features
from everytoken.tasks.dense import DenseInfo, load_dense
from everytoken.tasks.detect.data import Objects
from everytoken.tasks.detect.options import NEW_RUN, DetectorOptions, FindOptions
from everytoken.tasks.options import BackboneOptions, fill

IOUS = (0.5, 0.6, 0.7)
CODES = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
POSITIVE = 0.25  # part of the sampled regions that may be objects
_GIOU_WEIGHT = 10.0
RATIOS = (0.5, 1.0, 2.0)  # height / width of the anchors
STRIDES = [4, 8, 16, 32]
LEVELS = ["0", "1", "2", "3"]  # of the pyramid; the coarsest is for proposals only

Size = tuple[int, int]


@dataclass(frozen=True)
class Sampled:
    """Regions of one image that a stage is trained on.

    Attributes:
        boxes: [n, 4]. labels: int64 [n], 0 for none. matched: int64 [n], the true box of each.
        added: bool [n], true boxes that were added to the proposals.
    """

    boxes: Tensor
    labels: Tensor
    matched: Tensor
    added: Tensor


class Stage(nn.Module):
    """Class, box and mask of regions.

    Args:
        number: of the stage, from 0: its IoU and its code.
        classes: without background. channels: of the pyramid. hidden: of the box head.
        conv: four convolutions and one hidden layer instead of two hidden layers.
        agnostic: one box for all classes.
    """

    def __init__(
        self, number: int, classes: int, channels: int, hidden: int, *, conv: bool, agnostic: bool, masks: bool
    ) -> None:
        super().__init__()
        self.iou, self.weight, self.agnostic = IOUS[number], LOSS_WEIGHTS[number], agnostic
        self.coder = parts.BoxCoder(CODES[number])
        self.matcher = parts.Matcher(self.iou, self.iou, allow_low_quality_matches=False)
        if conv:
            self.head = FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [hidden], nn.BatchNorm2d)
        else:
            self.head = TwoMLPHead(channels * 49, hidden)
        self.classify = nn.Linear(hidden, classes + 1)
        self.regress = nn.Linear(hidden, 4 if agnostic else 4 * classes)
        nn.init.normal_(self.classify.weight, std=0.01)
        nn.init.normal_(self.regress.weight, std=0.001)
        nn.init.zeros_(self.classify.bias)
        nn.init.zeros_(self.regress.bias)
        self.mask: nn.Module | None = None
        if masks:
            self.mask = nn.Sequential(
                MaskRCNNHeads(channels, [channels] * 4, 1), MaskRCNNPredictor(channels, channels, classes)
            )

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """[n, D, 7, 7] -> class logits [n, K + 1] (0 is background), codes [n, 1 or K, 4]."""
        x = self.head(pooled)
        return self.classify(x).float(), self.regress(x).float().unflatten(1, (-1, 4))

    def match(self, boxes: Tensor, truth: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Of each box [n, 4]: the true box that it overlaps most, and its class, 0 if that is less than `iou`."""
        if not len(truth) or not len(boxes):
            none = torch.zeros(len(boxes), dtype=torch.int64, device=boxes.device)
            return none, none
        best = self.matcher(box_iou(truth, boxes))
        matched = best.clamp(min=0)
        return matched, torch.where(best < 0, 0, labels[matched])

    def chosen(self, codes: Tensor, labels: Tensor) -> Tensor:
        """The codes [n, 4] of each region for its class (from 1), of [n, 1 or K, 4]."""
        if self.agnostic:
            return codes[:, 0]
        return codes[torch.arange(len(codes), device=codes.device), labels - 1]

    def decode(self, codes: Tensor, boxes: Tensor) -> Tensor:
        """Codes [n, 4] relative to boxes [n, 4] -> boxes [n, 4]."""
        out: Tensor = self.coder.decode_single(codes, boxes)
        return out

    def refine(self, logits: Tensor, codes: Tensor, boxes: Tensor, labels: Tensor | None = None) -> Tensor:
        """Boxes for the next stage; `labels` are the true classes, 0 where there is none."""
        best = logits[:, 1:].argmax(1) + 1
        if labels is not None:
            best = torch.where(labels > 0, labels, best)
        return self.decode(self.chosen(codes, best), boxes)


class CascadeHeads(nn.Module):
    """All stages.

    Args:
        stages: 1 or 3. regions: of an image that each stage is trained on. box_loss: see `DetectorOptions`.
        others: of `Stage`.
    """

    def __init__(self, stages: int, regions: int, box_loss: str, **others: Any) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(k, **others) for k in range(stages)])
        self.box_pool = MultiScaleRoIAlign(LEVELS, 7, 2)
        self.mask_pool = MultiScaleRoIAlign(LEVELS, 14, 2)
        self.sampler = parts.BalancedPositiveNegativeSampler(regions, POSITIVE)
        self.box_loss = box_loss

    def sample(self, stage: Stage, proposals: Tensor, truth: dict[str, Tensor]) -> Sampled:
        """Some of the proposals of an image and of its true boxes, matched."""
        boxes = torch.cat([proposals, truth["boxes"]])
        matched, labels = stage.match(boxes, truth["boxes"], truth["labels"])
        (positive,), (negative,) = self.sampler([labels])
        keep = torch.where(positive.bool() | negative.bool())[0]
        return Sampled(boxes[keep], labels[keep], matched[keep], keep >= len(proposals))

    def losses(
        self,
        levels: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: Sequence[Size],
        canvas: Size,
        truth: list[dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Loss terms of all stages: class, box and mask, numbered from 1 if there are several; with stage weights.

        Args:
            proposals: [n, 4] of each image. sizes: (height, width) of each. canvas: of all of them.
            truth: boxes, labels (from 1) and masks of each.
        """
        terms: dict[str, Tensor] = {}
        for k, module in enumerate(self.stages):
            stage: Any = module
            name = str(k + 1) if len(self.stages) > 1 else ""
            regions = [self.sample(stage, p, t) for p, t in zip(proposals, truth, strict=True)]
            logits, codes = stage(self.box_pool(levels, [r.boxes for r in regions], [canvas]))
            labels, boxes = torch.cat([r.labels for r in regions]), torch.cat([r.boxes for r in regions])
            terms[f"class{name}"] = stage.weight * F.cross_entropy(logits, labels)
            targets = torch.cat([_pick(t["boxes"], r.matched) for r, t in zip(regions, truth, strict=True)])
            terms[f"box{name}"] = stage.weight * self._box_loss(stage, codes, boxes, labels, targets)
            if stage.mask is not None:
                terms[f"mask{name}"] = stage.weight * self._mask_loss(stage, levels, regions, canvas, truth)
            if k + 1 < len(self.stages):
                with torch.no_grad():
                    moved = stage.refine(logits, codes, boxes, labels).split([len(r.boxes) for r in regions])
                    proposals = [
                        clip_boxes_to_image(b[~r.added], s) for b, r, s in zip(moved, regions, sizes, strict=True)
                    ]
        return terms

    def _box_loss(self, stage: Stage, codes: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        """Of the regions with an object; divided by the number of all regions."""
        some = torch.where(labels > 0)[0]
        chosen = stage.chosen(codes[some], labels[some])
        if self.box_loss == "giou":
            decoded = stage.decode(chosen, boxes[some])
            loss: Tensor = _GIOU_WEIGHT * generalized_box_iou_loss(decoded, targets[some], reduction="sum")
        else:
            wanted = stage.coder.encode_single(targets[some], boxes[some])
            loss = F.smooth_l1_loss(chosen, wanted, beta=1 / 9, reduction="sum")
        return loss / max(len(labels), 1)

    def _mask_loss(
        self,
        stage: Stage,
        levels: dict[str, Tensor],
        regions: list[Sampled],
        canvas: Size,
        truth: list[dict[str, Tensor]],
    ) -> Tensor:
        assert stage.mask is not None
        boxes = [r.boxes[r.labels > 0] for r in regions]
        matched = [r.matched[r.labels > 0] for r in regions]
        logits = stage.mask(self.mask_pool(levels, boxes, [canvas])).float()
        loss: Tensor = maskrcnn_loss(
            logits, boxes, [t["masks"] for t in truth], [t["labels"] - 1 for t in truth], matched
        )
        return loss

    def detect(
        self, levels: dict[str, Tensor], proposals: list[Tensor], sizes: Sequence[Size], canvas: Size, find: FindOptions
    ) -> list[dict[str, Tensor]]:
        """Of each image: boxes [n, 4], scores [n], labels [n] (from 1) and, if masks are found, masks [n, 28, 28]."""
        counts = [len(p) for p in proposals]
        scores: Tensor | None = None
        boxes = torch.cat(proposals)
        final = boxes[:, None]
        for k, module in enumerate(self.stages):
            stage: Any = module
            logits, codes = stage(self.box_pool(levels, list(boxes.split(counts)), [canvas]))
            now = logits.softmax(-1)
            scores = now if scores is None else scores + now
            if k + 1 < len(self.stages):
                moved = stage.refine(logits, codes, boxes).split(counts)
                boxes = torch.cat([clip_boxes_to_image(b, s) for b, s in zip(moved, sizes, strict=True)])
            else:
                flat = stage.decode(codes.flatten(0, 1), boxes.repeat_interleave(codes.shape[1], 0))
                final = flat.unflatten(0, codes.shape[:2])
        assert scores is not None
        scores = scores / len(self.stages)
        images = zip(scores.split(counts), final.split(counts), sizes, strict=True)
        detections = [_suppress(score[:, 1:], box, size, find) for score, box, size in images]
        self._add_masks(levels, detections, canvas)
        return detections

    def _add_masks(self, levels: dict[str, Tensor], detections: list[dict[str, Tensor]], canvas: Size) -> None:
        stages: list[Any] = [s for s in self.stages if s.mask is not None]
        if not stages:
            return
        labels = torch.cat([image["labels"] for image in detections])
        pooled = self.mask_pool(levels, [image["boxes"] for image in detections], [canvas])
        rows = torch.arange(len(labels), device=labels.device)
        each_stage = [stage.mask(pooled).float().sigmoid()[rows, labels - 1] for stage in stages]
        masks = torch.stack(each_stage).mean(0).split([len(image["labels"]) for image in detections])
        for image, mask in zip(detections, masks, strict=True):
            image["masks"] = mask


def _pick(boxes: Tensor, numbers: Tensor) -> Tensor:
    """boxes[numbers], or zeros if there is no box."""
    return boxes[numbers] if len(boxes) else boxes.new_zeros(len(numbers), 4)


def _suppress(scores: Tensor, boxes: Tensor, size: Size, find: FindOptions) -> dict[str, Tensor]:
    """The objects of an image, best first, of scores [n, K] and boxes [n, 1 or K, 4]."""
    assert find.score_thresh is not None
    assert find.nms_thresh is not None
    region, label = torch.where(scores > find.score_thresh)
    value = scores[region, label]
    box = clip_boxes_to_image(boxes[region, label if boxes.shape[1] > 1 else 0], size)
    large = (box[:, 2] - box[:, 0] > 1e-2) & (box[:, 3] - box[:, 1] > 1e-2)
    box, value, label = box[large], value[large], label[large]
    keep = batched_nms(box, value, label, find.nms_thresh)[: find.max_detections]
    return {"boxes": box[keep], "scores": value[keep], "labels": label[keep] + 1}


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


class SimplePyramid(nn.Module):
    """Four levels from the last map: strides 1/4, 1/2, 1 and 2 times its own.

    Args:
        dims, strides: of the maps; only the last is used.
        out: channels of every level.
    """

    def __init__(self, dims: Sequence[int], strides: Sequence[int], out: int = 256) -> None:
        super().__init__()
        dim, stride = dims[-1], strides[-1]
        self.strides = [stride // 4, stride // 2, stride, stride * 2]
        half, quarter = dim // 2, dim // 4
        up = [nn.ConvTranspose2d(dim, half, 2, 2), LayerNorm2d(half), nn.GELU()]
        scales: list[tuple[list[nn.Module], int]] = [
            ([*up, nn.ConvTranspose2d(half, quarter, 2, 2)], quarter),
            ([nn.ConvTranspose2d(dim, half, 2, 2)], half),
            ([], dim),
            ([nn.MaxPool2d(2, 2)], dim),
        ]
        self.levels = nn.ModuleList()
        for scale, width in scales:
            first, second = nn.Conv2d(width, out, 1, bias=False), nn.Conv2d(out, out, 3, padding=1, bias=False)
            self.levels.append(nn.Sequential(*scale, first, LayerNorm2d(out), second, LayerNorm2d(out)))

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """[..., [B, D, h, w]] -> [B, out, 4h, 4w], [B, out, 2h, 2w], [B, out, h, w], [B, out, h/2, w/2]"""
        return [level(maps[-1]) for level in self.levels]


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
            3 if cascade else 1,
            options.regions,
            options.box_loss,
            classes=classes,
            channels=channels,
            hidden=options.hidden,
            conv=options.box_head == "conv" or (options.box_head == "auto" and cascade),
            agnostic=agnostic,
            masks=options.masks,
        )

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
            levels = dict(zip(LEVELS, self.pyramid(maps), strict=True))
        else:
            levels = dict(self.pyramid(dict(zip(LEVELS, maps, strict=True))))
        levels["pool"] = F.max_pool2d(levels[LEVELS[-1]], 1, 2)
        return levels, images, (images.shape[-2], images.shape[-1])

    def losses(self, images: Tensor, objects: Objects) -> dict[str, Tensor]:
        """Loss terms by name: objectness and anchor (of the proposals), and those of the heads."""
        levels, images, canvas = self.levels(images)
        truth = objects.per_image()
        sizes = list(objects.sizes)
        proposals, terms = self.rpn(ImageList(images, sizes), levels, truth)
        heads = self.heads.losses(levels, proposals, sizes, canvas, truth)
        return {"objectness": terms["loss_objectness"], "anchor": terms["loss_rpn_box_reg"], **heads}

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Sequence[Size], find: FindOptions) -> list[dict[str, Tensor]]:
        """Objects of each image, in its own pixels of the canvas; see `CascadeHeads.detect`.

        Args:
            images: normalised [B, 3, H, W]. sizes: (height, width) of each on this canvas.
        """
        levels, images, canvas = self.levels(images)
        proposals, _ = self.rpn(ImageList(images, list(sizes)), levels)
        return self.heads.detect(levels, proposals, sizes, canvas, fill(find, NEW_RUN))


@dataclass(frozen=True)
class DetectorInfo(DenseInfo):
    """What a detector's weights say about themselves: heads, and how the run was validated."""

    METADATA: ClassVar[str] = "everytoken-detect"
    HINT: ClassVar[str] = (
        "is not a detector of `everytoken detect train`. To train one on these weights, name them as its "
        "initial_checkpoint."
    )

    detector: DetectorOptions
    find: FindOptions


def build_detector(
    backbone: BackboneOptions,
    options: DetectorOptions,
    size: int,
    class_names: tuple[str, ...],
    find: FindOptions | None = None,
) -> tuple[Detector, DetectorInfo]:
    """A detector to be trained, its backbone with the weights that the options name.

    Args:
        size: of the position embeddings, if the backbone has any; they are resized for every image.
    """
    features, info = build_features(backbone, -(-size // STRIDES[-1]) * STRIDES[-1])
    model = Detector(features, options, len(class_names))
    taps = tuple(features.indices) if features.plain else ()
    return model, DetectorInfo(info, class_names, taps, options, find or FindOptions())


def load_detector(source: str | Path) -> tuple[Detector, DetectorInfo]:
    """A trained detector and its description from its run folder or a weights file of it."""
    return load_dense(
        source, DetectorInfo, lambda features, info: Detector(features, info.detector, len(info.class_names))
    )

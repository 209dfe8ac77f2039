"""The detector: backbone, pyramid, proposals, and the heads of Mask R-CNN or Cascade Mask R-CNN.

Backbones with stages (Swin, ConvNeXt, ResNet) get a feature pyramid (Lin et al. 2017). Levels at strides 4 to 32 feed
the heads; one more, at 64, is for proposals only. The papers' models come out with the parameters of their tables;
tests count them.

Cascade R-CNN (Cai and Vasconcelos 2018, section 4): stage t looks at the boxes that stage t - 1 refined, is trained on
proposals that overlap an object by IoU 0.5, 0.6, 0.7, and regresses with finer steps. Mask R-CNN (He et al. 2017) is
the first stage alone. At test time class logits are averaged over the stages, the boxes are those of the last stage,
and masks are predicted in these boxes by all stages and averaged. Between the stages of a training step, the sampled
regions are refined, without gradient and without the true boxes that were added, and sampled anew.

The loss is the sum of all terms: objectness and anchor boxes of the proposals, and class, box and mask of each stage
with the stage's weight. Matching, RoIAlign, losses and initial weights are those of mmdet and of Swin's detectors;
docs/detect.md lists what is not. What is computed from box coordinates stays in float32 under mixed precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import _utils as parts
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import (
    FeaturePyramidNetwork,
    batched_nms,
    box_iou,
    clip_boxes_to_image,
    generalized_box_iou_loss,
    roi_align,
)
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from everytoken.errors import EverytokenError
from everytoken_lab.dense.backbone import Features, build_features
from everytoken_lab.dense.common import DenseInfo, load_dense
from everytoken_lab.dense.detect import DetectOptions, DetectorOptions, FindOptions
from everytoken_lab.dense.detect.data import BatchObjects

IOUS = (0.5, 0.6, 0.7)
DEVIATIONS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
POSITIVE = 0.25  # fraction of the sampled regions that may be objects
RATIOS = (0.5, 1.0, 2.0)  # height / width of the anchors
STRIDES = [4, 8, 16, 32]
LEVELS = ["0", "1", "2", "3"]  # of the pyramid; the coarsest is for proposals only
_FINEST = 56  # regions up to twice this side are read from the finest level, and so on
_GIOU_WEIGHT = 10.0
_BEFORE_NMS = {"training": 2000, "testing": 1000}  # proposals of a level

Size = tuple[int, int]


def assign(iou: Tensor, low: float, high: float, best_from: float | None) -> Tensor:
    """The object that each box is matched with: its number, -1 for none, -2 for boxes that are left alone.

    Args:
        iou: [objects, boxes]. low, high: below `low`, a box has no object; from `high` on, that of its largest IoU.
        best_from: every object also gets the boxes that overlap it most, if that is at least so much; None: it does
            not. Later objects take such boxes from earlier ones.
    """
    if not iou.numel():
        return torch.full((iou.shape[1],), -1, dtype=torch.int64, device=iou.device)
    value, match = iou.max(0)
    match = torch.where(value < low, -1, torch.where(value < high, -2, match))
    if best_from is not None:
        for k, (row, best) in enumerate(zip(iou, iou.max(1).values, strict=True)):
            match.masked_fill_((row == best) & (best >= best_from), k)
    return match


def pool_regions(levels: dict[str, Tensor], boxes: Sequence[Tensor], size: int) -> Tensor:
    """RoIAlign of the boxes [n, 4] of each image on the level that fits their size: [sum n, D, size, size].

    Cells lie between whole coordinates, and large regions are sampled densely.
    """
    rois = _rois(boxes)
    side = (rois[:, 3:] - rois[:, 1:3]).clamp(min=0).prod(1).sqrt()
    level = torch.log2(side / _FINEST + 1e-6).floor().clamp(0, len(LEVELS) - 1)
    counts = torch.stack([(level == k).sum() for k in range(len(LEVELS))]).tolist()  # a GPU is waited for only here
    out = levels[LEVELS[0]].new_zeros(len(rois), levels[LEVELS[0]].shape[1], size, size)
    for name, stride, some in zip(LEVELS, STRIDES, level.argsort(stable=True).split(counts), strict=True):
        out[some] = roi_align(levels[name], rois[some], size, 1 / stride, -1, aligned=True).to(out.dtype)
    return out


def _rois(boxes: Sequence[Tensor], numbers: Sequence[Tensor] | None = None) -> Tensor:
    """[sum n, 5]: the number of the picture (by default, of the image), and the box."""
    numbers = numbers or [torch.full((len(b),), k, device=b.device) for k, b in enumerate(boxes)]
    return torch.cat([torch.cat(list(numbers))[:, None].to(boxes[0].dtype), torch.cat(list(boxes))], 1)


# -- proposals --------------------------------------------------------------------------------------------------------


class Anchors(nn.Module):
    """Anchors at exact strides, in float32: squares of `scale` cells and shapes of the same area around each cell."""

    def __init__(self, strides: Sequence[int], scale: float) -> None:
        super().__init__()
        self.strides = list(strides)
        shapes = torch.tensor([[-1 / math.sqrt(r), -math.sqrt(r), 1 / math.sqrt(r), math.sqrt(r)] for r in RATIOS])
        self.cells = [scale * stride * shapes / 2 for stride in strides]

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """[n, 4] for each image."""
        boxes = []
        for grid, cell, stride in zip(feature_maps, self.cells, self.strides, strict=True):
            y, x = (torch.arange(length, device=grid.device) * float(stride) for length in grid.shape[-2:])
            centres = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1).reshape(-1, 1, 2)
            boxes.append((centres.repeat(1, 1, 2) + cell.to(grid.device, non_blocking=True)).reshape(-1, 4))
        return [torch.cat(boxes)] * len(image_list.image_sizes)


class ProposalHead(RPNHead):
    """Answers in float32, whatever the precision of the maps, because boxes are decoded in the type of the answers."""

    def forward(self, x: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Objectness and box codes of each level."""
        logits, codes = super().forward(x)
        return [t.float() for t in logits], [t.float() for t in codes]


class Proposals(RegionProposalNetwork):
    """torchvision's, trained as in mmdet: 256 anchors of an image, at most half of them objects.

    An anchor is an object from IoU 0.7 on, and background below 0.3; the best anchors of an object are its own from 0.3
    on. Anchors around the padding of an image are left out.

    Args:
        inside: leave out anchors that lie partly outside of their image, too.
        beta: of the smooth L1 loss of the boxes; 0: L1.
    """

    def __init__(
        self, anchors: Anchors, head: RPNHead, before: dict[str, int], after: dict[str, int], inside: bool, beta: float
    ) -> None:
        super().__init__(anchors, head, 0.7, 0.3, 256, 0.5, before, after, 0.7)
        self.inside, self.beta = inside, beta

    def assign_targets_to_anchors(
        self, anchors: list[Tensor], targets: list[dict[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of each image: 1, 0 or -1 (left alone) for every anchor, and the box of its object."""
        labels, boxes = [], []
        for anchor, target in zip(anchors, targets, strict=True):
            height, width = target["size"]
            x, y = ((anchor[:, :2] + anchor[:, 2:]) / 2).unbind(1)
            valid = (x < -(-width // STRIDES[-1]) * STRIDES[-1]) & (y < -(-height // STRIDES[-1]) * STRIDES[-1])
            if self.inside:
                valid &= (anchor[:, :2] >= 0).all(1) & (anchor[:, 2] < width) & (anchor[:, 3] < height)
            iou = torch.where(valid, box_iou(target["boxes"], anchor), -1.0)  # the others are no object's best
            match = torch.where(valid, assign(iou, 0.3, 0.7, 0.3), -2)
            labels.append(torch.where(match >= 0, 1.0, match + 1.0))
            boxes.append(_with_none(target["boxes"])[match.clamp(min=-1) + 1])
        return labels, boxes

    def compute_loss(
        self, objectness: Tensor, pred_bbox_deltas: Tensor, labels: list[Tensor], regression_targets: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Of the sampled anchors: cross-entropy, and the loss of the boxes; both divided by their number."""
        positive, negative = (torch.cat(part).bool() for part in self.fg_bg_sampler(labels))
        sampled, some = torch.where(positive | negative)[0], torch.where(positive)[0]
        count = max(len(sampled), 1)
        wanted = torch.cat(labels)[sampled]
        scores = F.binary_cross_entropy_with_logits(objectness.flatten()[sampled], wanted, reduction="sum")
        targets = torch.cat(regression_targets)[some]
        boxes = F.smooth_l1_loss(pred_bbox_deltas[some], targets, beta=self.beta, reduction="sum")
        return scores / count, boxes / count


def _with_none(values: Tensor) -> Tensor:
    """With a row of zeros before the first one, for the number -1 + 1."""
    return torch.cat([values.new_zeros(1, *values.shape[1:]), values])


# -- heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampled:
    """Regions of one image that a stage is trained on."""

    boxes: Tensor  # [n, 4]
    labels: Tensor  # int64 [n], 0 for none
    matched: Tensor  # int64 [n], the true box of each, -1 for none
    added: Tensor  # bool [n], true boxes that were added to the proposals


class Stage(nn.Module):
    """Class, box and mask of regions. `number`, from 0, decides the IoU and the deviations of the boxes."""

    def __init__(self, number: int, classes: int, options: DetectorOptions) -> None:
        super().__init__()
        channels, hidden = options.channels, options.hidden
        self.iou, self.weight = IOUS[number], LOSS_WEIGHTS[number]
        self.cascade = options.detector == "cascade"
        self.coder: Any = parts.BoxCoder(tuple(1 / v for v in DEVIATIONS[number]))
        if self.cascade:
            self.head = FastRCNNConvFCHead((channels, 7, 7), [channels] * 4, [hidden], nn.BatchNorm2d)
        else:
            self.head = TwoMLPHead(channels * 49, hidden)
        _start_xavier(self.head, nn.Linear)
        self.classify = nn.Linear(hidden, classes + 1)
        self.regress = nn.Linear(hidden, 4 * classes)
        for layer, deviation in ((self.classify, 0.01), (self.regress, 0.001)):
            nn.init.normal_(layer.weight, std=deviation)
            nn.init.zeros_(layer.bias)
        self.mask: nn.Module | None = None
        if options.masks:
            self.mask = nn.Sequential(
                MaskRCNNHeads(channels, [channels] * 4, 1), MaskRCNNPredictor(channels, channels, classes)
            )

    def forward(self, pooled: Tensor) -> tuple[Tensor, Tensor]:
        """[n, D, 7, 7] -> class logits [n, K + 1] (0 is background), codes [n, K, 4]."""
        x = self.head(pooled)
        return self.classify(x).float(), self.regress(x).float().unflatten(1, (-1, 4))

    def match(self, boxes: Tensor, truth: Tensor) -> Tensor:
        """The true box of each box [n, 4], -1 for none."""
        return assign(box_iou(truth, boxes), self.iou, self.iou, None if self.cascade else self.iou)

    def refine(self, logits: Tensor, codes: Tensor, boxes: Tensor, labels: Tensor | None = None) -> Tensor:
        """Boxes for the next stage; `labels` are the true classes, 0 where there is none."""
        best = logits[:, 1:].argmax(1) + 1
        if labels is not None:
            best = torch.where(labels > 0, labels, best)
        refined: Tensor = self.coder.decode_single(_of_class(codes, best), boxes)
        return refined

    def losses_of_boxes(self, codes: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
        """Loss of the regions with an object; divided by the number of all regions."""
        some = torch.where(labels > 0)[0]
        chosen = _of_class(codes[some], labels[some])
        if self.cascade:
            decoded = self.coder.decode_single(chosen, boxes[some])
            loss: Tensor = _GIOU_WEIGHT * generalized_box_iou_loss(decoded, targets[some], reduction="sum")
        else:
            loss = F.l1_loss(chosen, self.coder.encode_single(targets[some], boxes[some]), reduction="sum")
        return loss / max(len(labels), 1)


def _of_class(answers: Tensor, labels: Tensor) -> Tensor:
    """Of each region the answer for its class (from 1): [n, K, ...] -> [n, ...]."""
    return answers[torch.arange(len(labels), device=labels.device), labels - 1]


class CascadeHeads(nn.Module):
    """All stages."""

    def __init__(self, classes: int, options: DetectorOptions) -> None:
        super().__init__()
        count = 3 if options.detector == "cascade" else 1
        self.stages = nn.ModuleList([Stage(k, classes, options) for k in range(count)])
        self.sampler = parts.BalancedPositiveNegativeSampler(options.regions, POSITIVE)

    def sample(self, stage: Stage, proposals: Tensor, truth: dict[str, Tensor]) -> Sampled:
        """Some of the proposals of an image and of its true boxes, matched."""
        boxes = torch.cat([proposals, truth["boxes"]])
        own = torch.arange(len(truth["boxes"]), device=boxes.device)
        matched = torch.cat([stage.match(proposals, truth["boxes"]), own])
        labels = _with_none(truth["labels"])[matched + 1]
        (positive,), (negative,) = self.sampler([labels])
        keep = torch.where(positive.bool() | negative.bool())[0]
        return Sampled(boxes[keep], labels[keep], matched[keep], keep >= len(proposals))

    def losses(
        self, levels: dict[str, Tensor], proposals: list[Tensor], sizes: Sequence[Size], truth: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Loss terms of all stages: class, box and mask, numbered from 1 if there are several; with stage weights.

        Of each image: proposals [n, 4], size (height, width), truth (boxes, labels from 1, masks).
        """
        terms: dict[str, Tensor] = {}
        for k, module in enumerate(self.stages):
            stage: Any = module
            name = str(k + 1) if len(self.stages) > 1 else ""
            regions = [self.sample(stage, p, t) for p, t in zip(proposals, truth, strict=True)]
            logits, codes = stage(pool_regions(levels, [r.boxes for r in regions], 7))
            labels, boxes = torch.cat([r.labels for r in regions]), torch.cat([r.boxes for r in regions])
            terms[f"class{name}"] = stage.weight * F.cross_entropy(logits, labels)
            targets = torch.cat([_with_none(t["boxes"])[r.matched + 1] for r, t in zip(regions, truth, strict=True)])
            terms[f"box{name}"] = stage.weight * stage.losses_of_boxes(codes, boxes, labels, targets)
            if stage.mask is not None:
                terms[f"mask{name}"] = stage.weight * self._mask_loss(stage, levels, regions, truth)
            if k + 1 < len(self.stages):
                with torch.no_grad():
                    moved = stage.refine(logits, codes, boxes, labels).split([len(r.boxes) for r in regions])
                    proposals = [
                        clip_boxes_to_image(b[~r.added], s) for b, r, s in zip(moved, regions, sizes, strict=True)
                    ]
        return terms

    def _mask_loss(
        self, stage: Any, levels: dict[str, Tensor], regions: list[Sampled], truth: list[dict[str, Tensor]]
    ) -> Tensor:
        """Cross-entropy inside the regions with an object, whose masks are sampled as the regions are."""
        some = [torch.where(r.labels > 0)[0] for r in regions]
        boxes = [r.boxes[where] for r, where in zip(regions, some, strict=True)]
        logits = stage.mask(pool_regions(levels, boxes, 14)).float()
        labels = torch.cat([r.labels[where] for r, where in zip(regions, some, strict=True)])
        if not len(labels):
            return logits.sum() * 0
        targets = []
        for region, where, box, objects in zip(regions, some, boxes, truth, strict=True):
            rois = _rois([box], [region.matched[where]])
            targets.append(roi_align(objects["masks"][:, None].to(box), rois, logits.shape[-1], 1.0, -1, aligned=True))
        wanted = (torch.cat(targets)[:, 0] >= 0.5).float()
        return F.binary_cross_entropy_with_logits(_of_class(logits, labels), wanted)

    def detect(
        self, levels: dict[str, Tensor], proposals: list[Tensor], sizes: Sequence[Size], find: FindOptions
    ) -> list[dict[str, Tensor]]:
        """Of each image: boxes [n, 4], scores [n], labels [n] (from 1) and, if masks are found, masks [n, 28, 28]."""
        counts = [len(p) for p in proposals]
        boxes = torch.cat(proposals)
        final, answers = boxes[:, None], []
        for k, module in enumerate(self.stages):
            stage: Any = module
            logits, codes = stage(pool_regions(levels, list(boxes.split(counts)), 7))
            answers.append(logits / len(self.stages))
            if k + 1 < len(self.stages):
                moved = stage.refine(logits, codes, boxes).split(counts)
                boxes = torch.cat([clip_boxes_to_image(b, s) for b, s in zip(moved, sizes, strict=True)])
            else:
                flat = stage.coder.decode_single(codes.flatten(0, 1), boxes.repeat_interleave(codes.shape[1], 0))
                final = flat.unflatten(0, codes.shape[:2])
        scores = sum(answers[1:], answers[0]).softmax(-1)
        images = zip(scores.split(counts), final.split(counts), sizes, strict=True)
        detections = [_suppress(score[:, 1:], box, size, find) for score, box, size in images]
        self._add_masks(levels, detections)
        return detections

    def _add_masks(self, levels: dict[str, Tensor], detections: list[dict[str, Tensor]]) -> None:
        stages: list[Any] = [s for s in self.stages if s.mask is not None]
        if not stages:
            return
        labels = torch.cat([image["labels"] for image in detections])
        pooled = pool_regions(levels, [image["boxes"] for image in detections], 14)
        each_stage = [_of_class(stage.mask(pooled).float().sigmoid(), labels) for stage in stages]
        masks = torch.stack(each_stage).mean(0).split([len(image["labels"]) for image in detections])
        for image, mask in zip(detections, masks, strict=True):
            image["masks"] = mask


def _suppress(scores: Tensor, boxes: Tensor, size: Size, find: FindOptions) -> dict[str, Tensor]:
    """The objects of an image, best first, of scores [n, K] and boxes [n, K, 4]."""
    assert find.score_thresh is not None
    assert find.nms_thresh is not None
    region, label = torch.where(scores > find.score_thresh)
    value = scores[region, label]
    box = clip_boxes_to_image(boxes[region, label], size)
    large = torch.where((box[:, 2] - box[:, 0] > 1e-2) & (box[:, 3] - box[:, 1] > 1e-2))[0]
    box, value, label = box[large], value[large], label[large]
    keep = batched_nms(box, value, label, find.nms_thresh)[: find.max_detections]
    return {"boxes": box[keep], "scores": value[keep], "labels": label[keep] + 1}


def _start_xavier(module: nn.Module, kind: type[nn.Module]) -> None:
    for layer in module.modules():
        if isinstance(layer, kind):
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


# -- the detector ------------------------------------------------------------------------------------------------------


class Detector(nn.Module):
    """Images -> objects."""

    def __init__(self, features: Features, options: DetectorOptions, classes: int) -> None:
        super().__init__()
        if features.strides != STRIDES:
            raise EverytokenError(
                f"{type(features.backbone).__name__} gives feature maps at strides {features.strides}, and a detector "
                f"needs {STRIDES}: take a network with stages at these strides, such as Swin, ConvNeXt or ResNet"
            )
        self.features, self.options = features, options
        channels, cascade = options.channels, options.detector == "cascade"
        self.pyramid = FeaturePyramidNetwork(features.dims, channels, LastLevelMaxPool())
        _start_xavier(self.pyramid, nn.Conv2d)
        proposals = options.proposals or (2000 if cascade else 1000)
        after = {"training": proposals, "testing": min(proposals, 1000)}
        anchors = Anchors([*STRIDES, 64], options.anchor_scale)
        head = ProposalHead(channels, len(RATIOS))
        self.rpn = Proposals(anchors, head, _BEFORE_NMS, after, inside=cascade, beta=1 / 9 if cascade else 0)
        self.heads = CascadeHeads(classes, options)

    def train(self, mode: bool = True) -> Detector:
        """Training mode; batch norms of the backbone stay as they are if the options say so."""
        super().train(mode)
        if self.options.norm_eval:
            for module in self.features.backbone.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        return self

    def levels(self, images: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Levels of the pyramid, and the images, padded to whole cells of the coarsest stage."""
        images = F.pad(images, (0, -images.shape[-1] % STRIDES[-1], 0, -images.shape[-2] % STRIDES[-1]))
        return dict(self.pyramid(dict(zip(LEVELS, self.features(images), strict=True)))), images

    def losses(self, images: Tensor, objects: BatchObjects) -> dict[str, Tensor]:
        """Terms by name: objectness and anchor (of the proposals), those of the heads, and "loss", their sum."""
        levels, images = self.levels(images)
        truth, sizes = [vars(image) for image in objects], [image.size for image in objects]
        proposals, terms = self.rpn(ImageList(images, sizes), levels, truth)
        heads = self.heads.losses(levels, proposals, sizes, truth)
        terms = {"objectness": terms["loss_objectness"], "anchor": terms["loss_rpn_box_reg"], **heads}
        return {"loss": torch.stack(list(terms.values())).sum(), **terms}

    @torch.no_grad()
    def detect(self, images: Tensor, sizes: Sequence[Size], find: FindOptions) -> list[dict[str, Tensor]]:
        """Objects of normalised images [B, 3, H, W], each of its (height, width); see `CascadeHeads.detect`."""
        levels, images = self.levels(images)
        proposals, _ = self.rpn(ImageList(images, list(sizes)), levels)
        return self.heads.detect(levels, proposals, sizes, find)


@dataclass(frozen=True)
class DetectorInfo(DenseInfo):
    """What a detector's weights say about themselves: heads, and how the run was validated."""

    METADATA: ClassVar[str] = "everytoken-detect"
    HINT: ClassVar[str] = (
        "is not a detector of `everytoken detect train`. To train one on these weights: detect train --weights."
    )

    detector: DetectorOptions
    find: FindOptions

    def network(self, features: Features) -> Detector:
        return Detector(features, self.detector, len(self.class_names))


def build_detector(options: DetectOptions, class_names: tuple[str, ...]) -> tuple[Detector, DetectorInfo]:
    """A detector to be trained, its backbone with the weights that the options name."""
    size = -(-options.augment.sizes[-1] // STRIDES[-1]) * STRIDES[-1]  # for which embeddings are made
    features, backbone = build_features(options.model, size)
    info = DetectorInfo(backbone, class_names, options.detector, options.find)
    return info.network(features), info


def load_detector(source: str | Path) -> tuple[Detector, DetectorInfo]:
    """A trained detector and its description from its run folder or a weights file of it."""
    return load_dense(source, DetectorInfo)

"""Heads of Mask R-CNN and Cascade Mask R-CNN: one or three stages of class, box and mask.

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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection import _utils as parts
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import maskrcnn_loss
from torchvision.ops import MultiScaleRoIAlign, batched_nms, box_iou, clip_boxes_to_image, generalized_box_iou_loss

IOUS = (0.5, 0.6, 0.7)
CODES = ((10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0))
LOSS_WEIGHTS = (1.0, 0.5, 0.25)
POSITIVE = 0.25  # part of the sampled regions that may be objects
_GIOU_WEIGHT = 10.0
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
        self, levels: dict[str, Tensor], proposals: list[Tensor], sizes: Sequence[Size], canvas: Size,
        truth: list[dict[str, Tensor]],
    ) -> dict[str, Tensor]:  # fmt: skip
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
        self, stage: Stage, levels: dict[str, Tensor], regions: list[Sampled], canvas: Size,
        truth: list[dict[str, Tensor]],
    ) -> Tensor:  # fmt: skip
        assert stage.mask is not None
        boxes = [r.boxes[r.labels > 0] for r in regions]
        matched = [r.matched[r.labels > 0] for r in regions]
        logits = stage.mask(self.mask_pool(levels, boxes, [canvas])).float()
        loss: Tensor = maskrcnn_loss(
            logits, boxes, [t["masks"] for t in truth], [t["labels"] - 1 for t in truth], matched
        )
        return loss

    def detect(
        self, levels: dict[str, Tensor], proposals: list[Tensor], sizes: Sequence[Size], canvas: Size,
        score_thresh: float, nms_thresh: float, limit: int,
    ) -> list[dict[str, Tensor]]:  # fmt: skip
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
        out = []
        for each, box, size in zip(scores.split(counts), final.split(counts), sizes, strict=True):
            out.append(_suppress(each[:, 1:], box, size, score_thresh, nms_thresh, limit))
        self._add_masks(levels, out, canvas)
        return out

    def _add_masks(self, levels: dict[str, Tensor], found: list[dict[str, Tensor]], canvas: Size) -> None:
        stages: list[Any] = [s for s in self.stages if s.mask is not None]
        if not stages:
            return
        labels = torch.cat([one["labels"] for one in found])
        pooled = self.mask_pool(levels, [one["boxes"] for one in found], [canvas])
        which = torch.arange(len(labels), device=labels.device)
        made = [stage.mask(pooled).float().sigmoid()[which, labels - 1] for stage in stages]
        masks = torch.stack(made).mean(0).split([len(one["labels"]) for one in found])
        for one, mask in zip(found, masks, strict=True):
            one["masks"] = mask


def _pick(boxes: Tensor, numbers: Tensor) -> Tensor:
    """boxes[numbers], or zeros if there is no box."""
    return boxes[numbers] if len(boxes) else boxes.new_zeros(len(numbers), 4)


def _suppress(
    scores: Tensor, boxes: Tensor, size: Size, score_thresh: float, nms_thresh: float, limit: int
) -> dict[str, Tensor]:
    """The objects of an image, best first, of scores [n, K] and boxes [n, 1 or K, 4]."""
    region, label = torch.where(scores > score_thresh)
    value = scores[region, label]
    box = clip_boxes_to_image(boxes[region, label if boxes.shape[1] > 1 else 0], size)
    real = (box[:, 2] - box[:, 0] > 1e-2) & (box[:, 3] - box[:, 1] > 1e-2)
    box, value, label = box[real], value[real], label[real]
    keep = batched_nms(box, value, label, nms_thresh)[:limit]
    return {"boxes": box[keep], "scores": value[keep], "labels": label[keep] + 1}

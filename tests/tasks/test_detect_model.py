"""Cascade Mask R-CNN against a slow version, in loops; sizes of the papers' models; backbones of all kinds."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.models.detection.image_list import ImageList

from everytoken.errors import EverytokenError
from everytoken.tasks.detect.data import Objects
from everytoken.tasks.detect.model import Anchors, CascadeHeads, Detector, Stage, build_detector
from everytoken.tasks.detect.options import DetectorOptions, FindOptions
from everytoken.tasks.options import BackboneOptions

CODES = [(10, 10, 5, 5), (20, 20, 10, 10), (30, 30, 15, 15)]
IOUS = [0.5, 0.6, 0.7]


# -- the slow version -------------------------------------------------------------------------------------------------


def slow_iou(a, b) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def slow_decode(code, box, weights) -> list[float]:
    w, h = box[2] - box[0], box[3] - box[1]
    x, y = box[0] + w / 2, box[1] + h / 2
    x, y = x + code[0] / weights[0] * w, y + code[1] / weights[1] * h
    limit = math.log(1000 / 16)
    w, h = w * math.exp(min(code[2] / weights[2], limit)), h * math.exp(min(code[3] / weights[3], limit))
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def slow_encode(truth, box, weights) -> list[float]:
    w, h = box[2] - box[0], box[3] - box[1]
    tw, th = truth[2] - truth[0], truth[3] - truth[1]
    dx = (truth[0] + tw / 2 - box[0] - w / 2) / w
    dy = (truth[1] + th / 2 - box[1] - h / 2) / h
    return [dx * weights[0], dy * weights[1], math.log(tw / w) * weights[2], math.log(th / h) * weights[3]]


def slow_giou(a, b) -> float:
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1]))
    iou = slow_iou(a, b)
    union = ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])) / (1 + iou)
    return iou - (hull - union) / hull


def clip(box, size) -> list[float]:
    return [min(max(v, 0.0), float(size[1 - k % 2])) for k, v in enumerate(box)]


# -- what both look at ------------------------------------------------------------------------------------------------

CANVAS = (64, 96)
CLASSES = 3


def levels(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {str(k): torch.randn(2, 8, 64 // s, 96 // s, generator=rng) for k, s in enumerate((4, 8, 16, 32))}


def truth() -> list[dict[str, torch.Tensor]]:
    masks = torch.zeros(2, *CANVAS, dtype=torch.uint8)
    masks[0, 8:40, 10:50] = 1
    masks[1, 20:60, 40:90] = 1
    boxes = torch.tensor([[10.0, 8, 50, 40], [40.0, 20, 90, 60]])
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "masks": masks[:0]}
    return [{"boxes": boxes, "labels": torch.tensor([2, 3]), "masks": masks}, empty]


def proposals(seed: int = 1) -> list[torch.Tensor]:
    """Some near the objects, with all overlaps, and some anywhere."""
    rng = torch.Generator().manual_seed(seed)
    near = truth()[0]["boxes"].repeat(12, 1) + torch.randn(24, 4, generator=rng) * 5
    corner = torch.rand(10, 2, generator=rng) * 40
    far = torch.cat([corner, corner + 8 + 30 * torch.rand(10, 2, generator=rng)], 1)
    return [torch.cat([near, far]).clamp(min=0, max=64), far]


def heads(agnostic: bool, stages: int = 3, loss: str = "smooth_l1", masks: bool = True) -> CascadeHeads:
    torch.manual_seed(0)
    made = CascadeHeads(
        stages, 4000, loss, classes=CLASSES, channels=8, hidden=16, conv=False, agnostic=agnostic, masks=masks
    )
    for stage in made.stages:  # strong enough to move boxes and to tell classes apart
        torch.nn.init.normal_(stage.regress.weight, std=0.6)
        torch.nn.init.normal_(stage.classify.weight, std=0.6)
    return made


def slow_losses(made: CascadeHeads, agnostic: bool, giou: bool = False) -> dict[str, float]:
    sizes, out = [(64, 96), (60, 70)], {}
    boxes = [p.tolist() for p in proposals()]
    maps = levels()
    for k, stage in enumerate(made.stages):
        rois, labels, goals, added = [], [], [], []
        for mine, target in zip(boxes, truth(), strict=True):
            true = target["boxes"].tolist()
            rois.append(mine + true)
            added.append([False] * len(mine) + [True] * len(true))
            for box in rois[-1]:
                overlaps = [slow_iou(box, t) for t in true]
                best = max(range(len(true)), key=lambda j: overlaps[j]) if true else -1
                hit = best >= 0 and overlaps[best] >= IOUS[k]
                labels.append(int(target["labels"][best]) if hit else 0)
                goals.append(true[best] if hit else None)
        pooled = made.box_pool(maps, [torch.tensor(r) for r in rois], [CANVAS])
        logits, codes = stage(pooled)
        weight = (1, 0.5, 0.25)[k]
        out[f"class{k + 1}"] = weight * float(
            sum(-logits.detach()[i].log_softmax(-1)[c] for i, c in enumerate(labels)) / len(labels)
        )
        flat = [box for mine in rois for box in mine]
        total = 0.0
        for i, (box, label, goal) in enumerate(zip(flat, labels, goals, strict=True)):
            if goal is None:
                continue
            code = codes[i, 0 if agnostic else label - 1].tolist()
            if giou:
                total += 10 * (1 - slow_giou(slow_decode(code, box, CODES[k]), goal))
                continue
            for got, wanted in zip(code, slow_encode(goal, box, CODES[k]), strict=True):
                d = abs(got - wanted)
                total += 0.5 * d * d * 9 if d < 1 / 9 else d - 1 / 18
        out[f"box{k + 1}"] = weight * total / len(labels)
        moved, at = [], 0
        for mine, was_added, size in zip(rois, added, sizes, strict=True):
            kept = []
            for box, extra in zip(mine, was_added, strict=True):
                label = labels[at] or int(logits[at, 1:].argmax()) + 1
                new = clip(slow_decode(codes[at, 0 if agnostic else label - 1].tolist(), box, CODES[k]), size)
                if not extra:
                    kept.append(new)
                at += 1
            moved.append(kept)
        boxes = moved
    return out


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_stage_matches_at_its_own_overlap(number):
    stage = Stage(number, CLASSES, 8, 16, conv=False, agnostic=True, masks=False)
    boxes, target = proposals()[0], truth()[0]
    matched, labels = stage.match(boxes, target["boxes"], target["labels"])
    hits = 0
    for box, j, label in zip(boxes.tolist(), matched.tolist(), labels.tolist(), strict=True):
        overlaps = [slow_iou(box, t) for t in target["boxes"].tolist()]
        best = max(range(2), key=lambda k: overlaps[k])
        expected = int(target["labels"][best]) if overlaps[best] >= IOUS[number] else 0
        assert label == expected
        assert not expected or j == best
        hits += expected > 0
    assert 0 < hits < len(boxes)
    none, background = stage.match(boxes, torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    assert not background.any()
    assert len(none) == len(boxes)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_boxes_are_decoded_with_the_weights_of_the_stage(number):
    stage = Stage(number, CLASSES, 8, 16, conv=False, agnostic=True, masks=False)
    boxes = proposals()[0][:12]
    codes = torch.randn(12, 4, generator=torch.Generator().manual_seed(2)) * torch.tensor([9.0, 9, 9, 60])
    made = stage.decode(codes, boxes)
    for k in range(12):
        slow = slow_decode(codes[k].tolist(), boxes[k].tolist(), CODES[number])
        assert made[k].tolist() == pytest.approx(slow, rel=1e-4, abs=1e-3)
    back = stage.coder.encode_single(made[:6], boxes[:6])
    for k in range(6):
        assert back[k].tolist() == pytest.approx(
            slow_encode(made[k].tolist(), boxes[k].tolist(), CODES[number]), rel=1e-3, abs=1e-3
        )


@pytest.mark.parametrize(("agnostic", "loss"), [(True, "smooth_l1"), (False, "smooth_l1"), (True, "giou")])
def test_a_training_step_of_the_cascade_equals_the_slow_version(agnostic, loss):
    made = heads(agnostic, loss=loss)
    terms = made.losses(levels(), proposals(), [(64, 96), (60, 70)], CANVAS, truth())
    slow = slow_losses(made, agnostic, loss == "giou")
    for name, value in slow.items():
        assert float(terms[name].detach()) == pytest.approx(value, rel=2e-3), name
    assert set(terms) == {f"{kind}{k}" for kind in ("class", "box", "mask") for k in (1, 2, 3)}


def test_at_test_time_scores_are_averaged_and_boxes_are_those_of_the_last_stage():
    for agnostic in (True, False):
        made = heads(agnostic).eval()
        sizes = [(64, 96), (60, 70)]
        found = made.detect(levels(), proposals(), sizes, CANVAS, FindOptions(None, None, 0.2, 0.5, 7))
        boxes, total = [p.tolist() for p in proposals()], 0
        for k, stage in enumerate(made.stages):
            logits, codes = stage(made.box_pool(levels(), [torch.tensor(b) for b in boxes], [CANVAS]))
            total = total + logits.softmax(-1) / 3
            at, moved, finals = 0, [], []
            for mine, size in zip(boxes, sizes, strict=True):
                moved.append([])
                for box in mine:
                    each = [slow_decode(codes[at, j].tolist(), box, CODES[k]) for j in range(codes.shape[1])]
                    finals.append([clip(b, size) for b in each])
                    moved[-1].append(finals[-1][0 if agnostic else int(logits[at, 1:].argmax())])
                    at += 1
            boxes = moved
        at = 0
        for mine, one in zip(boxes, found, strict=True):
            rows = []
            for _ in mine:
                for label in range(1, CLASSES + 1):
                    score = float(total[at, label])
                    if score > 0.2:
                        rows.append((score, label, finals[at][0 if agnostic else label - 1]))
                at += 1
            rows.sort(key=lambda row: -row[0])
            kept = []
            for row in rows:
                if all(row[1] != k[1] or slow_iou(row[2], k[2]) <= 0.5 for k in kept):
                    kept.append(row)
            kept = kept[:7]
            assert len(kept) > 1
            assert one["labels"].tolist() == [k[1] for k in kept]
            assert one["scores"].tolist() == pytest.approx([k[0] for k in kept], rel=1e-4)
            for box, row in zip(one["boxes"].tolist(), kept, strict=True):
                assert box == pytest.approx(row[2], abs=2e-2)
            pooled = made.mask_pool(levels(), [o["boxes"] for o in found], [CANVAS])
        masks = sum(stage.mask(pooled).sigmoid() for stage in made.stages) / 3
        labels = torch.cat([o["labels"] for o in found])
        expected = torch.stack([masks[i, label - 1] for i, label in enumerate(labels.tolist())])
        assert torch.allclose(torch.cat([o["masks"] for o in found]), expected, atol=1e-5)


def test_masks_are_trained_on_what_is_inside_the_region():
    made = heads(True, stages=1)
    stage = made.stages[0]
    target = truth()
    terms = made.losses(levels(), [target[0]["boxes"][:0], torch.zeros(0, 4)], [CANVAS, CANVAS], CANVAS, target)
    pooled = made.mask_pool(levels(), [target[0]["boxes"], torch.zeros(0, 4)], [CANVAS])  # only the true boxes
    logits = stage.mask(pooled)
    picked = torch.stack([logits[0, 1], logits[1, 2]])  # classes 2 and 3; both masks fill their boxes
    assert float(terms["mask"]) == pytest.approx(float(F.softplus(-picked).mean()), rel=0.05)


def test_anchors_stand_at_the_strides_whatever_the_size():
    images = ImageList(torch.zeros(1, 3, 96, 160), [(90, 150)])
    maps = [torch.zeros(1, 8, -(-96 // s), -(-160 // s)) for s in (4, 8, 16, 32, 64)]
    (made,) = Anchors([4, 8, 16, 32, 64], 8)(images, maps)
    last = made[-2 * 3 * 3 :].reshape(2, 3, 3, 4)  # 2 x 3 cells of stride 64, three shapes
    centres = (last[..., :2] + last[..., 2:]) / 2
    assert centres[1, 2].tolist() == [[128.0, 64.0]] * 3
    sides = (last[0, 0, :, 2:] - last[0, 0, :, :2]).prod(-1).sqrt()
    assert sides.tolist() == pytest.approx([512] * 3, rel=0.01)


@pytest.mark.parametrize(
    ("detector", "agnostic", "size", "millions"),
    [
        ("cascade", False, "tiny", 85.63),
        ("cascade", False, "small", 106.95),
        ("cascade", False, "base", 144.98),
        ("cascade", None, "tiny", 84.66),
        ("mask", None, "tiny", 47.79),
        ("mask", None, "small", 69.11),
    ],
)
def test_the_papers_models_have_the_papers_sizes(detector, agnostic, size, millions):
    options = DetectorOptions(detector=detector, class_agnostic=agnostic)
    names = tuple(str(k) for k in range(80))
    with torch.device("meta"):
        model, _ = build_detector(BackboneOptions(model=f"swin_{size}_patch4_window7_224"), options, 224, names)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    assert count == pytest.approx(millions, abs=0.01)
    if detector == "cascade" and agnostic is False:
        assert round(count) == {"tiny": 86, "small": 107, "base": 145}[size]  # the table of the paper


TINY = DetectorOptions(channels=16, hidden=24, regions=16, proposals=40, anchor_scale=4)
PLAIN = {"patch_size": 16, "embed_dim": 48, "depth": 4, "num_heads": 3}


SIZES = ((64, 96), (60, 70))


def objects(count: int = 2) -> Objects:
    """Of two images: the first has the first `count` of two objects, the second none."""
    one = {name: values[:count] for name, values in truth()[0].items()}
    return Objects(
        one["boxes"], one["labels"], one["masks"], (count, 0), SIZES, torch.zeros(2, 2, 3).numpy(), SIZES
    )  # fmt: skip


def small(name: str, options: DetectorOptions = TINY, **kwargs) -> Detector:
    torch.manual_seed(0)
    backbone = BackboneOptions(model=name, drop_path=0.0, model_kwargs=kwargs)
    return build_detector(backbone, options, 64, ("a", "b", "c"))[0]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("resnet10t", {}),
        ("vit_tiny_patch16_224", PLAIN),
        (
            "swin_tiny_patch4_window7_224",
            {"embed_dim": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2), "window_size": 4},
        ),
        ("convnext_atto", {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}),
    ],
)
def test_every_weight_learns_on_every_kind_of_backbone(name, kwargs):
    model = small(name, **kwargs)
    terms = model.train().losses(torch.randn(2, 3, *CANVAS), objects())
    sum(terms.values()).backward()
    assert all(torch.isfinite(value) for value in terms.values())
    lost = [n for n, p in model.named_parameters() if p.grad is None]
    assert not lost
    found = model.eval().detect(torch.randn(2, 3, *CANVAS), [(64, 96), (60, 70)], FindOptions(score_thresh=0.0))
    assert found[1]["boxes"][:, 2].max() <= 70
    assert found[1]["boxes"][:, 3].max() <= 60
    assert found[0]["masks"].shape[1:] == (28, 28)


def test_boxes_stay_in_float32_under_mixed_precision():
    model = small("resnet10t").eval()
    images = torch.randn(1, 3, 64, 96)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = model.detect(images, [(64, 96)], FindOptions(score_thresh=0.0))
        proposals, _ = model.rpn(ImageList(images, [(64, 96)]), model.levels(images)[0])
    assert found["boxes"].dtype == torch.float32
    steps = proposals[0] * 8 % 1  # bfloat16 has no eighths above 32
    assert (steps[proposals[0] > 32] != 0).any()


def test_images_without_any_object_give_a_loss_and_no_masks_are_needed_for_boxes():
    model = small("resnet10t").train()
    terms = model.losses(torch.randn(2, 3, *CANVAS), objects(0))
    assert float(terms["mask1"]) == 0
    assert float(terms["box1"]) == 0
    sum(terms.values()).backward()
    assert all(p.grad is not None for p in model.parameters())
    boxes_only = small("resnet10t", DetectorOptions(**{**TINY.__dict__, "masks": False, "detector": "mask"})).train()
    assert set(boxes_only.losses(torch.randn(2, 3, *CANVAS), objects())) == {"objectness", "anchor", "class", "box"}


def test_batch_norms_of_the_backbone_can_be_left_alone():
    model = small("resnet10t", DetectorOptions(**{**TINY.__dict__, "norm_eval": True})).train()
    before = model.features.backbone.bn1.running_mean.clone()
    model.losses(torch.randn(2, 3, *CANVAS), objects())
    assert torch.equal(before, model.features.backbone.bn1.running_mean)
    assert model.training


def test_backbones_that_cannot_serve_are_refused_in_words():
    with pytest.raises(EverytokenError, match=r"strides \[2, 4, 8, 16\].*patches of 16 pixels"):
        small("vit_tiny_patch16_224", **{**PLAIN, "patch_size": 8})
    model = small("resnet10t")
    model.features.fixed_size = (64, 64)
    with pytest.raises(EverytokenError, match="images of one size only"):
        Detector(model.features, TINY, 3)

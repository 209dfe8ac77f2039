"""Cascade Mask R-CNN against a slow version, in loops; sizes of the papers' models; backbones of all kinds."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection.image_list import ImageList

from everytoken.errors import EverytokenError
from everytoken_lab.dense.detect import NEW_RUN, DetectAugment, DetectOptions, DetectorOptions, FindOptions
from everytoken_lab.dense.detect.data import BatchObjects, Objects
from everytoken_lab.dense.detect.model import (
    Anchors,
    CascadeHeads,
    Detector,
    ProposalHead,
    Proposals,
    Stage,
    assign,
    build_detector,
    pool_regions,
)
from everytoken_lab.dense.detect.task import paste
from everytoken_lab.engine.options import BackboneOptions

CODES = [(10, 10, 5, 5), (20, 20, 10, 10), (1 / 0.033, 1 / 0.033, 1 / 0.067, 1 / 0.067)]
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


def slow_bilinear(grid, x, y) -> float:
    """Of a map whose cell (i, j) has its centre at (j + 0.5, i + 0.5); beyond the last centres, the border's value."""
    height, width = len(grid), len(grid[0])
    x, y = min(max(x - 0.5, 0), width - 1), min(max(y - 0.5, 0), height - 1)
    j, i = min(int(x), width - 2), min(int(y), height - 2)
    u, v = x - j, y - i
    top = (1 - u) * grid[i][j] + u * grid[i][j + 1]
    return (1 - v) * top + v * ((1 - u) * grid[i + 1][j] + u * grid[i + 1][j + 1])


def slow_region(grid, box, size) -> list[list[float]]:
    """Every cell of a region is the mean of points that lie no farther apart than the cells of the map."""
    step_x, step_y = (box[2] - box[0]) / size, (box[3] - box[1]) / size
    across, down = max(math.ceil(step_x), 1), max(math.ceil(step_y), 1)

    def cell(i: int, j: int) -> float:
        xs = [box[0] + (j + (b + 0.5) / across) * step_x for b in range(across)]
        ys = [box[1] + (i + (a + 0.5) / down) * step_y for a in range(down)]
        return sum(slow_bilinear(grid, x, y) for y in ys for x in xs) / (across * down)

    return [[cell(i, j) for j in range(size)] for i in range(size)]


def slow_assign(boxes, truth, low, high, best_from) -> list[int]:
    """mmdet's order: background, largest overlap, and then the best boxes of each object."""
    out = []
    for box in boxes:
        overlaps = [slow_iou(box, t) for t in truth]
        best = max(range(len(truth)), key=lambda k: overlaps[k])
        out.append(-1 if overlaps[best] < low else best if overlaps[best] >= high else -2)
    for k, t in enumerate(truth):
        overlaps = [slow_iou(box, t) for box in boxes]
        if best_from is not None and max(overlaps) >= best_from:
            for i, value in enumerate(overlaps):
                if value == max(overlaps):
                    out[i] = k
    return out


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


def options(detector: str = "cascade") -> DetectorOptions:
    return DetectorOptions(detector, channels=8, hidden=16, regions=4000)


def heads(detector: str) -> CascadeHeads:
    torch.manual_seed(0)
    made = CascadeHeads(CLASSES, options(detector))
    for stage in made.stages:  # strong enough to move boxes and to tell classes apart
        torch.nn.init.normal_(stage.regress.weight, std=0.6)
        torch.nn.init.normal_(stage.classify.weight, std=0.6)
    return made


def slow_losses(made: CascadeHeads, detector: str) -> dict[str, float]:
    sizes, out = [(64, 96), (60, 70)], {}
    boxes = [p.tolist() for p in proposals()]
    maps = levels()
    for k, stage in enumerate(made.stages):
        rois, labels, goals, added = [], [], [], []
        for mine, target in zip(boxes, truth(), strict=True):
            true = target["boxes"].tolist()
            rois.append(mine + true)
            added.append([False] * len(mine) + [True] * len(true))
            best_from = IOUS[k] if detector == "mask" else None
            found = slow_assign(rois[-1], true, IOUS[k], IOUS[k], best_from) if true else [-1] * len(rois[-1])
            labels += [int(target["labels"][best]) if best >= 0 else 0 for best in found]
            goals += [true[best] if best >= 0 else None for best in found]
        pooled = pool_regions(maps, [torch.tensor(r) for r in rois], 7)
        logits, codes = stage(pooled)
        weight, name = (1, 0.5, 0.25)[k], str(k + 1) if detector == "cascade" else ""
        out[f"class{name}"] = weight * float(
            sum(-logits.detach()[i].log_softmax(-1)[c] for i, c in enumerate(labels)) / len(labels)
        )
        flat = [box for mine in rois for box in mine]
        total = 0.0
        for i, (box, label, goal) in enumerate(zip(flat, labels, goals, strict=True)):
            if goal is None:
                continue
            code = codes[i, label - 1].tolist()
            if detector == "cascade":
                total += 10 * (1 - slow_giou(slow_decode(code, box, CODES[k]), goal))
            else:
                total += sum(abs(a - b) for a, b in zip(code, slow_encode(goal, box, CODES[k]), strict=True))
        out[f"box{name}"] = weight * total / len(labels)
        moved, at = [], 0
        for mine, was_added, size in zip(rois, added, sizes, strict=True):
            kept = []
            for box, extra in zip(mine, was_added, strict=True):
                label = labels[at] or int(logits[at, 1:].argmax()) + 1
                new = clip(slow_decode(codes[at, label - 1].tolist(), box, CODES[k]), size)
                if not extra:
                    kept.append(new)
                at += 1
            moved.append(kept)
        boxes = moved
    return out


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("detector", "number"), [("mask", 0), ("cascade", 0), ("cascade", 1), ("cascade", 2)])
def test_each_stage_matches_at_its_own_overlap_and_mask_rcnn_gives_every_object_its_best_regions(detector, number):
    stage = Stage(number, CLASSES, options(detector))
    boxes, true = proposals()[0], truth()[0]["boxes"]
    expected = slow_assign(boxes.tolist(), true.tolist(), IOUS[number], IOUS[number], None)
    assert {-1, 0} == set(expected)
    # the region overlaps the first more, and is the second's best
    near = torch.tensor([[0.0, 0, 40, 40], [4.0, 0, 44, 40]])
    assert stage.match(torch.tensor([[1.0, 0, 41, 40]]), near).tolist() == [1 if detector == "mask" else 0]
    best_from = IOUS[number] if detector == "mask" else None
    slow = slow_assign(boxes.tolist(), true.tolist(), IOUS[number], IOUS[number], best_from)
    assert stage.match(boxes, true).tolist() == slow
    assert stage.match(boxes, true[:0]).tolist() == [-1] * len(boxes)
    assert stage.match(boxes[:0], true).tolist() == []


@pytest.mark.parametrize("seed", range(4))
def test_anchors_are_matched_as_in_mmdet(seed):
    """From 0.7 on, below 0.3, and the best ones of each object from 0.3 on, ties included."""
    rng = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, 8, (60, 2), generator=rng) * 4.0
    boxes = torch.cat([corner, corner + torch.randint(2, 6, (60, 2), generator=rng) * 4.0], 1).tolist()
    objects = [[3.0, 5, 20, 21], [6.0, 6, 20, 22], [100.0, 100, 104, 104]]
    iou = torch.tensor([[slow_iou(box, t) for box in boxes] for t in objects], dtype=torch.float64)
    assert assign(iou, 0.3, 0.7, 0.3).tolist() == slow_assign(boxes, objects, 0.3, 0.7, 0.3)


@pytest.mark.parametrize("inside", [True, False])
def test_anchors_beyond_the_border_teach_nothing_in_a_cascade_and_those_in_the_padding_never(inside):
    network = Proposals(Anchors([16], 3), ProposalHead(4, 3), {}, {}, inside, 0.0)
    (anchors,) = network.anchor_generator(ImageList(torch.zeros(1, 3, 96, 160), [(64, 70)]), [torch.zeros(1, 4, 6, 10)])
    target = {"boxes": torch.tensor([[10.0, 12, 60, 58]]), "size": torch.tensor([64, 70])}
    (labels,), (boxes,) = network.assign_targets_to_anchors([anchors], [target])
    kept = []
    for k, (x0, y0, x1, y1) in enumerate(anchors.tolist()):
        in_padded = (x0 + x1) / 2 < 96 and (y0 + y1) / 2 < 64  # 64 x 70 pixels are padded to 64 x 96
        if in_padded and (not inside or (x0 >= 0 and y0 >= 0 and x1 < 70 and y1 < 64)):
            kept.append(k)
    slow = slow_assign(anchors[kept].tolist(), target["boxes"].tolist(), 0.3, 0.7, 0.3)
    expected = torch.full((len(anchors),), -1.0)
    expected[kept] = torch.tensor([1.0 if m >= 0 else m + 1.0 for m in slow])
    assert torch.equal(labels, expected)
    assert (labels == 1).any()
    assert (boxes[labels == 1] == target["boxes"]).all()
    nothing = {"boxes": torch.zeros(0, 4), "size": torch.tensor([8, 8])}  # no anchor fits inside
    (labels,), _ = network.assign_targets_to_anchors([anchors], [nothing])
    assert not (labels == 1).any()
    losses = network.compute_loss(torch.zeros(len(anchors), 1), torch.zeros(len(anchors), 4), [labels], [anchors])
    assert all(torch.isfinite(loss) for loss in losses)


def test_the_loss_of_proposals_is_over_all_sampled_anchors():
    network = Proposals(Anchors([16], 3), ProposalHead(4, 3), {}, {}, True, 1 / 9)
    rng = torch.Generator().manual_seed(0)
    labels = torch.tensor([1.0, 0, -1, 1, 0])
    scores, codes, targets = (torch.randn(5, n, generator=rng) for n in (1, 4, 4))
    objectness, box = network.compute_loss(scores, codes, [labels], [targets])
    slow = sum(
        math.log(1 + math.exp(-s if c else s))
        for s, c in zip(scores[:, 0].tolist(), labels.tolist(), strict=True)
        if c >= 0
    )
    assert float(objectness) == pytest.approx(slow / 4, rel=1e-5)
    slow = 0.0
    for k in (0, 3):
        for d in (codes[k] - targets[k]).abs().tolist():
            slow += 4.5 * d * d if d < 1 / 9 else d - 1 / 18
    assert float(box) == pytest.approx(slow / 4, rel=1e-5)
    plain = Proposals(Anchors([16], 3), ProposalHead(4, 3), {}, {}, False, 0.0)
    box = plain.compute_loss(scores, codes, [labels], [targets])[1]
    assert float(box) == pytest.approx(float((codes - targets)[[0, 3]].abs().sum()) / 4, rel=1e-5)


def test_regions_are_read_from_the_level_of_their_size_where_they_lie():
    """On maps that show coordinates, a cell of a region reads its own place: aligned RoIAlign."""
    maps = {}
    for k, stride in enumerate((4, 8, 16, 32)):
        y, x = torch.meshgrid(torch.arange(512 // stride), torch.arange(512 // stride), indexing="ij")
        maps[str(k)] = torch.stack([(x + 0.5) * stride, (y + 0.5) * stride, torch.full(x.shape, k)])[None].float()
    boxes = torch.tensor([[40.0, 60, 90, 130], [20.0, 30, 200, 190], [100.0, 40, 400, 300], [20.0, 20, 490, 490]])
    pooled = pool_regions(maps, [boxes], 7)
    assert pooled[:, 2].mean((1, 2)).tolist() == [0, 1, 2, 3]
    for box, region in zip(boxes.tolist(), pooled, strict=True):
        for axis in (0, 1):
            step = (box[axis + 2] - box[axis]) / 7
            expected = torch.tensor([box[axis] + (k + 0.5) * step for k in range(7)])
            found = region[0].mean(0) if axis == 0 else region[1].mean(1)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)


def test_large_regions_are_the_mean_of_densely_sampled_points():
    grid = torch.randn(1, 1, 32, 48, generator=torch.Generator().manual_seed(0))
    boxes = torch.tensor([[3.0, 5, 170, 120], [0.0, 100, 60, 128]])
    maps = {str(k): grid for k in range(4)}
    pooled = torch.cat([pool_regions(maps, [box[None]], 3) for box in boxes])
    for box, region in zip(boxes, pooled, strict=True):
        side = float((box[2:] - box[:2]).prod().sqrt())
        stride = (4, 8)[max(0, math.floor(math.log2(side / 56)))]
        slow = slow_region(grid[0, 0].tolist(), (box / stride).tolist(), 3)
        torch.testing.assert_close(region[0], torch.tensor(slow), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("detector", "stages"), [("cascade", ("1", "2", "3")), ("mask", ("",))])
def test_a_training_step_equals_the_slow_version(detector, stages):
    made = heads(detector).eval()
    terms = made.losses(levels(), proposals(), [(64, 96), (60, 70)], truth())
    for name, value in slow_losses(made, detector).items():
        assert float(terms[name].detach()) == pytest.approx(value, rel=2e-3), name
    assert set(terms) == {f"{kind}{k}" for kind in ("class", "box", "mask") for k in stages}


@torch.no_grad()
def test_at_test_time_logits_are_averaged_and_boxes_are_those_of_the_last_stage():
    made = heads("cascade").eval()
    sizes = [(64, 96), (60, 70)]
    found = made.detect(levels(), proposals(), sizes, FindOptions(None, None, 0.2, 0.5, 7))
    boxes, total = [p.tolist() for p in proposals()], 0
    for k, stage in enumerate(made.stages):
        logits, codes = stage(pool_regions(levels(), [torch.tensor(b) for b in boxes], 7))
        total = total + logits / 3
        at, moved, finals = 0, [], []
        for mine, size in zip(boxes, sizes, strict=True):
            moved.append([])
            for box in mine:
                each = [slow_decode(codes[at, j].tolist(), box, CODES[k]) for j in range(codes.shape[1])]
                finals.append([clip(b, size) for b in each])
                moved[-1].append(finals[-1][int(logits[at, 1:].argmax())])
                at += 1
        boxes = moved
    at, total = 0, total.softmax(-1)
    for mine, one in zip(boxes, found, strict=True):
        rows = []
        for _ in mine:
            for label in range(1, CLASSES + 1):
                score = float(total[at, label])
                if score > 0.2:
                    rows.append((score, label, finals[at][label - 1]))
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
        pooled = pool_regions(levels(), [o["boxes"] for o in found], 14)
    masks = sum(stage.mask(pooled).sigmoid() for stage in made.stages) / 3
    labels = torch.cat([o["labels"] for o in found])
    expected = torch.stack([masks[i, label - 1] for i, label in enumerate(labels.tolist())])
    assert torch.allclose(torch.cat([o["masks"] for o in found]), expected, atol=1e-5)


def test_masks_are_trained_on_what_is_inside_the_region():
    made = heads("mask")
    objects = truth()
    objects[0]["masks"][0, 10:14, 12:30] = 0  # not the whole box
    boxes = torch.tensor([[9.0, 7.5, 49, 41], [42.0, 18, 91, 61]])
    terms = made.losses(levels(), [boxes, torch.zeros(0, 4)], [CANVAS, CANVAS], objects)
    regions = torch.cat([boxes, objects[0]["boxes"]])  # and the true boxes themselves
    logits = made.stages[0].mask(pool_regions(levels(), [regions, torch.zeros(0, 4)], 14))
    slow, count = 0.0, 0
    for k, box in enumerate(regions.tolist()):
        wanted = slow_region(objects[0]["masks"][k % 2].tolist(), box, 28)
        label = int(objects[0]["labels"][k % 2])
        for row, answers in zip(wanted, logits[k, label - 1].tolist(), strict=True):
            for value, logit in zip(row, answers, strict=True):
                slow += math.log1p(math.exp(-logit if value >= 0.5 else logit))
                count += 1
    assert float(terms["mask"].detach()) == pytest.approx(slow / count, rel=1e-4)


def test_masks_are_pasted_where_pixels_have_their_centres():
    mask = torch.rand(28, 28, generator=torch.Generator().manual_seed(0))
    for box in ([3.3, 2.1, 17.8, 19.6], [-4.0, 5.0, 9.5, 30.0], [25.0, 1.0, 25.2, 1.1], [40.0, 40.0, 50.0, 50.0]):
        whole = paste(mask, box, (24, 30))
        for y in range(24):
            for x in range(30):
                u = (x + 0.5 - box[0]) / (box[2] - box[0]) * 28
                v = (y + 0.5 - box[1]) / (box[3] - box[1]) * 28
                padded = torch.nn.functional.pad(mask, (2, 2, 2, 2)).tolist()
                inside = -1 < u < 29 and -1 < v < 29
                value = slow_bilinear(padded, u + 2, v + 2) if inside else 0.0
                assert bool(whole[y, x]) == (value >= 0.5) or abs(value - 0.5) < 1e-4


def test_initial_weights_are_those_of_mmdet():
    """Xavier in the pyramid and in the hidden layers of the box heads, Kaiming (fan-out) in the convolutions."""
    model = small("resnet10t", DetectorOptions(channels=64, hidden=96))
    for layer in (model.pyramid.inner_blocks[1][0], model.pyramid.layer_blocks[0][0], model.heads.stages[0].head[5]):
        fan_in, fan_out = torch.nn.init._calculate_fan_in_and_fan_out(layer.weight)
        limit = math.sqrt(6 / (fan_in + fan_out))
        assert 0.97 * limit < float(layer.weight.detach().abs().max()) <= limit
        assert float(layer.bias.detach().abs().max()) == 0
    conv = model.heads.stages[0].head[0][0].weight
    assert float(conv.detach().std()) == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.05)


def test_anchors_stand_at_the_strides_whatever_the_size():
    images = ImageList(torch.zeros(1, 3, 96, 160), [(90, 150)])
    maps = [torch.zeros(1, 8, -(-96 // s), -(-160 // s)) for s in (4, 8, 16, 32, 64)]
    (made,) = Anchors([4, 8, 16, 32, 64], 8)(images, maps)
    assert made[0].tolist() == pytest.approx([-16 * 2**0.5, -8 * 2**0.5, 16 * 2**0.5, 8 * 2**0.5])
    last = made[-2 * 3 * 3 :].reshape(2, 3, 3, 4)  # 2 x 3 cells of stride 64, three shapes
    centres = (last[..., :2] + last[..., 2:]) / 2
    assert centres[1, 2].tolist() == [[128.0, 64.0]] * 3
    sides = (last[0, 0, :, 2:] - last[0, 0, :, :2]).prod(-1).sqrt()
    assert sides.tolist() == pytest.approx([512] * 3, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "size", "millions", "billions"),
    [
        ("cascade", "tiny", 86, 745),
        ("cascade", "small", 107, 837),
        ("cascade", "base", 145, 982),
        ("mask", "tiny", 48, 0),
    ],
)
def test_the_papers_models_have_the_papers_parameters_and_multiplications(kind, size, millions, billions):
    """At 1280 x 800 with 1000 regions and masks of 100, as mmdet counts (TL-Align, table 4); 80 classes."""
    backbone = BackboneOptions(model=f"swin_{size}_patch4_window7_224")
    made = DetectOptions(model=backbone, detector=DetectorOptions(kind), augment=DetectAugment(sizes=(224,)))
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        model = build_detector(made, tuple(map(str, range(80))))[0].eval()
        if billions:
            levels, _ = model.levels(torch.empty(1, 3, 800, 1280))
            model.rpn.head(list(levels.values()))
            for stage in model.heads.stages:
                stage(torch.empty(1000, 256, 7, 7))
                stage.mask(torch.empty(100, 256, 14, 14))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert counter.get_total_flops() / 2e9 == pytest.approx(billions, abs=1)


TINY = DetectorOptions(channels=16, hidden=24, regions=16, proposals=40, anchor_scale=4)
FIND = FindOptions(**{**NEW_RUN, "score_thresh": 0.0})
SIZES = ((64, 96), (60, 70))


def objects(count: int = 2) -> BatchObjects:
    """Of two images: the first has the first `count` of two objects, the second none."""
    one, matrix = truth()[0], torch.zeros(2, 3).numpy()
    return BatchObjects(
        Objects(one["boxes"][:n], one["labels"][:n], one["masks"][:n], size, matrix, size)
        for n, size in zip((count, 0), SIZES, strict=True)
    )


def small(name: str, options: DetectorOptions = TINY, **kwargs) -> Detector:
    torch.manual_seed(0)
    backbone = BackboneOptions(model=name, drop_path=0.0, model_kwargs=kwargs)
    augment = DetectAugment(sizes=(64,))
    return build_detector(DetectOptions(model=backbone, detector=options, augment=augment), ("a", "b", "c"))[0]


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("resnet10t", {}),
        ("swin_nano4_patch4_window4_64", {}),
        ("convnext_atto", {"dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1)}),
    ],
)
def test_every_weight_learns_on_every_kind_of_backbone(name, kwargs):
    model = small(name, replace(TINY, norm_eval=name == "resnet10t"), **kwargs).train()
    still = [b.clone() for b in model.features.backbone.buffers()]
    terms = model.losses(torch.randn(2, 3, *CANVAS), objects())
    terms["loss"].backward()
    assert all(torch.isfinite(value) for value in terms.values())
    assert not [n for n, p in model.named_parameters() if p.grad is None]
    assert model.training
    for before, after in zip(still, model.features.backbone.buffers(), strict=True):
        assert torch.equal(before, after)  # batch norms of the ResNet, which are left alone
    found = model.eval().detect(torch.randn(2, 3, *CANVAS), [(64, 96), (60, 70)], FIND)
    assert found[1]["boxes"][:, 2].max() <= 70
    assert found[1]["boxes"][:, 3].max() <= 60
    assert found[0]["masks"].shape[1:] == (28, 28)


def test_boxes_stay_in_float32_under_mixed_precision():
    model = small("resnet10t").eval()
    images = torch.randn(1, 3, 64, 96)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = model.detect(images, [(64, 96)], FIND)
        proposals, _ = model.rpn(ImageList(images, [(64, 96)]), model.levels(images)[0])
    assert found["boxes"].dtype == torch.float32
    steps = proposals[0] * 8 % 1  # bfloat16 has no eighths above 32
    assert (steps[proposals[0] > 32] != 0).any()


def test_images_without_any_object_give_a_loss_and_no_masks_are_needed_for_boxes():
    model = small("resnet10t").train()
    terms = model.losses(torch.randn(2, 3, *CANVAS), objects(0))
    assert terms["mask1"].item() == terms["box1"].item() == 0
    terms["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())
    boxes_only = small("resnet10t", replace(TINY, masks=False, detector="mask")).train()
    terms = set(boxes_only.losses(torch.randn(2, 3, *CANVAS), objects()))
    assert terms == {"loss", "objectness", "anchor", "class", "box"}


def test_backbones_without_stages_are_refused_in_words():
    with pytest.raises(EverytokenError, match=r"strides \[16, 16, 16, 16\].*with stages"):
        small("test_vit")

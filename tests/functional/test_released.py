"""The released label pipeline, written densely with torchvision, and our option that repeats it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.ops import roi_align

from everytoken.functional import collate_maps, from_scores, sample_maps
from tests.functional import make


def released_targets(maps, boxes, label_size, smoothing, hflip=False):
    """The released algorithm, dense: [B, K] image label and [B, N, K] token labels.

    boxes: [B, 4] (left, top, width, height) of the crop in fractions of the (flipped) image.
    """
    h, w = maps.size
    B, K = len(maps), maps.num_classes
    classes = maps.classes.gather(1, maps.local.long().view(B, -1)).view(maps.local.shape)
    dense = torch.zeros(B, h, w, K).scatter_(-1, classes, maps.scores.float()).permute(0, 3, 1, 2)
    if hflip:
        dense = dense.flip(3)
    left, top, width, height = boxes.double().unbind(1)
    # the released mistake: (top, left, height, width) is read as (x, y, width, height)
    rois = torch.stack([torch.arange(B).double(), top, left, top + height, left + width], dim=1)
    rois[:, 1:] = rois[:, 1:] * w - 0.5
    on, off = 1 - smoothing + smoothing / K, smoothing / K
    both = [
        roi_align(dense.double(), rois, (n, n), 1.0, -1, aligned=False).flatten(2).softmax(1) * on + off
        for n in (1, label_size)
    ]
    return both[0][:, :, 0].float(), both[1].transpose(1, 2).float()


def assert_close_to_released(maps, placement, image, tokens, atol):
    got = sample_maps(maps, placement, (4, 4), released=True)
    for scores, wanted in ((got.image, image), (got.tokens.flatten(1, 2), tokens)):
        target = from_scores(scores, maps.classes, 30).smooth(0.1, released=True)
        torch.testing.assert_close(target.dense(), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("hflip", [False, True])
def test_released_sampling_equals_the_released_algorithm(hflip):
    rng = np.random.default_rng(1)
    maps = make.maps(rng, n=40, h=9, w=9, num_classes=30)
    size = torch.tensor(rng.uniform(0.02, 1, (40, 2)), dtype=torch.float32)  # some crops are below one cell
    size[0], size[1] = 1, torch.tensor([1.0, 0.05])
    start = torch.tensor(rng.random((40, 2)), dtype=torch.float32) * (1 - size)
    boxes = torch.cat([start, size], dim=1)  # in the flipped image
    image, tokens = released_targets(maps, boxes, 4, 0.1, hflip)
    placement = make.crops(torch.cat([start, start + size], dim=1))
    if hflip:
        placement[:, 0, 2], placement[:, 0, 0] = 1 - start[:, 0], -placement[:, 0, 0]
    assert_close_to_released(maps, placement, image, tokens, 1e-5)


def test_the_released_code_reads_the_wrong_quadrant_and_we_do_not():
    classes = np.zeros((8, 8, 1), np.int64)
    classes[:4, 4:], classes[4:, :4] = 1, 2  # top right is class 1, bottom left class 2
    maps = collate_maps([make.plain(np.full((8, 8, 1), 9.0, np.float32), classes)], 3)
    top_right = make.batch([make.crop(0.5, 0, 1, 0.5)])
    assert sample_maps(maps, top_right, (2, 2)).image[0].argmax() == 1
    assert sample_maps(maps, top_right, (2, 2), released=True).image[0].argmax() == 2


def turned_by_hand(maps, degrees, hflip):
    """The released code's map of a flipped and rotated image, cell by cell: nearest, about (h/2, w/2), 0 outside."""
    (h, w), angle = maps.size, np.radians(degrees)
    scores, local = torch.zeros_like(maps.scores), maps.local.clone()
    first = maps.apply(lambda t: t.flip(2) if t.dim() == 4 else t) if hflip else maps
    for y in range(h):
        for x in range(w):
            dx, dy = x - w / 2, y - h / 2
            sx = int(np.floor(np.cos(angle) * dx - np.sin(angle) * dy + w / 2 + 0.5))
            sy = int(np.floor(np.sin(angle) * dx + np.cos(angle) * dy + h / 2 + 0.5))
            if 0 <= sx < w and 0 <= sy < h:
                scores[:, y, x], local[:, y, x] = first.scores[:, sy, sx], first.local[:, sy, sx]
    return replace(maps, scores=scores, local=local)


@pytest.mark.parametrize("hflip", [False, True])
@pytest.mark.parametrize("degrees", [-27.0, 11.0])
def test_rotated_maps_are_warped_to_the_nearest_cell_as_released(hflip, degrees):
    rng = np.random.default_rng(2)
    maps = make.maps(rng, n=6, h=9, w=9, num_classes=30)
    size = torch.tensor(rng.uniform(0.3, 0.8, (6, 2)), dtype=torch.float32)
    start = torch.tensor(rng.random((6, 2)), dtype=torch.float32) * (1 - size)
    image, tokens = released_targets(turned_by_hand(maps, degrees, hflip), torch.cat([start, size], dim=1), 4, 0.1)
    flip = make.crop(0, 0, 1, 1, hflip=hflip)
    turn = make.about_centre(make.rotation(degrees))
    boxes = torch.cat([start, start + size], dim=1).tolist()
    placement = make.batch([make.then(make.then(make.crop(*box), turn), flip) for box in boxes])
    assert_close_to_released(maps, placement, image, tokens, 1e-4)


def test_straight_images_beside_a_rotated_one_are_read_as_if_alone():
    maps = make.maps(np.random.default_rng(0), n=3, h=8, w=8)
    straight = [make.crop(0.1, 0.2, 0.9, 0.6), make.crop(0.3, 0, 0.8, 0.7, hflip=True, vflip=True)]
    both = make.batch([*straight, make.about_centre(make.rotation(20))])
    got = sample_maps(maps, both, (3, 3), released=True)
    alone = sample_maps(maps.apply(lambda t: t[:2]), both[:2], (3, 3), released=True)
    torch.testing.assert_close(got.tokens[:2], alone.tokens)
    torch.testing.assert_close(got.image[:2], alone.image)


def test_an_image_without_a_map_has_no_weight_in_released_mode_either():
    maps = collate_maps([make.record(np.random.default_rng(0), h=6, w=6), None], 20)
    got = sample_maps(maps, make.batch([make.crop(0, 0, 1, 1)] * 2), (2, 2), released=True)
    assert got.weight.tolist() == [[[1, 1], [1, 1]], [[0, 0], [0, 0]]]
    assert got.image_weight.tolist() == [1, 0]

"""Random maps and placements for the tests of this folder."""

import math
from types import SimpleNamespace

import numpy as np
import torch

from everytoken.functional import collate_maps


def plain(scores, classes, area=(0.0, 0.0, 1.0, 1.0)):
    """A score map of given arrays [h, w, k]."""
    return SimpleNamespace(scores=scores, classes=classes, area=area)


def record(rng, h=6, w=5, k=3, num_classes=20, words=8, area=(0.0, 0.0, 1.0, 1.0), dtype="f4"):
    """A score map with few classes, distinct within a cell."""
    few = rng.choice(num_classes, size=words, replace=False)
    classes = np.stack([rng.choice(few, size=k, replace=False) for _ in range(h * w)]).reshape(h, w, k)
    scores = -np.sort(-rng.normal(1, 3, size=(h, w, k)), axis=-1)
    return plain(scores.astype(dtype), classes.astype("u2"), area)


def crop(x0, y0, x1, y1, hflip=False, vflip=False):
    """Placement of a crop, perhaps mirrored."""
    a = np.array([[x1 - x0, 0, x0], [0, y1 - y0, y0]], dtype=np.float64)
    if hflip:
        a[0] = [-(x1 - x0), 0, x1]
    if vflip:
        a[1] = [0, -(y1 - y0), y1]
    return a


def about_centre(linear, aspect=1.0):
    """Placement from a 2x2 matrix in pixels, about the image's centre; aspect = width / height."""
    to_pixels, back = np.diag([aspect, 1.0]), np.diag([1 / aspect, 1.0])
    m = back @ np.asarray(linear, dtype=np.float64) @ to_pixels
    return np.hstack([m, (0.5 - m @ [0.5, 0.5])[:, None]])


def rotation(degrees):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return np.array([[c, -s], [s, c]])


def then(first, second):
    """The placement that applies `first` to network points, then `second`."""
    m = second[:, :2] @ first
    m[:, 2] += second[:, 2]
    return m


def crops(boxes):
    """Placements [B, 2, 3] of boxes [B, 4] (x0, y0, x1, y1)."""
    placement = torch.zeros(len(boxes), 2, 3)
    placement[:, 0, 0], placement[:, 1, 1] = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    placement[:, :, 2] = boxes[:, :2]
    return placement


def batch(placements):
    return torch.tensor(np.stack(placements), dtype=torch.float32)


def maps(rng, n=3, num_classes=20, **how):
    return collate_maps([record(rng, num_classes=num_classes, **how) for _ in range(n)], num_classes)

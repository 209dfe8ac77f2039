"""Views for detection: the whole image at some size, perhaps mirrored.

Training draws a short side (the papers: 480 to 800 in steps of 32) and a flip; the long side is at most 1333.
Evaluation takes one size and no flip. Everything random is drawn from the generator that is passed in.
"""

from __future__ import annotations

import numpy as np

from everytoken.data import placement as pl
from everytoken.data.decode import Picture
from everytoken.data.warp import render


def resized(size: tuple[int, int], short: int, longest: int) -> tuple[int, int]:
    """(width, height) of an image whose short side becomes `short`, unless its long side would exceed `longest`."""
    factor = min(short / min(size), longest / max(size))
    return max(int(size[0] * factor + 0.5), 1), max(int(size[1] * factor + 0.5), 1)


class DetectTransform:
    """A view of an image.

    Args:
        sizes: short sides to draw from. longest: limit of the long side. hflip: chance of a flip.
        fill: colour of what lies outside, which nothing does but rounding.
    """

    def __init__(
        self, sizes: tuple[int, ...], longest: int, hflip: float = 0.0, fill: tuple[int, int, int] = (124, 116, 104)
    ) -> None:
        self.sizes, self.longest, self.hflip, self.fill = sizes, longest, hflip, fill

    def __call__(self, picture: Picture, rng: np.random.Generator | None = None) -> tuple[np.ndarray, pl.Affine]:
        """(pixels uint8 [h, w, 3], matrix [2, 3]: pixel of the view -> pixel of the upright source)."""
        which, flip = rng.random(2).tolist() if rng is not None else (0.0, 1.0)
        width, height = resized(picture.size, self.sizes[int(which * len(self.sizes))], self.longest)
        matrix = np.array([[picture.size[0] / width, 0.0, 0.0], [0.0, picture.size[1] / height, 0.0]])
        if flip < self.hflip:
            matrix = pl.compose(matrix, np.array([[-1.0, 0.0, width], [0.0, 1.0, 0.0]]))
        return render(picture, matrix, (height, width), bicubic=False, fill=self.fill)

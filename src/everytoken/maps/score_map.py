"""`ScoreMap`: an annotator's class scores for each cell of one image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

RESIZE_MODES = ("squash", "letterbox", "center")
Area = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreMap:
    """An annotator's class scores for each cell of one image: the k best classes and their logits.

    Attributes:
        scores: float16 [h, w, k], logits, descending along k.
        classes: uint16 or uint32 [h, w, k], the class of each score; distinct within a cell.
        size: (width, height) of the upright source image in pixels; (0, 0) if not known.
        area: (x0, y0, x1, y1), the rectangle of the image, in fractions, that the whole grid covers. The whole
            image is (0, 0, 1, 1); a centre crop lies inside; a letterboxed image's area reaches outside.

    Example:
        >>> score_map = ScoreMap.from_logits(np.random.randn(14, 14, 1000), top_k=5, size=(500, 375))
        >>> score_map.scores.shape
        (14, 14, 5)
    """

    scores: NDArray[np.float16]
    classes: NDArray[np.uint16] | NDArray[np.uint32]
    size: tuple[int, int] = (0, 0)
    area: Area = (0.0, 0.0, 1.0, 1.0)

    @classmethod
    def from_logits(
        cls, logits: ArrayLike, top_k: int = 5, size: tuple[int, int] = (0, 0), area: Area = (0.0, 0.0, 1.0, 1.0)
    ) -> ScoreMap:
        """Keep the `top_k` best classes of each cell.

        Args:
            logits: [h, w, K], a NumPy array or a tensor on the CPU. A network's [K, h, w] is `.permute(1, 2, 0)` first.
            top_k: classes to keep, at most K.
            size: (width, height) of the upright image, pixels.
            area: the rectangle that the grid covers; `map_area` computes it for the usual ways of resizing.
        """
        dense = np.asarray(logits, np.float32)
        if dense.ndim != 3 or not 1 <= top_k <= dense.shape[-1]:
            raise ValueError(f"logits must be [h, w, K] with K >= top_k ({top_k}), got {list(dense.shape)}.")
        classes = np.argsort(-dense, axis=-1, kind="stable")[..., :top_k]
        scores = np.take_along_axis(dense, classes, -1)
        with np.errstate(over="ignore"):  # infinite scores are refused by name when they are written
            return cls(scores.astype(np.float16), classes.astype(class_dtype(dense.shape[-1])), size, area)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ScoreMap):
            return NotImplemented
        return (
            self.size == other.size
            and self.area == other.area
            and np.array_equal(self.classes, other.classes)
            and np.array_equal(self.scores, other.scores)
        )

    __hash__ = None  # type: ignore[assignment]


def map_area(resize_mode: str, size: tuple[int, int], aspect: float = 1.0, crop: float = 1.0) -> Area:
    """The area that a network's input covers of an image of ``size`` (width, height), in fractions of it.

    Args:
        resize_mode: ``squash`` resizes the whole image; ``letterbox`` keeps its aspect and pads; ``center``
            keeps its aspect and crops what sticks out.
        size: of the upright image, pixels.
        aspect: width / height of the network's input.
        crop: for ``center``, the fraction of the side that is kept (timm's crop_pct).
    """
    if resize_mode == "squash":
        return (0.0, 0.0, 1.0, 1.0)
    if resize_mode not in RESIZE_MODES:
        raise ValueError(f"resize mode {resize_mode!r} is not one of {', '.join(RESIZE_MODES)}.")
    width, height = size
    if min(width, height) < 1:
        raise ValueError(f"resize mode {resize_mode!r} needs the image's size, got {size}.")
    ratio = aspect * height / width  # < 1: the image is wider than the input
    if resize_mode == "letterbox":
        across, down = max(1.0, ratio), max(1.0, 1 / ratio)
    else:
        across, down = crop * min(1.0, ratio), crop * min(1.0, 1 / ratio)
    return ((1 - across) / 2, (1 - down) / 2, (1 + across) / 2, (1 + down) / 2)


def class_dtype(num_classes: int) -> np.dtype[np.unsignedinteger]:
    """The type of class ids on disk: 16 bits while they suffice."""
    return np.dtype("<u2") if num_classes <= 65535 else np.dtype("<u4")

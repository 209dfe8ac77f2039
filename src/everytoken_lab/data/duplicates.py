"""Images that are the same, or nearly.

Near duplicates are found by a difference hash: the image as 9 x 8 grey cells, one bit for each pair of neighbours that
says which is brighter. Two images are candidates when 3 of 64 bits differ at most (they then agree in one of four bands
of 16 bits, by which they are found), and near duplicates when their 16 x 16 thumbnails also differ by 3 % at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
from PIL import Image

from everytoken.errors import EverytokenError
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.decode import Picture, naming_errors

_BANDS = 4
_NEAR_BITS = 3
_NEAR_PIXELS = 0.03 * 255
_FLAT = 4.0  # grey levels of spread below which an image is too empty to compare
_CROWD = 64  # images in one band beyond which it says too little to compare more than neighbours


@dataclass(frozen=True)
class ImageFacts:
    """What is known of one image; `trouble`: why it cannot be read, and the rest is then empty."""

    trouble: str = ""
    digest: bytes = b""
    size: tuple[int, int] = (0, 0)
    code: int = 0
    thumb: bytes = b""


def read_facts(data: DataSet, index: int) -> ImageFacts:
    """Read and decode one image."""
    try:
        with naming_errors(data.where(index)):
            raw = data.open_bytes(index)
        image = Picture(raw, data.where(index)).upright()
    except EverytokenError as error:
        return ImageFacts(trouble=str(error).splitlines()[0])
    code, thumb = fingerprint(image)
    return ImageFacts("", hashlib.blake2b(raw, digest_size=16).digest(), image.size, code, thumb)


def fingerprint(image: Image.Image) -> tuple[int, bytes]:
    """(difference hash, thumbnail); a flat image has hash 0 and no thumbnail."""
    cells = np.asarray(image.convert("L").resize((9, 8), Image.Resampling.BOX), np.int16)
    thumb = np.asarray(image.convert("RGB").resize((16, 16), Image.Resampling.BOX))
    if thumb.std() < _FLAT:
        return 0, b""
    bits = (cells[:, 1:] > cells[:, :-1]).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big"), thumb.tobytes()


def read_all(data: DataSet, indices: Sequence[int], workers: int, tell: Callable[[], None]) -> list[ImageFacts]:
    """One `ImageFacts` per index, in order."""
    out = list[ImageFacts]()
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for facts in pool.map(lambda index: read_facts(data, index), indices):
            out.append(facts)
            tell()
    return out


def equal_pairs(facts: Sequence[ImageFacts]) -> list[tuple[int, int]]:
    """Pairs of images with the same bytes: the first one, and each of the others."""
    first: dict[bytes, int] = {}
    pairs = [(first.setdefault(image.digest, i), i) for i, image in enumerate(facts) if image.digest]
    return [pair for pair in pairs if pair[0] != pair[1]]


def near_pairs(facts: Sequence[ImageFacts]) -> list[tuple[int, int]]:
    """Pairs of images that look the same and have other bytes."""
    bands: dict[tuple[int, int], list[int]] = {}
    for position, image in enumerate(facts):
        if image.thumb:
            for band in range(_BANDS):
                bands.setdefault((band, image.code >> 16 * band & 0xFFFF), []).append(position)
    found = set()
    for members in bands.values():
        pairs = combinations(members, 2) if len(members) <= _CROWD else pairwise(members)
        found |= {pair for pair in pairs if alike(facts[pair[0]], facts[pair[1]])}
    return sorted(found)


def alike(first: ImageFacts, second: ImageFacts) -> bool:
    """Whether two images look the same and have other bytes."""
    if first.digest == second.digest or (first.code ^ second.code).bit_count() > _NEAR_BITS:
        return False
    a, b = (np.frombuffer(image.thumb, np.uint8).astype(np.int16) for image in (first, second))
    return float(np.abs(a - b).mean()) <= _NEAR_PIXELS

"""Small real files for tests that drive the command line."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def make_photos(root: Path, classes: int = 3, train: int = 12, val: int = 4, size: tuple[int, int] = (40, 36)) -> Path:
    """An ImageFolder tree: each class is a coloured disc at a random place on noise."""
    rng = np.random.default_rng(0)
    colours = np.array([[220, 40, 40], [40, 200, 60], [60, 80, 230], [230, 210, 40]])
    rows, columns = np.mgrid[: size[1], : size[0]]
    for split, count in (("train", train), ("val", val)):
        for c in range(classes):
            place = root / split / f"class-{c}"
            place.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = rng.integers(60, 160, (size[1], size[0], 3)).astype(np.uint8)
                y, x = rng.integers(10, size[1] - 10), rng.integers(10, size[0] - 10)
                pixels[(rows - y) ** 2 + (columns - x) ** 2 < 80] = colours[c]
                Image.fromarray(pixels).save(place / f"photo.{i}.png")
    return root


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """36 training and 12 validation images of three classes."""
    return make_photos(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="session")
def photo_maps(photos, tmp_path_factory) -> Path:
    """A store of score maps of the training images: random ones, over nine classes that are not the folders'."""
    from everytoken.maps import MapWriter, ScoreMap, StoreMeta

    root, rng = photos / "train", np.random.default_rng(0)
    path = tmp_path_factory.mktemp("photo-maps") / "maps"
    keys = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.png"))
    with MapWriter(path, keys, StoreMeta((5, 6), 2, tuple(f"thing {i}" for i in range(9)))) as writer:
        for key in keys:
            classes = np.stack([rng.permutation(9)[:2] for _ in range(30)]).reshape(5, 6, 2).astype(np.uint16)
            scores = np.sort(rng.normal(3, 1, (5, 6, 2)))[..., ::-1].astype(np.float16)
            writer.write({key: ScoreMap(scores, classes, (40, 36))})
        writer.finalize()
    return path

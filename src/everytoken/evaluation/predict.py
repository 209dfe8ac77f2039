"""What a trained model says about images that nobody has labelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from everytoken.data.batch import Prefetcher
from everytoken.data.datasets import FolderReader, ReaderSet, gather_images
from everytoken.data.loader import BadImages, Loader
from everytoken.evaluation.run import Voter, check_vote, eval_view
from everytoken.models.open import open_model


@dataclass(frozen=True)
class Answer:
    """The best classes of one image, as (name, probability), best first."""

    image: str
    classes: list[tuple[str, float]]


@torch.no_grad()
def predict_images(
    source: str,
    images: Sequence[str],
    *,
    top: int = 5,
    architecture: str = "",
    img_size: int | None = None,
    crop_pct: float = 0.0,
    token_vote: float = 0.0,
    batch_size: int = 64,
    workers: int = 0,
    device: str = "cpu",
    amp: bool = False,
    on_bad_image: str = "raise",
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Answer], dict[str, str]]:
    """Classify images.

    Args:
        source: run folder, weights file or timm:NAME.
        images: files and folders; folders are searched to the bottom.
        top: classes for each image.
        architecture, img_size, crop_pct, token_vote: as in `evaluate`.
        on_bad_image: "raise", or "skip" for images that cannot be read.
        tell: hears how many images are done, of how many.

    Returns:
        An answer for each image that could be read, and why the others could not.
    """
    root, names = gather_images(images)
    loaded = open_model(source, architecture=architecture, img_size=img_size)
    check_vote(loaded, token_vote)
    view, bad = eval_view(loaded, crop_pct), BadImages(on_bad_image)
    data = ReaderSet(str(root), FolderReader(root, names), range(len(names)), names, [-1] * len(names), [])
    loader = Loader(data, view, batch_size, train=False, workers=workers, bad_images=bad)
    model = Voter(loaded.model, token_vote).to(device).eval()
    known = loaded.class_names
    out: dict[int, Answer] = {}
    try:
        for batch in Prefetcher(loader.epoch(0), device, view.mean, view.std):
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
                sure = model(batch.images).float().softmax(-1)
            values, places = sure.topk(min(top, sure.shape[1]))
            assert batch.indices is not None
            for i, row, at in zip(batch.indices.tolist(), values.tolist(), places.tolist(), strict=True):
                path = str(root / names[i])
                out[i] = Answer(path, [(known[c], p) for c, p in zip(at, row, strict=True)])
            tell(len(out), len(names))
    finally:
        loader.close()
    return [out[i] for i in sorted(out)], dict(bad.seen)

"""`segment eval` and `segment predict`: a trained segmenter, or a classifier's token head, on images."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from everytoken.data.given import gather_images, result_stems
from everytoken.data.loader import BadImages, Loader
from everytoken.data.sources import DataSet
from everytoken.errors import EverytokenError
from everytoken.evaluation.held_out import held_out
from everytoken.tasks.segment.data import EvalSamples, MaskSet
from everytoken.tasks.segment.draw import as_palette_image, overlay, panel, sheet
from everytoken.tasks.segment.infer import Inference
from everytoken.tasks.segment.layouts import class_lookup, divided, open_masks
from everytoken.tasks.segment.metrics import Confusion
from everytoken.tasks.segment.model import load_segmenter
from everytoken.tasks.segment.options import EvalOptions, MaskOptions
from everytoken.tasks.segment.task import build_inference
from everytoken.tasks.segment.token import load_token_segmenter, read_class_map

Head = Literal["segment", "token", "class"]


@dataclass(frozen=True)
class Asked:
    """What answers, and what it calls its answers.

    Attributes:
        class_names: of the answers. notes: what to tell the user.
    """

    ask: Inference
    class_names: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Evaluation:
    """Numbers of one model on one set: mIoU, mAcc, aAcc in percent, images, images_per_second."""

    numbers: dict[str, float]
    confusion: Confusion
    class_names: list[str]
    notes: list[str]
    skipped: dict[str, str]


def prepare(
    source: str, names: Sequence[str] | None, options: EvalOptions, *, head: Head = "segment", class_map: str = "",
    architecture: str = "", img_size: int = 0, resize: int = 0, device: str = "cpu",
) -> Asked:  # fmt: skip
    """Load what answers.

    Args:
        names: classes of the data; None: answer in the model's own.
        img_size: another input size, for classifiers. resize: the short side of images; 0: as in training.
    """
    if head == "segment":
        loaded = load_segmenter(source)
        about = loaded.description
        ask = build_inference(loaded.model.to(device), about, resize or about.evaluation.get("resize", 0), options)
        own = list(about.class_names)
        if names is None or list(names) == own:
            return Asked(ask, own, [])
        columns = torch.from_numpy(class_lookup(names, own, "the data"))
        return Asked(replace(ask, columns=columns), list(names), [f"{len(names)} of the {len(own)} classes are asked"])
    wanted = list(names) if names is not None else _names_of_map(class_map)
    model, classifier, mapping = load_token_segmenter(source, wanted, class_map, head, architecture, img_size or None)
    size = classifier.info.img_size
    if size[0] != size[1]:
        raise EverytokenError(f"{source} takes {size[0]}x{size[1]} pixels; windows have to be square here")
    options = replace(options, mode="slide")
    facts = classifier.info
    ask = Inference(model.to(device), resize or size[0], size[0], facts.mean, facts.std, options, fixed=True)
    known, used = (
        int((torch.bincount(mapping[mapping >= 0], minlength=len(wanted)) > 0).sum()),
        int((mapping >= 0).sum()),
    )
    note = (
        f"the {head} head answers for {known} of {len(wanted)} classes of the data, with {used} of its {len(mapping)} "
        f"classes, in windows of {size[0]} pixels"
    )
    return Asked(ask, wanted, [note])


def _names_of_map(path: str) -> list[str]:
    if not path:
        raise EverytokenError("a token head needs a --class-map FILE.json that names the classes to draw")
    return list(read_class_map(path))


def evaluate(
    source: str, data: str, options: EvalOptions | None = None, masks: MaskOptions | None = None, *,
    split: str = "val", workers: int = 0, device: str = "cpu", amp: bool = False, on_bad_image: str = "raise",
    pictures: str = "", picture_count: int = 16, **how: Any,
) -> Evaluation:  # fmt: skip
    """Numbers of a segmenter on a data set; see `everytoken segment eval --help`. `how` goes to `prepare`."""
    found, notes = _open(source, data, split, masks or MaskOptions())
    asked = prepare(source, found.class_names, options or EvalOptions(), device=device, **how)
    counts = Confusion(len(asked.class_names))
    bad = BadImages(on_bad_image)
    loader = Loader(
        found, None, 1, train=False, workers=workers, bad_images=bad,
        samples=EvalSamples(found, on_bad_image == "skip"),
    )  # fmt: skip
    panels: list[Image.Image] = []
    started, images = time.perf_counter(), 0
    for batch, answer in _answers(asked.ask, loader, device, amp):
        counts.add(batch.targets[0], answer)
        images += 1
        if pictures and len(panels) < picture_count:
            pixels = batch.images[0].permute(1, 2, 0).numpy()
            both = [("truth", batch.targets[0].numpy()), ("found", answer.numpy())]
            panels.append(panel(pixels, both, asked.class_names))
    seconds = time.perf_counter() - started
    loader.close()
    if panels:
        Path(pictures).parent.mkdir(parents=True, exist_ok=True)
        sheet(panels).save(pictures, quality=88)
    numbers = {**counts.summary(), "images": images, "images_per_second": images / seconds}
    return Evaluation(numbers, counts, asked.class_names, [*notes, *asked.notes], dict(bad.seen))


def _open(source: str, data: str, split: str, masks: MaskOptions) -> tuple[DataSet, list[str]]:
    """The images to evaluate on, and what to say about them: of data without parts, what the run held out."""
    if split != "val" or masks.val_split or divided(data, masks):
        return open_masks(data, split, masks), []
    known = held_out(
        [source], data, lambda run: run.names(data) if (run.config.get("images") or "") == masks.images else None
    )
    found = open_masks(data, "val" if known.share else "all", replace(masks, val_split=known.share))
    note = known.note(data, len(found))
    return found, [note] if note else []


def predict(
    source: str, images: Sequence[str], output: str, options: EvalOptions | None = None, *,
    workers: int = 0, device: str = "cpu", amp: bool = False, **how: Any,
) -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """Masks and pictures of images, written to a folder; never over an image.

    Returns:
        A row for each image (file, classes with their parts in percent), and what to tell the user.
    """
    root, names = gather_images(images)
    out = Path(output)
    stems = result_stems(root, names, out, (".png", ".overlay.jpg"))
    found = MaskSet(root, names, [], [], {})
    asked = prepare(source, None, options or EvalOptions(), device=device, **how)
    loader = Loader(found, None, 1, train=False, workers=workers, samples=EvalSamples(found, masks=False))
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for batch, answer in _answers(asked.ask, loader, device, amp):
        mask = answer.numpy()
        stem = stems[batch.keys[0]]
        stem.parent.mkdir(parents=True, exist_ok=True)
        as_palette_image(mask, len(asked.class_names)).save(stem.with_name(stem.name + ".png"))
        pixels = batch.images[0].permute(1, 2, 0).numpy()
        Image.fromarray(overlay(pixels, mask, len(asked.class_names))).save(
            stem.with_name(stem.name + ".overlay.jpg"), quality=90
        )
        parts = np.bincount(mask.reshape(-1), minlength=len(asked.class_names)) / mask.size
        order = [i for i in np.argsort(-parts, kind="stable").tolist() if parts[i] > 0]
        rows.append({"image": batch.keys[0], **{asked.class_names[i]: round(100 * float(parts[i]), 2) for i in order}})
    loader.close()
    (out / "classes.json").write_text(json.dumps(dict(enumerate(asked.class_names)), indent=1))
    return rows, asked.notes


def _answers(ask: Inference, loader: Loader, device: str, amp: bool) -> Iterator[tuple[Any, Tensor]]:
    for batch in loader.epoch(0):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
            answer = ask(batch.images.to(device))
        yield batch, answer.cpu()


__all__ = ["Asked", "DataSet", "Evaluation", "evaluate", "predict", "prepare"]

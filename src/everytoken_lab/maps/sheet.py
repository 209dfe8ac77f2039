"""A sheet to look at before training: photo, the map's classes as coloured cells, confidence, legend.

Every pixel of the photo is looked up in the map through the map's area, so squashed, letterboxed and centre-cropped
maps are all shown where they lie; what the map does not cover stays grey.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from everytoken.errors import EverytokenError
from everytoken.maps import Maps, ScoreMap
from everytoken_lab import draw
from everytoken_lab.classes import class_finder, shown_name
from everytoken_lab.data.decode import ImageError, naming_errors, open_image
from everytoken_lab.maps.summary import folder_label, sample_positions, summarize, summarize_some

log = logging.getLogger(__name__)
SUBTITLE = "colour: best class of each cell, stronger where surer · legend: main classes with their part of the cells"
WRONG, OTHERS = "map and folder disagree", "others"
_SCANNED = 5000  # maps to look through for interesting ones


def sheet_picture(maps: Maps, keys: Sequence[str] = (), images: Path | None = None, count: int = 24) -> Image.Image:
    """Images with their maps in one picture: those that are named by `keys`, or first those where map and folder
    disagree, then others; see `everytoken maps sheet`."""
    chosen = [(key, "") for key in keys]
    if not chosen:
        if not len(maps) or count < 1:
            raise EverytokenError(f"{maps.path} has no maps to show, or count is {count}.")
        picks, counts = pick(maps, count)
        scanned = sum(counts.values())
        chosen = [(key, f"{reason} ({counts[reason]:,} of {scanned:,} looked at)") for key, reason in picks]
    folder = None if images is None else find_images(images, [key for key, _ in chosen])
    names, find = [shown_name(maps.meta.class_name(k)) for k in range(maps.num_classes)], class_finder(maps.class_names)
    colours, cards = draw.ClassColours(names), []
    for key, section in chosen:
        photo, remark = (None, "") if folder is None else load_photo(folder / key, maps[key].size)
        row = _row(maps[key], names, colours, folder_label(key, find), photo, remark)
        cards.append(draw.Card(key, [row], section))
    title, name = f"{maps.path.resolve().name} · {len(maps):,} maps", maps.meta.annotator.get("name")
    title += f" of {maps.grid[0]}x{maps.grid[1]} cells" + (f" · {name}" if isinstance(name, str) else "")
    return draw.draw_sheet(title, SUBTITLE, cards, 2)


def pick(maps: Maps, count: int) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Images to look at first, of those spread over the store, and how many there are of each kind.

    Wrong ones (the map's class is not the folder's) come surest first and take up to half of the places; the others are
    evenly spread, for a fair impression.
    """
    wrong, others = list[tuple[float, str]](), list[str]()
    for key, summary, label in summarize_some(maps, _SCANNED):
        if label is not None and label != summary.image_class:
            wrong.append((-summary.image_confidence, key))
        else:
            others.append(key)
    shown = max(min(len(wrong), count // 2), count - len(others))
    picks = [(key, WRONG) for _, key in sorted(wrong)[:shown]]
    picks += [(others[i], OTHERS) for i in sample_positions(len(others), count - len(picks))]
    return picks, {WRONG: len(wrong), OTHERS: len(others)}


def find_images(images: Path, keys: Sequence[str]) -> Path:
    """The folder that the keys are relative to: the given one, or one in it (of a split)."""
    if not images.is_dir():
        raise EverytokenError(f"there is no image folder {images}.")
    folders = [images, *sorted(path for path in images.iterdir() if path.is_dir())]
    there, best = max(((sum((f / key).is_file() for key in keys), f) for f in folders), key=lambda pair: pair[0])
    if not there:
        raise EverytokenError(f"no image was found under {images}: for example, there is no {best / keys[0]}.")
    if there < len(keys):
        log.info(f"note: {len(keys) - there} of {len(keys)} images were not found under {best}")
    return best


def load_photo(path: Path, size: tuple[int, int]) -> tuple[Image.Image | None, str]:
    """An upright RGB image as large as a panel, and a remark when something is odd about it."""
    try:
        with open_image(path, path.name) as opened, naming_errors(path.name):
            opened.draft("RGB", (2 * draw.PANEL, 2 * draw.PANEL))  # JPEG: decode no more than needed
            full = opened.size
            photo = ImageOps.exif_transpose(opened).convert("RGB")
    except ImageError as error:
        return None, f"cannot show {error}"
    changed = size != (0, 0) and abs(photo.width / photo.height - size[0] / size[1]) > 0.02 * size[0] / size[1]
    remark = f"the image is not the annotated one: it was {size[0]}x{size[1]}, is {full[0]}x{full[1]}"
    return draw.fit_photo(photo), remark if changed else ""


def _row(
    score_map: ScoreMap,
    names: Sequence[str],
    colours: draw.ClassColours,
    folder_class: int | None,
    photo: Image.Image | None,
    remark: str,
) -> draw.Row:
    summary = summarize(score_map, len(names))
    label, ink = f"map: {names[summary.image_class]} {summary.image_confidence:.0%}", draw.FAINT
    if folder_class is not None:
        same = folder_class == summary.image_class
        label += ", like its folder" if same else f"      folder: {names[folder_class]}"
        ink = draw.GREEN if same else draw.RED
    if photo is None:  # grey, of the same shape
        width, height = score_map.size if min(score_map.size) > 0 else (draw.PANEL, draw.PANEL)
        scale = draw.PANEL / max(width, height)
        photo = Image.new("RGB", (max(1, round(width * scale)), max(1, round(height * scale))), "#d0d0d4")
    area, confidence = score_map.area, summary.confidence[summary.inside]
    sure = f"{confidence.min():.0%} to {confidence.max():.0%} · {summary.vocabulary} classes"
    top = np.where(summary.inside, summary.top, -1)
    painted, legend = draw.class_picture(photo, top, summary.confidence, names.__getitem__, colours, area)
    panels = [
        draw.Panel("photo", photo),
        draw.Panel("what the map says", painted),
        draw.Panel("how sure it is", draw.heat_overlay(photo, summary.confidence, area), sure),
    ]
    label, ink = (f"{label}      {remark}", draw.RED) if remark else (label, ink)
    return draw.Row(label, panels, legend, [("0 %", "100 %", "heat")], ink)

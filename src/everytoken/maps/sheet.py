"""A sheet to look at before training: photo, the map's classes as coloured cells, confidence, legend.

Every pixel of the photo is looked up in the map through the map's area, so squashed, letterboxed and centre-cropped
maps are all shown where they lie; what the map does not cover stays grey.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from everytoken import draw
from everytoken.data.decode import FORMATS
from everytoken.maps.score_map import ScoreMap
from everytoken.maps.summary import MapSummary

SUBTITLE = "colour: best class of each cell, stronger where surer · legend: main classes with their part of the cells"


@dataclass(frozen=True)
class Tile:
    """One image of a sheet. ``photo`` is None when it cannot be shown; ``remark`` says why, or something else."""

    key: str
    section: str
    score_map: ScoreMap
    summary: MapSummary
    label: int | None = None
    photo: Image.Image | None = None
    remark: str = ""


def load_photo(path: Path, size: tuple[int, int]) -> tuple[Image.Image | None, str]:
    """An upright RGB image as large as a panel, and a remark when something is odd about it."""
    try:
        with Image.open(path, formats=FORMATS) as opened:
            opened.draft("RGB", (2 * draw.PANEL, 2 * draw.PANEL))  # JPEG: decode no more than needed
            full = opened.size
            photo = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return None, f"cannot show {path.name}: {error}"
    remark = ""
    if size != (0, 0) and abs(photo.width / photo.height - size[0] / size[1]) > 0.02 * size[0] / size[1]:
        remark = f"the image is not the annotated one: it was {size[0]}x{size[1]}, is {full[0]}x{full[1]}"
    return draw.fit_photo(photo), remark


def draw_sheet(tiles: Sequence[Tile], name_of: Callable[[int], str], title: str, columns: int = 2) -> Image.Image:
    """The whole sheet; tiles of one section stand together under its name."""
    colours = draw.ClassColours()
    return draw.draw_sheet(title, SUBTITLE, [_card(tile, name_of, colours) for tile in tiles], columns)


def _card(tile: Tile, name_of: Callable[[int], str], colours: draw.ClassColours) -> draw.Card:
    summary = tile.summary
    label, ink = f"map: {name_of(summary.image_class)} {summary.image_confidence:.0%}", draw.FAINT
    if tile.label is not None:
        same = tile.label == summary.image_class
        label += ", like its folder" if same else f"      folder: {name_of(tile.label)}"
        ink = draw.GREEN if same else draw.RED
    photo = tile.photo or _blank(tile.score_map)
    rows, columns = tile.score_map.scores.shape[:2]
    cells, inside = draw.cells_of(photo.size, (rows, columns), tile.score_map.area)
    chosen = colours.choose([name_of(c) for c, _ in summary.shares])
    legend = {c: chosen[name_of(c)] for c, _ in summary.shares if name_of(c) in chosen}
    shown = sorted(((c, share) for c, share in summary.shares if c in legend), key=lambda pair: -pair[1])
    entries = [draw.Entry(legend[c], name_of(c), share) for c, share in shown]
    others = len(summary.shares) - len(shown)
    if others > 0:
        rest = 1 - sum(share for _, share in shown)
        entries.append(draw.Entry(draw.OTHER, f"{others} other{'s' if others > 1 else ''}", rest))
    confidence = summary.confidence[summary.inside]
    row = draw.Row(
        label,
        [
            draw.Panel("photo", photo),
            draw.Panel("what the map says", draw.class_overlay(photo, cells, inside, summary, legend)),
            draw.Panel("how sure it is", draw.confidence_overlay(photo, cells, inside, summary)),
        ],
        entries,
        [("0 %", "100 %", "heat")],
        tile.remark or f"sure {confidence.min():.0%} to {confidence.max():.0%} · {summary.vocabulary} classes",
        ink,
        draw.RED if tile.remark else draw.FAINT,
    )
    return draw.Card(tile.key, [row], tile.section)


def _blank(score_map: ScoreMap) -> Image.Image:
    """A stand-in of the right shape for a photo that is not there."""
    width, height = score_map.size if min(score_map.size) > 0 else (draw.PANEL, draw.PANEL)
    scale = draw.PANEL / max(width, height)
    return Image.new("RGB", (max(1, round(width * scale)), max(1, round(height * scale))), "#d0d0d4")

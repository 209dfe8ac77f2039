"""A contact sheet: some images of each class, to look at the data before anything else."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from everytoken.data.sources import DataSet
from everytoken.errors import EverytokenError

TILE, GAP, NAME = 64, 4, 150


def contact_sheet(data: DataSet, classes: int = 20, columns: int = 12) -> Image.Image:
    """One row per class, `columns` images each, evenly spread over the class."""
    shown = data.class_names[:classes]
    size = (NAME + columns * (TILE + GAP) + GAP, len(shown) * (TILE + GAP) + GAP)
    sheet = Image.new("RGB", size, "#ffffff")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=15)
    for row, name in enumerate(shown):
        y = GAP + row * (TILE + GAP)
        draw.text((GAP + 4, y + TILE // 2), name[:18], fill="#1b1f24", font=font, anchor="lm")
        members = np.flatnonzero(data.labels == row)
        count = min(columns, len(members))
        for column in range(count):
            try:
                photo = data.load(int(members[column * len(members) // count]))
            except EverytokenError:
                continue  # `everytoken doctor` names it
            way = Image.Resampling.NEAREST if max(photo.size) < TILE else Image.Resampling.LANCZOS
            sheet.paste(ImageOps.fit(photo, (TILE, TILE), way), (NAME + column * (TILE + GAP), y))
    return sheet

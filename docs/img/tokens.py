"""Draws docs/img/tokens.jpg: a photograph, and what an ImageNet network says about every part of it.

python docs/img/tokens.py            (seconds; extras: registry, demo)

The photograph comes with scikit-learn: Daniel Büchele (danielbuechele on Flickr), CC BY 2.0, changed by the colours.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_image

import everytoken_lab as lab
from everytoken_lab.draw import PALETTE, font_of, rgb

SIDE = 640  # pixels of the annotator's input
SURE, NAMES = 0.3, 6  # least probability of a coloured cell; classes in the legend
GAP, LINE = 12, 40


def main() -> None:
    photo = Image.fromarray(load_sample_image("china.jpg"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "photos" / "one").mkdir(parents=True)
        photo.save(Path(folder) / "photos" / "one" / "china.png")
        maps = lab.annotate(
            f"{folder}/photos",
            f"{folder}/maps",
            "registry:efficientnet_lite2",
            img_size=SIDE,
            foreign_classes=True,
            workers=0,
        )
        score_map = maps["one/china.png"]
        names = maps.class_names
    scores = score_map.scores.astype(np.float32)
    best = np.take_along_axis(score_map.classes, scores.argmax(-1)[..., None], -1)[..., 0]
    absent = len(names) - scores.shape[-1]  # classes that are not kept score 0
    sure = np.exp(scores.max(-1)) / (np.exp(scores).sum(-1) + absent)
    shown, counts = np.unique(best[sure >= SURE], return_counts=True)
    shown = shown[np.argsort(-counts)][:NAMES]

    rows, columns = best.shape
    width, height = photo.size
    colours = {int(number): rgb(PALETTE[i]) for i, number in enumerate(shown)}
    cells = photo.convert("L").convert("RGB")
    pen = ImageDraw.Draw(cells, "RGBA")
    for row in range(rows):
        for column in range(columns):
            box = [
                width * column / columns,
                height * row / rows,
                width * (column + 1) / columns,
                height * (row + 1) / rows,
            ]
            colour = colours.get(int(best[row, column])) if sure[row, column] >= SURE else None
            pen.rectangle(box, fill=(*colour, 150) if colour else None, outline=(255, 255, 255, 70))

    picture = Image.new("RGB", (2 * width + GAP, height + LINE), "white")
    picture.paste(photo, (0, 0))
    picture.paste(cells, (width + GAP, 0))
    pen, font = ImageDraw.Draw(picture), font_of(19)
    legend = {int(number): names[int(number)].split(",")[0].replace("_", " ") for number in shown}
    at = picture.width - sum(45 + int(pen.textlength(text, font=font)) for text in legend.values()) + 20
    for number, text in legend.items():
        pen.rounded_rectangle([at, height + 14, at + 18, height + 32], 4, fill=colours[number])
        pen.text((at + 25, height + 11), text, fill="#1c1c1e", font=font)
        at += 45 + int(pen.textlength(text, font=font))
    picture.save(Path(__file__).with_suffix(".jpg"), quality=88)


if __name__ == "__main__":
    main()

"""Draws docs/img/tokens.jpg: a photo, the object that `predict --pictures` marks in it, and the class of every token.

python docs/img/tokens.py            (a minute; extra: registry)

The photo comes with scikit-learn: Daniel Büchele (danielbuechele on Flickr), CC BY 2.0, changed by the colours. The
network is EfficientNet-Lite2 as it was trained on ImageNet.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from sklearn.datasets import load_sample_image

import everytoken_lab as lab
from everytoken_lab.draw import PALETTE, colour_of, font_of, rgb

NETWORK = "registry:efficientnet_lite2"
SIDE = 640  # pixels of the annotator's input
SURE, NAMES = 0.3, 4  # least probability of a coloured token; classes that are coloured
WIDTH, GAP, LINE = 480, 8, 34  # pixels of a panel, between panels, of the captions


def main() -> None:
    """Draw the three panels side by side."""
    photo = Image.fromarray(load_sample_image("china.jpg"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "photos" / "one" / "china.png"
        file.parent.mkdir(parents=True)
        photo.save(file)
        predictions = lab.load(NETWORK).predict(str(file), locate=True)
        found = Image.open(predictions.save_pictures(f"{folder}/found")[0]).convert("RGB")
        settings = {"img_size": SIDE, "foreign_classes": True, "workers": 0}
        maps = lab.annotate(f"{folder}/photos", f"{folder}/maps", NETWORK, **settings)
        score_map, names = maps["one/china.png"], maps.class_names
    scores = score_map.scores.astype(np.float32)
    best = np.take_along_axis(score_map.classes, scores.argmax(-1)[..., None], -1)[..., 0]
    absent = len(names) - scores.shape[-1]  # classes that are not kept score 0
    sure = np.exp(scores.max(-1)) / (np.exp(scores).sum(-1) + absent)
    shown, counts = np.unique(best[sure >= SURE], return_counts=True)
    shown = shown[np.argsort(-counts)][:NAMES]

    height = WIDTH * photo.height // photo.width
    colours = {int(number): rgb(PALETTE[i]) for i, number in enumerate(shown)}
    colours[int(shown[0])] = rgb(colour_of(int(shown[0])))  # as in the middle panel
    cells = photo.convert("L").convert("RGB").resize((WIDTH, height))
    pen = ImageDraw.Draw(cells, "RGBA")
    rows, columns = best.shape
    for row, column in np.ndindex(rows, columns):
        box = [
            WIDTH * column / columns,
            height * row / rows,
            WIDTH * (column + 1) / columns,
            height * (row + 1) / rows,
        ]
        colour = colours.get(int(best[row, column])) if sure[row, column] >= SURE else None
        pen.rectangle(box, fill=(*colour, 150) if colour else None, outline=(255, 255, 255, 70))

    picture = Image.new("RGB", (3 * WIDTH + 2 * GAP, height + LINE), "white")
    for number, panel in enumerate((photo, found, cells)):
        picture.paste(panel.resize((WIDTH, height)), (number * (WIDTH + GAP), 0))
    pen, font, at = ImageDraw.Draw(picture), font_of(17), 2 * (WIDTH + GAP)
    for number, colour in colours.items():
        text = names[number].split(",")[0].replace("_", " ")
        pen.rounded_rectangle([at, height + 12, at + 16, height + 28], 4, fill=colour)
        pen.text((at + 21, height + 9), text, fill="#1c1c1e", font=font)
        at += 36 + int(pen.textlength(text, font=font))
    picture.save(Path(__file__).with_suffix(".jpg"), quality=88)


if __name__ == "__main__":
    main()

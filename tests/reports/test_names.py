"""WordNet ids are told in words wherever people read them."""

import json

import numpy as np
import pytest
from PIL import Image

from everytoken.maps import Maps, MapWriter, StoreMeta
from everytoken_lab.classes import class_finder
from everytoken_lab.cli import main
from everytoken_lab.maps.sheet import namer

IDS = ["n01440764", "n02102040"]


@pytest.mark.parametrize("names", [IDS, ["tench", "English springer"]])
def test_maps_of_wordnet_folders_are_told_in_words(tmp_path, names, capsys):
    keys = [f"{wnid}/{i}.png" for wnid in IDS for i in range(2)]
    for key in keys:
        path = tmp_path / "photos" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (90, 120, 30)).save(path)
    meta = StoreMeta(grid=(2, 2), top_k=2, class_names=names, annotator={"name": "test"})
    with MapWriter(tmp_path / "maps", keys, meta) as writer:
        shape = (4, 2, 2, 2)
        classes = np.array([[0, 1], [0, 1], [1, 0], [1, 0]])[:, None, None]
        areas = [[0.0, 0.0, 1.0, 1.0]] * 4
        scores = np.broadcast_to([3.0, 1.0], shape)
        writer.put(range(4), scores, np.broadcast_to(classes, shape), [[8, 8]] * 4, areas)
        writer.finalize()
    store = Maps(tmp_path / "maps")
    assert namer(store)(1) == "English springer"
    assert main(["maps", "info", str(tmp_path / "maps"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["map's class = folder's"] == "100.0%"


def test_folders_are_compared_with_classes_as_when_annotating():
    find = class_finder(["tench", "golf ball", "crane (n02012849)", "crane (n03126707)", "my own"])
    assert [find(name) for name in ("n01440764", "Tinca tinca", "Golf_Ball", "n03126707")] == [0, 0, 1, 3]
    assert [find(name) for name in ("my_own", "crane", "n02102040", "photos")] == [4, None, None, None]

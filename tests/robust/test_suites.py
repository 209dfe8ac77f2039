"""Folders of test sets, corruption errors, tables."""

import json

import numpy as np
import pytest
from PIL import Image

from everytoken.errors import EverytokenError
from everytoken_lab.robust.corruptions import CORRUPTIONS
from everytoken_lab.robust.suites import Suite, corruption_names, parse_suites
from everytoken_lab.robust.tables import ALEXNET, Result, Table, make_table, mce_weights

PUBLISHED_MEANS = {  # AlexNet's error of each corruption, percent, as papers on ImageNet-C list it
    "gaussian_noise": 88.6, "shot_noise": 89.4, "impulse_noise": 92.3, "defocus_blur": 82.0, "glass_blur": 82.6,
    "motion_blur": 78.6, "zoom_blur": 79.8, "snow": 86.7, "frost": 82.7, "fog": 81.9, "brightness": 56.5,
    "contrast": 85.3, "elastic_transform": 64.6, "pixelate": 71.8, "jpeg_compression": 60.7,
}  # fmt: skip


@pytest.fixture
def images(tmp_path):
    def make(*folders):
        for folder in folders:
            place = tmp_path / folder
            place.mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(place / "x.png")
        return tmp_path

    return make


def test_suites_are_found_by_name(images):
    root = images(
        "val/a", "imagenetv2/imagenetv2-top-images-format-val/0", "imagenetv2/imagenetv2-threshold0.7-format-val/0",
        "imagenet-a/n01498041", "imagenet-c/noise/shot_noise/2/a", "imagenet-c/fog/2/a", "mine/x",
    )  # fmt: skip
    found = parse_suites(
        [f"val={root}/val", f"v2={root}/imagenetv2", f"a={root}/imagenet-a", f"c={root}/imagenet-c", "corrupt",
         f"mine={root}/mine", "attack"],
        ("shot_noise", "fog"), (2,), (2 / 255, 1 / 255),
    )  # fmt: skip
    names = [(s.kind, s.name) for s in found]
    assert names == [
        ("val", "val"), ("v2", "v2 threshold0.7"), ("v2", "v2 top-images"), ("a", "a"), ("c", "shot_noise 2"),
        ("c", "fog 2"), ("corrupt", "shot_noise 2"), ("corrupt", "fog 2"), ("own", "mine"),
        ("attack", "attack 1/255"), ("attack", "attack 2/255"),
    ]  # fmt: skip
    assert found[6].path == str(root / "val")


def test_bad_suites_are_refused_with_a_way_out(images):
    root = images("val/a", "c/fog/1/a")
    for words, text in (
        ([], "test on"),
        (["corrupt"], "val=FOLDER"),
        (["vall"], "NAME=FOLDER"),
        ([f"a={root}/none"], "no such folder"),
        ([f"c={root}/c"], "missing"),
        ([f"val={root}/val"] * 2, "twice"),
    ):
        with pytest.raises(EverytokenError, match=text):
            parse_suites(words)


def test_groups_of_corruptions_have_names():
    assert corruption_names(["standard"]) == tuple(CORRUPTIONS) == tuple(ALEXNET)
    assert corruption_names(["fog", "noise"]) == ("gaussian_noise", "shot_noise", "impulse_noise", "fog")
    with pytest.raises(EverytokenError, match="no corruption"):
        corruption_names(["fogg"])


def test_alexnets_errors_are_the_published_ones_and_give_alexnet_an_mce_of_100():
    for name, wanted in PUBLISHED_MEANS.items():
        assert 100 * np.mean(ALEXNET[name]) == pytest.approx(wanted, abs=0.06)
    places = [(c, s) for c in ALEXNET for s in range(1, 6)]
    errors = np.array([ALEXNET[c][s - 1] for c, s in places])
    assert errors @ mce_weights(places) == pytest.approx(100)
    part = [i for i, place in enumerate(places) if place[1] in (1, 3)]
    assert errors[part] / 2 @ mce_weights([places[i] for i in part]) == pytest.approx(50)


def test_rows_of_two_models_are_means_over_images_and_their_differences():
    def results(seed):
        rng, keys = np.random.default_rng(seed), [f"{i}.png" for i in range(40)]
        suites = [Suite("val", "val", ""), *(Suite(f"fog {s}", "corrupt", "", "fog", s) for s in (1, 5))]
        chances = [0.8 - lost * seed for lost in (0.3, 0.5, 0.6)]
        return [Result(s, rng.random(40) < p, keys, 90.0, 5.0) for s, p in zip(suites, chances, strict=True)]

    models = [results(0), results(1)]
    rows = {row[0]: row[1:] for row in make_table(["first", "second"], models).rows}
    for _, a, b, difference, low, high, *_ in rows.values():
        assert difference == pytest.approx(b - a)
        assert abs(difference) > 1
        assert low < difference < high
    _, *errors = [1 - result.correct.mean() for result in models[1]]
    assert rows["corrupt mean"][2] == pytest.approx(100 - 100 * np.mean(errors))
    assert rows["corrupt mCE"][2] == pytest.approx(100 * sum(errors) / (0.67474 + 0.945))


def test_a_table_is_text_and_json(tmp_path):
    table = Table("A title", ["set", "images", "top-1"], [["a|b", 1200, 71.256], ["<c>", 3, None]], ["a note"])
    table.write(tmp_path)
    assert all(part in (tmp_path / "table.txt").read_text() for part in ("1,200", "71.26", "a note"))
    rows = [{"set": "a|b", "images": 1200, "top-1": 71.256}, {"set": "<c>", "images": 3, "top-1": None}]
    assert json.loads((tmp_path / "table.json").read_text())["rows"] == rows

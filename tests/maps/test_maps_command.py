"""`everytoken maps ...` through its real entry point."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta
from everytoken.maps.format import list_shards
from everytoken.maps.released import released_path
from everytoken_lab.cli import main
from tests.maps import fill_store as filling


@pytest.fixture
def data(tmp_path):
    """Twelve photos of two classes, their store, one photo that could not be read."""
    keys = [f"{name}/{i}.x.jpg" for name in ("cat", "dog") for i in range(6)]
    rng = np.random.default_rng(0)
    for key in keys:
        (tmp_path / "photos" / key).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8)).save(tmp_path / "photos" / key)
    meta = StoreMeta((7, 7), 2, ["cat", "dog"], annotator={"name": "test", "settings": {"size": 224}})
    with MapWriter(tmp_path / "maps", keys, meta) as writer:
        for position, key in enumerate(writer.shard_keys(0)):
            if key == "dog/5.x.jpg":
                writer.skip(position, "truncated")
                continue
            classes = np.broadcast_to([0, 1], (1, 7, 7, 2))
            if key.startswith("dog") and not key.startswith("dog/0"):
                classes = classes[..., ::-1]
            scores = np.broadcast_to([5.0, 1.0], classes.shape)
            writer.put([position], scores, classes, [(60, 40)], [(0, 0, 1, 1)])
        writer.finalize()
    return tmp_path


def run(*words: object) -> int:
    return main(["maps", *map(str, words)])


def test_info_tells_settings_counts_and_agreement(data, capsys):
    assert run("info", data / "maps", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["maps"] == 11
    assert facts["skipped images"] == {"dog/5.x.jpg": "truncated"}
    assert facts["annotator"] == {"name": "test", "settings": {"size": 224}}
    assert facts["map's class = folder's"] == "90.9%"
    assert run("info", data / "maps") == 0
    table = capsys.readouterr().out
    assert "annotator.settings.size" in table
    assert "224" in table
    assert "skipped dog/5.x.jpg: truncated" in table


def test_sheet_finds_the_images_of_a_divided_folder_and_tells_what_it_does_not_find(data, capsys):
    words = ("sheet", data / "maps", "--out", data / "sheet.png", "--images")
    assert run(*words, data / "photos") == 0
    plain = (data / "sheet.png").read_bytes()
    (data / "divided/val/cat").mkdir(parents=True)
    (data / "photos").rename(data / "divided/train")
    capsys.readouterr()
    assert run(*words, data / "divided") == 0
    assert (data / "sheet.png").read_bytes() == plain
    assert "not found" not in capsys.readouterr().out
    (data / "divided/train/cat/2.x.jpg").unlink()
    assert run(*words, data / "divided") == 0
    assert f"1 of 11 images were not found under {data / 'divided/train'}" in capsys.readouterr().out
    assert run(*words, data / "maps") == 2
    assert "no image was found under" in capsys.readouterr().err


def test_info_works_on_a_store_that_is_not_finished(data, capsys):
    with MapWriter(data / "begun", filling.keys(5), filling.META, 3) as writer:
        writer.write({key: filling.make_map(key) for key in writer.shard_keys(0)})
        assert run("info", data / "begun") == 0
    assert "not finished" in capsys.readouterr().out


def test_a_sheet_shows_what_is_worth_looking_at_or_what_is_named(data, capsys):
    assert run("sheet", data / "maps", "--images", data / "photos", "--out", data / "a/sheet.png", "--count", 4) == 0
    with Image.open(data / "a/sheet.png") as picture:
        assert picture.width > 1500
    assert run("sheet", data / "maps", "dog/0.x.jpg", "cat/1.x.jpg", "--out", data / "two.jpg") == 0
    assert "two.jpg" in capsys.readouterr().out


def test_mistakes_are_explained_without_a_traceback(data, capsys):
    for words, expected in (
        (["sheet", data / "maps", "dog/0.jpg"], "has no map of 'dog/0.jpg'"),
        (["sheet", data / "maps", "dog/5.x.jpg"], "skipped (truncated)"),
        (["sheet", data / "maps", "--images", data / "nowhere"], "no image folder"),
        (["sheet", data / "maps", "--out", data / "x.nonsense"], "cannot write"),
        (["info", data / "photos"], "not a store"),
        (["verfy", data / "maps"], "Did you mean 'verify'"),
    ):
        assert run(*words) == 2
        assert expected in capsys.readouterr().err


def test_verify_names_the_damaged_image_and_exits_with_1(data, capsys):
    assert run("verify", data / "maps") == 0
    assert "intact (11 maps, 1 skipped images" in capsys.readouterr().out
    path = list_shards(data / "maps")[0]
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 128
    path.write_bytes(raw)
    assert run("verify", data / "maps") == 1
    printed = capsys.readouterr().out
    assert "damaged maps" in printed
    assert "delete the damaged shards" in printed


def test_released_maps_are_imported_and_what_has_no_map_is_named(data, capsys):
    for key, one in Maps(data / "maps").items():
        file = data / "pt" / released_path(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.from_numpy(np.stack([one.scores, one.classes.astype(np.float16)])).permute(0, 3, 1, 2), file)
    (data / "pt/cat/bad.pt").write_bytes(b"hello")
    words = ["import", data / "pt", "--out", data / "back", "--images", data / "photos", "--num-classes", 2]
    assert run(*words, "--resize-mode", "squash") == 0
    printed = capsys.readouterr().out
    assert "dog/5.x.jpg: there is no label file dog/5" in printed
    assert "1 label files have no image (for example cat/bad.pt)" in printed
    before, after = Maps(data / "maps"), Maps(data / "back")
    assert dict(before) == dict(after)
    assert after.class_names == ["cat", "dog"]
    assert run("import", data / "pt", "--out", data / "bare", "--num-classes", 2, "--resize-mode", "squash") == 0
    printed = capsys.readouterr().out
    assert "cat/bad: cat/bad.pt cannot be loaded" in printed


def test_maps_of_any_class_count_can_be_shown(tmp_path, capsys):
    meta = StoreMeta((1, 2), 1, num_classes=70000)
    one = ScoreMap(np.zeros((1, 2, 1), np.float16), np.full((1, 2, 1), 69999), (0, 0))
    with MapWriter(tmp_path / "s", ["a"], meta) as writer:
        writer.write({"a": one})
        writer.finalize()
    assert run("sheet", tmp_path / "s", "a", "--out", tmp_path / "o.png") == 0

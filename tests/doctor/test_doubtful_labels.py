"""Labels that were exchanged on purpose are found, shown, and corrected in training."""

import csv
import json
import shutil

import numpy as np
import pytest
from PIL import Image

import everytoken_lab as lab
from everytoken.errors import EverytokenError
from everytoken_lab.cli import main
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.doctor import labels as doubtful
from everytoken_lab.training.build import corrected


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def wrong(photos, tmp_path_factory):
    """The photos, three of which are in a folder where they do not belong."""
    tree = shutil.copytree(photos, tmp_path_factory.mktemp("wrong") / "tree")
    for old, new in (("0/photo.1", "1/x.1"), ("1/photo.2", "2/x.2"), ("2/photo.3", "0/x.3")):
        (tree / f"train/class-{old}.png").rename(tree / f"train/class-{new}.png")
    return tree


@pytest.fixture(scope="module")
def examined(wrong):
    """What the doctor says about them, and what it writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doubtful, "FEWEST", 40)
        patch.chdir(wrong.parent)
        findings = {f.code: f for f in et_doctor(wrong)}
    return findings["doubtful-labels"], wrong.parent / "doctor" / "tree"


def et_doctor(path, **options):
    from everytoken_lab.doctor import diagnose
    from everytoken_lab.terminal import Progress

    return diagnose([str(path)], Progress, workers=0, labels=True, **options)


def test_exchanged_labels_are_the_most_doubtful_ones(examined):
    finding, folder = examined
    rows = rows_of(folder / "doubtful.csv")
    assert finding.level == "note"
    assert {row["path"] for row in rows[:3]} == {"class-1/x.1.png", "class-2/x.2.png", "class-0/x.3.png"}
    assert {(row["label"], row["suggestion"]) for row in rows[:3]} == {
        ("class-1", "class-0"), ("class-2", "class-1"), ("class-0", "class-2")}  # fmt: skip
    assert len(rows) <= doubtful.LEAST
    page = (folder / "doubtful.html").read_text()
    facts = json.loads(page.split('id="facts">')[1].split("</script>")[0])
    shown = [
        (facts["labelling"]["names"][photo["label"][0]], photo["key"], photo["split"]) for photo in facts["photos"]
    ]
    assert shown == [(row["label"], row["path"], row["split"]) for row in rows]
    assert all(photo["picture"].startswith("data:image/") for photo in facts["photos"])
    assert str(len(rows)) in finding.what
    assert "--corrections" in finding.todo


def test_the_table_corrects_labels_and_leaves_images_out(wrong, tmp_path):
    train, val = open_dataset(wrong, "train"), open_dataset(wrong, "val")
    table = tmp_path / "doubtful.csv"
    table.write_text(
        "path,label,suggestion,split\nclass-1/x.1.png,class-0,,train\nclass-2/x.2.png,,,train\n"
        "class-0/photo.0.png,class-0,,val\ngone.png,class-0,,val\n"
    )
    (new, same), notes = corrected(train, val, table)
    assert len(new) == len(train) - 1
    labels = dict(zip(new.keys(), new.labels.tolist(), strict=True))
    assert labels["class-1/x.1.png"] == 0
    assert "class-2/x.2.png" not in labels
    assert same.labels.tolist() == val.labels.tolist()
    assert "1 labels corrected, 1 images left out" in notes[0]
    assert "1 images that are not there" in notes[1]
    assert dict(zip(train.keys(), train.labels.tolist(), strict=True))["class-1/x.1.png"] == 1  # as it was
    run = lab.train(wrong, corrections=str(table), model="test_vit", img_size=32, epochs=1, workers=0, device="cpu",
                   batch_size=16, out=str(tmp_path / "run"))  # fmt: skip
    assert "35 training and 12 validation images" in (run.path / "log.txt").read_text()
    table.write_text("path,label\nclass-1/x.1.png,class-7\n")
    with pytest.raises(EverytokenError, match=r"doubtful.csv, line 2: no class is 'class-7'.*Did you mean 'class-"):
        corrected(train, val, table)
    with pytest.raises(EverytokenError, match="there is no file"):
        corrected(train, val, tmp_path / "none.csv")


def test_of_several_labels_a_missing_and_a_wrong_one_are_found(tmp_path):
    tmp_path = tmp_path / "photos"
    tmp_path.mkdir()
    for i in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{i}.png")
    (tmp_path / "labels.csv").write_text("path,label\n0.png,cat;dog\n1.png,cat\n2.png,;\n3.png,dog\n")
    data = open_dataset(tmp_path)
    logits = np.where(data.labels, 4.0, -4.0).astype(np.float32)
    logits[1, 1], logits[3, 1] = 6.0, -5.0
    found = doubtful._listed(logits, data.labels, {"train": data}, [("train", i) for i in range(4)])
    assert [(d.path, d.label, d.suggestion) for d in found] == [("1.png", "cat", "cat;dog"), ("3.png", "dog", "")]


def test_few_images_and_a_sample_are_not_judged_and_without_weights_a_note_says_so(
    photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", str(photos), "--json"]) == 0
    (note,) = [f for f in json.loads(capsys.readouterr().out)["findings"] if "label" in f["code"]]
    assert note["what"] == "labels were not checked: fewer than 100 images"
    monkeypatch.setattr(doubtful, "FEWEST", 10)
    monkeypatch.setattr("everytoken_lab.annotators.features.available_weights", list)
    codes = {f.code: f for f in et_doctor(photos)}
    assert ".[registry]" in codes["labels-not-checked"].what
    assert not (tmp_path / "doctor").exists()
    assert "labels-not-checked" not in {f.code for f in et_doctor(photos, sample=5)}

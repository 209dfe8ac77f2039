"""The doctor finds planted trouble, says what to do, and finds nothing in healthy data."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from everytoken_lab import doctor
from everytoken_lab.cli import main
from everytoken_lab.data.duplicates import ImageFacts, fingerprint, near_pairs


def ask(capsys, *words: str) -> tuple[int, dict[str, dict]]:
    """(exit code, findings by code)."""
    code = main(["doctor", *map(str, words), "--json"])
    return code, {f["code"]: f for f in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture
def tree(photos, tmp_path) -> Path:
    """A copy of the photos to do harm to."""
    return Path(shutil.copytree(photos, tmp_path / "tree"))


def test_healthy_images_have_no_errors_and_exit_code_0(capsys, photos):
    code, found = ask(capsys, photos)
    assert code == 0
    assert not [f for f in found.values() if f["level"] == "error"], found
    assert "36 train, 12 val images of 3 classes" in found["images"]["what"]
    assert "12 (median)" in found["few-images"]["what"]


def test_unreadable_images_are_named_and_the_exit_code_is_1(capsys, tree):
    whole = (tree / "train/class-0/photo.0.png").read_bytes()
    (tree / "train/class-0/photo.0.png").write_bytes(whole[: len(whole) // 2])
    (tree / "val/class-1/words.jpg").write_text("not an image")
    (tree / "train/class-1/gone.png").symlink_to(tree / "nowhere.png")
    code, found = ask(capsys, tree)
    assert code == 1
    assert found["unreadable"]["level"] == "error"
    assert "--on-bad-image skip" in found["unreadable"]["todo"]
    main(["doctor", str(tree)])
    text = capsys.readouterr().out.replace("\n", "")
    for name in ("photo.0.png", "words.jpg", "gone.png"):
        assert name in text


def test_doubles_are_told_apart_inside_a_class_between_classes_and_across_parts(capsys, tree):
    shutil.copy(tree / "train/class-0/photo.1.png", tree / "train/class-0/again.png")
    shutil.copy(tree / "train/class-0/photo.2.png", tree / "train/class-1/wrong.png")
    shutil.copy(tree / "train/class-0/photo.3.png", tree / "val/class-0/leak.png")
    code, found = ask(capsys, tree)
    assert code == 1
    assert (found["duplicate"]["level"], found["duplicate"]["count"]) == ("note", 1)
    assert (found["duplicate-classes"]["level"], found["duplicate-classes"]["count"]) == ("warning", 1)
    assert (found["duplicate-across"]["level"], found["duplicate-across"]["count"]) == ("error", 1)
    assert "photo.3.png" in found["duplicate-across"]["examples"][0]
    assert "near-duplicate" not in found


def test_a_photo_saved_again_is_a_near_duplicate_and_others_are_not(capsys, tmp_path):
    rng = np.random.default_rng(3)
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(12):
                small = Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8))
                small.resize((80, 60), Image.Resampling.BICUBIC).save(tmp_path / part / name / f"{i}.png")
    _, found = ask(capsys, tmp_path)
    assert not [code for code in found if "duplicate" in code]
    with Image.open(tmp_path / "train/a/3.png") as image:
        image.resize((70, 52)).save(tmp_path / "val/a/again.jpg", quality=80)
    code, found = ask(capsys, tmp_path)
    assert code == 0
    assert (found["near-duplicate-across"]["level"], found["near-duplicate-across"]["count"]) == ("warning", 1)


def test_near_pairs_are_those_of_a_slow_comparison_of_all_pairs():
    rng = np.random.default_rng(0)
    looks, images = [], []
    for i in range(60):
        base = images[i // 2] if i % 3 == 0 and i else rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        images.append(base)
        noisy = np.clip(base.astype(int) + rng.integers(-2, 3, base.shape), 0, 255).astype(np.uint8)
        code, thumb = fingerprint(Image.fromarray(noisy).resize((64, 64), Image.Resampling.BILINEAR))
        looks.append(ImageFacts(digest=bytes([i]) * 16, size=(64, 64), code=code, thumb=thumb))
    slow = []
    for a in range(60):
        for b in range(a + 1, 60):
            x, y = (np.frombuffer(looks[i].thumb, np.uint8).astype(float) for i in (a, b))
            if bin(looks[a].code ^ looks[b].code).count("1") <= 3 and np.abs(x - y).mean() <= 0.03 * 255:
                slow.append((a, b))
    assert near_pairs(looks) == slow
    assert len(slow) > 10


def test_flat_images_are_not_near_duplicates_of_each_other(capsys, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(10):
            Image.new("RGB", (32, 32), (100 + i, 100, 100)).save(tmp_path / name / f"{name}{i}.png")
    _, found = ask(capsys, tmp_path)
    assert not [code for code in found if code.startswith("near-duplicate")]


def test_classes_out_of_balance_tiny_or_only_in_val_are_found(capsys, tree):
    shutil.copytree(tree / "val/class-0", tree / "val/zebra")
    for i in range(1, 12):
        (tree / f"train/class-2/photo.{i}.png").unlink()
    code, found = ask(capsys, tree)
    assert code == 1
    assert found["class-only-in-val"]["examples"] == ["zebra"]
    assert found["tiny-class"]["examples"] == ["class-2: 1"]
    assert "12 times" in found["imbalance"]["what"]


def test_a_missing_folder_is_an_error_and_not_a_traceback(capsys, tmp_path):
    code, found = ask(capsys, tmp_path / "nowhere")
    assert code == 1
    assert "nowhere" in found["data-unusable"]["what"]


def test_the_machine_is_examined_with_no_paths_and_a_full_disk_is_an_error(capsys, monkeypatch):
    code, found = ask(capsys)
    assert {"versions", "disk"} <= set(found)
    assert code == 0 or found["disk"]["level"] == "error"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda place: SimpleNamespace(free=1_000_000))
    code, found = ask(capsys)
    assert code == 1
    assert found["disk"]["level"] == "error"

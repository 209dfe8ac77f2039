"""The doctor finds planted trouble, says what to do, and finds nothing in healthy data."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from everytoken.maps import MapWriter, ScoreMap, StoreMeta
from everytoken_lab.cli import main
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.data.duplicates import ImageFacts, fingerprint, near_pairs
from everytoken_lab.doctor import machine


def ask(capsys, *words: str) -> tuple[int, dict[str, dict]]:
    """(exit code, findings by code)."""
    code = main(["doctor", *map(str, words), "--json"])
    return code, {f["code"]: f for f in json.loads(capsys.readouterr().out)["findings"]}


@pytest.fixture
def tree(photos, tmp_path) -> Path:
    """A copy of the photos to do harm to."""
    return Path(shutil.copytree(photos, tmp_path / "tree"))


def make_store(path: Path, tree: Path, names=("class-0", "class-1", "class-2"), leave_out: int = 0) -> Path:
    keys = sorted(p.relative_to(tree / "train").as_posix() for p in (tree / "train").rglob("*.png"))[leave_out:]
    meta = StoreMeta(grid=(2, 2), top_k=2, class_names=list(names))
    one = ScoreMap(np.ones((2, 2, 2), np.float16), np.tile(np.array([0, 1], np.uint8), (2, 2, 1)), (40, 36))
    with MapWriter(path, keys, meta) as writer:
        writer.write(dict.fromkeys(keys, one))
        writer.finalize()
    return path


def test_healthy_images_and_maps_have_no_errors_and_exit_code_0(capsys, photos, tmp_path):
    code, found = ask(capsys, photos, make_store(tmp_path / "maps", photos))
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


def test_maps_in_another_order_of_classes_are_an_error(capsys, tree, tmp_path):
    code, found = ask(capsys, tree, make_store(tmp_path / "maps", tree, ("class-1", "class-0", "class-2")))
    assert code == 1
    assert found["class-order"]["count"] == 2
    _, found = ask(capsys, tree, make_store(tmp_path / "others", tree, ("fish", "bird", "tree")))
    assert found["classes-foreign"]["level"] == "note"


def test_missing_and_stale_maps_are_found(capsys, tree, tmp_path):
    maps = make_store(tmp_path / "maps", tree, leave_out=2)
    with Image.open(tree / "train/class-1/photo.4.png") as image:
        image.resize((20, 18)).save(tree / "train/class-1/photo.4.png")
    code, found = ask(capsys, tree, maps)
    assert code == 1
    assert found["maps-missing"]["count"] == 2
    assert found["maps-stale"]["examples"] == ["class-1/photo.4.png: 40x36 when annotated, 20x18 now"]


def test_images_that_a_split_holds_out_need_no_map(capsys, tree, tmp_path):
    shutil.rmtree(tree / "val")
    data = open_dataset(tree / "train", val_split=0.2)
    meta = StoreMeta(grid=(2, 2), top_k=2, class_names=list(data.class_names))
    one = ScoreMap(np.ones((2, 2, 2), np.float16), np.tile(np.array([0, 1], np.uint8), (2, 2, 1)), (40, 36))
    with MapWriter(tmp_path / "maps", list(data.keys()), meta) as writer:
        writer.write(dict.fromkeys(data.keys(), one))
        writer.finalize()
    code, found = ask(capsys, tree / "train", tmp_path / "maps")
    assert code == 0
    assert "--val-split 0.2 holds out" in found["maps-held-out"]["what"]


def test_damaged_maps_are_found(capsys, tree, tmp_path):
    maps = make_store(tmp_path / "maps", tree)
    shard = sorted(maps.glob("shard-*"))[0]
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    code, found = ask(capsys, maps)
    assert code == 1
    assert found["maps-damaged"]["level"] == "error"
    shard.write_text("{ torn")
    code, found = ask(capsys, maps)
    assert (code, set(found) & {"maps-unusable", "maps-damaged"} != set()) == (1, True)


def test_a_missing_folder_is_an_error_and_not_a_traceback(capsys, tmp_path):
    code, found = ask(capsys, tmp_path / "nowhere")
    assert code == 1
    assert "nowhere" in found["data-unusable"]["what"]


def test_rotten_checkpoints_and_weights_of_a_run_are_found(capsys, tmp_path):
    import torch
    from safetensors.torch import save_file

    from everytoken_lab.engine.checkpoint import save_checkpoint
    from everytoken_lab.engine.run_folder import RunFolder

    folder = RunFolder(tmp_path / "run")
    folder.write_config({"epochs": 2, "seed": 1, "data": str(tmp_path / "gone"), "maps": ""})
    folder.record({"kind": "epoch", "epoch": 1, "step": 10, "score": 50.0})
    for step in (10, 20):
        save_checkpoint(folder.checkpoints, step, {"model": {"w": torch.ones(50)}}, {"step": step}, {})
    save_file({"w": torch.ones(3)}, folder.path / "best.safetensors")
    code, found = ask(capsys, folder.path)
    assert code == 0
    assert found["run-unfinished"]["level"] == "note"
    assert found["run-data-gone"]["level"] == "warning"
    file = folder.path / "checkpoints/step-00000020/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)
    code, found = ask(capsys, folder.path)
    assert code == 1
    assert "step-00000010" in found["checkpoint-damaged"]["todo"]
    save_file({"w": torch.tensor([1.0, float("nan")])}, folder.path / "best.safetensors")
    assert "weights-not-finite" in ask(capsys, folder.path)[1]
    (folder.path / "best.safetensors").write_bytes(b"short")
    assert "weights-damaged" in ask(capsys, folder.path)[1]


def test_the_machine_is_examined_with_no_paths_and_a_full_disk_is_an_error(capsys, monkeypatch):
    code, found = ask(capsys)
    assert {"versions", "disk"} <= set(found)
    assert code == 0 or found["disk"]["level"] == "error"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda place: Disk())
    code, found = ask(capsys)
    assert code == 1
    assert found["disk"]["level"] == "error"


class Disk:
    """A full disk with a large /dev/shm."""

    free, total = 1_000_000, 10**10

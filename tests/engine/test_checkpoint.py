"""Checkpoints: whole or not at all, torn ones passed over."""

import os
import random
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file

from everytoken.errors import EverytokenError
from everytoken_lab.engine import checkpoint as ck
from everytoken_lab.engine.run_folder import RunFolder


def save(root, step, **kwargs):
    weights = {"model": {"w": torch.full((4, 3), float(step))}}
    return ck.save_checkpoint(
        root, step, weights, {"step": step, "x": torch.arange(5)}, {"architecture": "m"}, **kwargs
    )


def test_a_checkpoint_comes_back_and_old_ones_go(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    newest = ck.newest_good(tmp_path)
    assert ck.step_of(newest) == 3
    assert torch.equal(ck.load_state(newest)["x"], torch.arange(5))
    assert float(load_file(newest / "model.safetensors")["w"][0, 0]) == 3


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, name, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / name
    data = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        data[random.Random(name).randrange(len(data) - 1)] ^= 4
        path.write_bytes(data[:-1] if damage == "cut" else data)
    told = []
    assert ck.step_of(ck.newest_good(tmp_path, told.append)) == 1
    assert "step-00000002" in told[0]


@contextmanager
def full_disk(size):
    """No file may grow beyond some bytes: to the program, a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [50, 500, 3000])  # fails in the weights, in the state, at the end of the state
def test_a_full_disk_keeps_the_last_good_one(tmp_path, size):
    save(tmp_path, 1)
    weights, state = {"model": {"w": torch.ones(20)}}, {"x": torch.arange(400)}
    with (
        pytest.raises(EverytokenError, match=r"no space left(.|\n)*last good checkpoint is kept"),
        full_disk(size),
    ):
        ck.save_checkpoint(tmp_path, 2, weights, state, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_best_weights_on_a_full_disk_leave_the_older_ones(tmp_path):
    path = tmp_path / "best.safetensors"
    ck.write_weights(path, {"w": torch.ones(2)}, {})
    with pytest.raises(EverytokenError, match="no space left"), full_disk(100):
        ck.write_weights(path, {"w": torch.ones(2000)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["best.safetensors"]
    assert load_file(path)["w"].shape == (2,)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EverytokenError, match="file"):
        save(tmp_path / "file" / "checkpoints", 1)
    with pytest.raises(EverytokenError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").open()


def test_a_killed_writer_of_best_weights_leaves_nothing_for_ever(tmp_path):
    code = (
        "import os, pathlib, torch; from everytoken_lab.engine import checkpoint as ck\n"
        "os.replace = lambda *_: os._exit(9)\n"
        f"ck.write_weights(pathlib.Path({str(tmp_path)!r}) / 'best.safetensors', {{'w': torch.ones(3)}}, {{}})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    ck.write_weights(tmp_path / "best.safetensors", {"w": torch.ones(3)}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["best.safetensors"]


def test_folders_with_other_names_are_left_alone(tmp_path):
    (save(tmp_path, 9)).rename(tmp_path / "step-00000009-old")
    (tmp_path / "step-notes.txt").write_text("mine")
    for step in (1, 2, 3):
        save(tmp_path, step, keep=1)
    assert ck.step_of(ck.newest_good(tmp_path)) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000009-old", "step-notes.txt"]


def test_weights_replace_older_ones_whole_and_nothing_else_stays(tmp_path):
    path = tmp_path / "best.safetensors"
    for value in (1.0, 2.0):
        ck.write_weights(path, {"w": torch.full((2, 2), value)}, {"architecture": "m"})
    assert float(load_file(path)["w"][0, 0]) == 2
    written = path.stat().st_mtime_ns
    ck.write_weights(path, {"w": torch.full((2, 2), 2.0)}, {"architecture": "m"})
    assert path.stat().st_mtime_ns == written
    assert [p.name for p in tmp_path.iterdir()] == ["best.safetensors"]


def test_files_are_on_the_disk_before_they_take_their_names(tmp_path, monkeypatch):
    folder, calls = RunFolder(tmp_path), []
    sync, move = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("sync"), sync(handle)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append("move"), move(old, new)))
    folder.write("summary.json", "{}")
    ck.write_weights(tmp_path / "best.safetensors", {"w": torch.ones(1)}, {})
    assert calls == ["sync", "move", "sync"] * 2  # the file, its name, the folder


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    (tmp_path / ".writing-00000009-1").mkdir(parents=True)
    save(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_metrics_are_json_that_every_program_reads(tmp_path):
    folder = RunFolder(tmp_path)
    folder.record({"kind": "epoch", "step": 1, "epoch": 1, "loss": float("nan"), "val_top1": 50.0})
    folder.record({"kind": "epoch", "step": 2, "epoch": 2, "loss": float("inf"), "val_top1": 51.0})
    folder.forget_after(1)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert list(folder.read().epochs) == [{"kind": "epoch", "step": 1, "epoch": 1, "loss": None, "val_top1": 50.0}]


@pytest.mark.parametrize(
    "content", ["[]", '{"files": {"state.pt": {}}}', '{"files": {}}', '{"files": {"state.pt": {"bytes": "1"}}}']
)
def test_a_manifest_of_another_form_is_damage_and_no_traceback(tmp_path, content):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "manifest.json").write_text(content)
    told = []
    assert ck.step_of(ck.newest_good(tmp_path, told.append)) == 1
    assert "step-00000002" in told[0]


def test_a_state_that_holds_more_than_tensors_is_refused_in_words(tmp_path):
    folder = save(tmp_path, 1)
    torch.save({"x": random.Random}, folder / "state.pt")
    with pytest.raises(EverytokenError, match=r"state\.pt"):
        ck.load_state(folder)

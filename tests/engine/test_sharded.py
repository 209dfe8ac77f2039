"""Sharded runs (FSDP2): averaged weights, checkpoints, and how they resume."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from everytoken.errors import EverytokenError
from everytoken_lab.engine import checkpoint as ck
from everytoken_lab.engine.distributed import World
from tests.engine.test_many_processes import TINY as ONE_EPOCH
from tests.engine.test_many_processes import finish

pytestmark = pytest.mark.timeout(900)
TINY = [
    *(*ONE_EPOCH, "--epochs", "2", "--model-ema", "--model-ema-decay", "0.5", "--val-batch-size", "5"),
    *("--set", "objectives.drloc={weight: 0}"),  # its heads are sharded, but what it draws does not matter
]
ALONE = World(0, 1, torch.device("cpu"))


def close(one, two, atol=2e-5):
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.allclose(value, two[name], rtol=0, atol=atol), name


def test_sharded_and_averaged_weights_train_as_copied_ones_and_go_on_with_any_number_of_processes(
    photos, tmp_path, start_ranks
):
    def train(size, folder):
        words = ["train", photos, *TINY, "-b", 12 // size, "--out", tmp_path / folder]
        return finish(start_ranks(size, *words, *(["--fsdp"] if folder != "copied" else [])))

    train(2, "copied")
    train(2, "sharded")
    copied, sharded = (ck.checkpoints_in(tmp_path / name / "checkpoints")[-1] for name in ("copied", "sharded"))
    states = [ck.load_state(folder) for folder in (copied, sharded)]
    for part in ("module", "ema"):
        close(states[0][part], states[1][part])
    best = load_file(tmp_path / "sharded/best.safetensors")
    close(load_file(tmp_path / "copied/best.safetensors"), best)

    for size in (2, 4, 1):
        folder = tmp_path / f"with {size}"
        shutil.copytree(tmp_path / "sharded", folder)
        (folder / "best.safetensors").unlink()
        shutil.rmtree(folder / "checkpoints" / sharded.name)  # back to the end of the first epoch
        if size == 2:  # and once more to the end of the second, where rank 0 is killed
            words = ["train", photos, *TINY, "-b", 6, "--out", folder, "--fsdp"]
            first, second = start_ranks(2, *words, first=die_before_the_rename)
            assert first.wait() == -signal.SIGKILL
            assert second.wait() == 2
            assert "The last good checkpoint is kept" in " ".join(second.err.split())
            assert [path.name for path in ck.checkpoints_in(folder / "checkpoints")] == ["step-00000003"]
        assert "continuing from step-00000003" in train(size, folder.name)
        again = ck.load_state(folder / "checkpoints" / sharded.name)["ema"]
        close(states[1]["ema"], again, atol=0 if size == 2 else 2e-5)
        close(best, load_file(folder / "best.safetensors"))
    assert "nothing to do" in train(2, "with 4")  # what four wrote, two can read


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_rename():
    Path.rename = die


def test_machines_that_do_not_share_a_disk_are_told_so(photos, tmp_path, start_ranks):
    disks = [tmp_path / name for name in ("one", "two")]
    for disk in disks:
        disk.mkdir()
    words = ["train", photos, *TINY, "-b", "6", "--epochs", "1", "--out", "run", "--fsdp"]
    finish(start_ranks(2, *words, inside=disks))  # rank 0 alone writes
    for program in start_ranks(2, *words, "--epochs", "2", inside=disks):
        assert program.wait() == 2
        assert "does not see run/checkpoints/step-00000003" in program.err


def test_what_goes_wrong_in_one_process_is_raised_in_all(monkeypatch):
    monkeypatch.setattr(World, "gather", lambda self, value: [value, EverytokenError("the other disk is full")])
    with pytest.raises(EverytokenError, match="the other disk"), ALONE.agree():
        pass
    with pytest.raises(EverytokenError, match="mine"), ALONE.agree():
        raise EverytokenError("mine")

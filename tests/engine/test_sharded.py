"""Sharded runs (FSDP2): averaged weights, checkpoints of which every process writes its part, and how they resume."""

import os
import pickle
import random
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from everytoken.errors import EverytokenError
from everytoken_lab.engine import checkpoint as ck
from everytoken_lab.engine.distributed import World, join_world

pytestmark = pytest.mark.timeout(900)
TINY = [
    *("--model", "lvvit_t", "--img-size", "32", "--workers", "0", "--epochs", "2", "--warmup-epochs", "0"),
    *("--lr", "0.001", "--aa", "", "--reprob", "0", "--hflip", "0", "--log-interval", "1", "--threads", "1"),
    *("--device", "cpu", "--model-ema", "--model-ema-decay", "0.5", "--val-batch-size", "5"),
    *("--set", "objectives.drloc={weight: 0}", "--set"),  # its heads are sharded, but what it draws does not matter
    "model_kwargs={stem_kernels: [8], stem_strides: [8], embed_dim: 32, depth: 2, num_heads: 2}",
]
ALONE = World(0, 1, torch.device("cpu"))


def finish(programs):
    """Wait for all of them; what rank 0 printed."""
    for program in programs:
        assert program.wait() == 0, program.err[-2000:]
        assert "runs outside of" not in program.err  # drloc's MLP is sharded or wrapped with the model
    return programs[0].out


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
    state = ck.load_state(copied)
    for part in ("module", "ema"):
        close(state[part], ck.whole_tensors(sharded, f"{part}."))
    best = load_file(tmp_path / "sharded/best.safetensors")
    close(load_file(tmp_path / "copied/best.safetensors"), best)
    assert len(list((sharded / "shards").iterdir())) == 2
    assert not any(isinstance(value, torch.Tensor) for value in ck.load_state(sharded)["values"].values())

    averaged = ck.whole_tensors(sharded, "ema.")
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
            assert "The last good checkpoint is kept" in second.err
            assert [path.name for path in ck.checkpoints_in(folder / "checkpoints")] == ["step-00000003"]
        assert "continuing from step-00000003" in train(size, folder.name)
        last = folder / "checkpoints" / sharded.name
        again = ck.load_state(last)["ema"] if size == 1 else ck.whole_tensors(last, "ema.")
        close(averaged, again, atol=0 if size == 2 else 2e-5)
        close(best, load_file(folder / "best.safetensors"))
        assert size == 1 or len(list((last / "shards").iterdir())) == size
    shutil.rmtree(tmp_path / "with 4/checkpoints/step-00000003")
    assert "nothing to do" in train(2, "with 4")  # what four wrote, two can read


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_before_the_rename():
    Path.rename = die


def die_before_the_manifest():
    ck.write_atomically = die


def die_before_the_shards():
    ck.HuggingFaceStorageWriter.write_data = die


def die_after_the_shards():
    write_data = ck.HuggingFaceStorageWriter.write_data
    ck.HuggingFaceStorageWriter.write_data = lambda *given: die(write_data(*given).wait())


def save_twice(rank, port, root, prepare):
    """One of two processes, which saves after the updates 1 and 2; before the second, `prepare`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    with join_world("cpu") as world:
        mesh = init_device_mesh("cpu", (2,))
        for step in (1, 2):
            if step == 2 and prepare is not None:
                prepare()
            tensors = {"module.w": distribute_tensor(torch.full((40, 3), float(step)), mesh, [Shard(0)])}
            ck.save_sharded_checkpoint(root, step, tensors, {"step": step, "values": {}}, world)


@pytest.mark.parametrize(
    ("prepare", "dying"),
    [
        (die_before_the_shards, {0, 1}),
        (die_after_the_shards, {0}),
        (die_after_the_shards, {1}),
        (die_before_the_manifest, {0}),
        (die_before_the_rename, {0}),
    ],
)
def test_processes_that_are_killed_while_they_save_leave_the_last_checkpoint(tmp_path, forkserver, prepare, dying):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = [
        forkserver.Process(target=save_twice, args=(rank, port, tmp_path, prepare if rank in dying else None))
        for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for number, rank in enumerate(ranks):
        rank.join(60)
        assert rank.exitcode == (-signal.SIGKILL if number in dying else 1)  # the other one notices, and ends
    newest = ck.newest_good(tmp_path)
    assert ck.step_of(newest) == 1
    assert bool((ck.whole_tensors(newest, "module.")["w"] == 1).all())
    save(tmp_path, 2)  # what was left is removed, and the next one is written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_dry_run_of_sharded_weights_times_steps_in_which_they_are_sharded(photos, tmp_path, start_ranks):
    words = ["train", photos, *TINY, "-b", 6, "--out", tmp_path / "run", "--fsdp", "--dry-run"]
    programs = start_ranks(2, *words)
    text = finish(programs)
    found = re.search(r"([\d,]+) of\s+([\d,]+) in this one of 2 processes", text)
    held, parameters = (int(number.replace(",", "")) for number in found.groups())
    assert 0 < held < 0.7 * parameters
    assert "processes" not in programs[1].out  # rank 0 alone talks
    assert not (tmp_path / "run").exists()


def save(root, step, value=1.0):
    tensors = {"module.w": torch.full((40, 3), value), "optimizer.state.w.step": torch.tensor(float(step))}
    ck.save_sharded_checkpoint(root, step, tensors, {"step": step, "values": {}}, ALONE)
    return root / f"step-{step:08d}"


def test_a_sharded_checkpoint_comes_back_whole_or_in_place_and_nothing_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    folder = save(tmp_path, 7, 3.0)
    (folder / "shards/.metadata").write_bytes(pickle.dumps(Bomb()))  # the usual index of torch's checkpoints
    assert ck.newest_good(tmp_path) == folder
    target = {"module.w": torch.zeros(40, 3), "optimizer.state.w.step": torch.tensor(0.0)}
    ck.load_shards(folder, target)
    assert bool((target["module.w"] == 3).all())
    assert target["optimizer.state.w.step"] == 7
    assert ck.whole_tensors(folder, "module.").keys() == {"w"}
    with pytest.raises(RuntimeError, match=r"module\.other"):
        ck.load_shards(folder, {"module.other": torch.zeros(2)})
    with pytest.raises(RuntimeError, match="Size mismatch"):
        ck.load_shards(folder, {"module.w": torch.zeros(40, 4)})


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_shard_is_named_and_its_checkpoint_passed_over(tmp_path, damage):
    save(tmp_path, 1)
    path = next((save(tmp_path, 2) / "shards").iterdir())
    data = bytearray(path.read_bytes())
    data[random.Random(damage).randrange(len(data))] ^= 4
    path.unlink()
    if damage != "remove":
        path.write_bytes(data[:-1] if damage == "cut" else data)
    told = []
    assert ck.step_of(ck.newest_good(tmp_path, told.append)) == 1
    assert "step-00000002/shards/shard-00001" in told[0]


def test_a_disk_that_fills_up_while_shards_are_written_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    (tmp_path / ".writing-00000009-1").mkdir()  # of a writer that was killed

    def full(self, plan, planner):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ck.HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(ck.CheckpointError, match=r"no space left(.|\n)*last good checkpoint is kept"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_machines_that_do_not_share_a_disk_are_told_so(photos, tmp_path, start_ranks):
    disks = [tmp_path / name for name in ("one", "two")]
    for disk in disks:
        disk.mkdir()
    words = ["train", photos, *TINY, "-b", "6", "--epochs", "1", "--out", "run"]
    for program in start_ranks(2, *words, "--fsdp", inside=disks):
        assert program.wait() == 2
        assert "Give an output on a disk that all machines share" in program.err
    assert not list(tmp_path.glob("*/run/checkpoints/*"))
    shutil.rmtree(disks[0] / "run")
    finish(start_ranks(2, *words, inside=disks))  # copied weights are written by rank 0 alone
    for program in start_ranks(2, *words, "--epochs", "2", inside=disks):
        assert program.wait() == 2
        assert "does not see run/checkpoints/step-00000003" in program.err


def test_what_goes_wrong_in_one_process_is_raised_in_all(monkeypatch):
    monkeypatch.setattr(World, "gather", lambda self, value: [value, EverytokenError("the other disk is full")])
    with pytest.raises(EverytokenError, match="the other disk"), ALONE.agree():
        pass
    with pytest.raises(EverytokenError, match="mine"), ALONE.agree():
        raise EverytokenError("mine")

"""Two gloo processes on this machine: DDP equals one process, a lost rank ends the job clearly."""

import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from everytoken.files import Lock
from everytoken_lab.cli import main
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.run_folder import read_run
from tests.engine.test_loop import make

pytestmark = pytest.mark.timeout(900)  # every test starts the whole program several times
TINY = [
    *("--model", "lvvit_t", "--img-size", "32", "--workers", "0", "--epochs", "1", "--warmup-epochs", "0"),
    *("--lr", "0.001", "--aa", "", "--reprob", "0", "--hflip", "0", "--log-interval", "1", "--threads", "1"),
    *("--device", "cpu", "--set", "model_kwargs={stem_kernels: [8], stem_strides: [8], embed_dim: 32, depth: 2, "),
]
TINY[-1] += "num_heads: 2}"


def finish(programs):
    """Wait for all of them; what rank 0 printed."""
    for program in programs:
        assert program.wait() == 0, program.err[-2000:]
        assert "runs outside of" not in program.err  # drloc's MLP is sharded or wrapped with the model
    return programs[0].out


def weights(folder):
    return load_file(sorted((folder / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def test_two_processes_train_and_validate_as_one_with_the_same_global_batch(photos, tmp_path, start_ranks):
    assert main(["train", str(photos), *TINY, "--out", str(tmp_path / "one"), "--batch-size", "12"]) == 0
    finish(start_ranks(2, "train", photos, *TINY, "--out", tmp_path / "two", "--batch-size", "6"))
    first, second = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, value in first.items():
        assert torch.allclose(value, second[name], atol=1e-5), name
    runs = [read_run(tmp_path / name) for name in ("one", "two")]
    a, b = (run.epochs[0] for run in runs)
    assert a["score"] == b["score"]  # 12 validation images, exactly once each
    assert a["val_loss"] == pytest.approx(b["val_loss"], abs=1e-5)
    losses = [[row["loss"] for row in run.steps] for run in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_killed_rank_ends_the_job_with_a_clear_message_and_it_resumes_under_torchrun(photos, tmp_path, start_ranks):
    out = tmp_path / "r"
    words = ["train", str(photos), *TINY, "--batch-size", "6", "--checkpoint-steps", "2", "--out", str(out)]
    first, second = start_ranks(2, *words, "--epochs", "400")
    while not list(out.glob("checkpoints/step-*")):
        assert first.poll() is None
        time.sleep(0.05)
    second.kill()
    assert first.wait(120) == 2
    assert "rank 0 lost contact with another process of the job" in first.err
    assert "run the same again" in first.err
    assert "Traceback" not in first.err
    step = max(int(p.name[5:]) for p in out.glob("checkpoints/step-*"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "everytoken_lab"]
    words = [sys.executable, *launch, *words, "--epochs", str(step // 3 + 1)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "continuing from" in done.stdout


def test_a_folder_that_is_in_use_stops_every_process_alike(photos, tmp_path, start_ranks):
    with Lock(tmp_path, "run"):
        programs = start_ranks(2, "train", photos, *TINY, "--out", tmp_path, "--batch-size", "6")
        for program in programs:
            program.wait(120)
    assert all(f"another process is training in {tmp_path}" in program.err for program in programs)


def _validated(rank, folder, answers):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/join", rank=rank, world_size=2)
    loop = make(folder / str(rank), world=World(rank, 2, torch.device("cpu")))
    loop.task.module.net[1].running_mean.fill_(rank)  # as after batches of its own
    answers.put((rank, loop._validate(loop.task.module)["score"]))
    torch.distributed.destroy_process_group()


def test_all_processes_validate_with_the_batch_norm_statistics_that_the_checkpoint_has(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    ranks = [context.Process(target=_validated, args=(rank, tmp_path, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = dict(answers.get() for _ in ranks)
    for process in ranks:
        process.join()
    assert found[0] == found[1]
    alone = make(tmp_path / "alone")
    assert found[0] == pytest.approx(alone._validate(alone.task.module)["score"], abs=1e-6)
    alone.task.module.net[1].running_mean.fill_(1)
    assert abs(found[0] - alone._validate(alone.task.module)["score"]) > 0.01

"""Two gloo processes on this machine: DDP equals one process, FSDP equals DDP, a lost rank ends the job clearly."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from everytoken.files import Lock

pytestmark = pytest.mark.timeout(900)  # every test starts the whole program several times
TINY = [
    *("--model", "lvvit_t", "--img-size", "32", "--workers", "0", "--epochs", "1", "--warmup-epochs", "0"),
    *("--lr", "0.001", "--aa", "", "--reprob", "0", "--hflip", "0", "--log-interval", "1", "--threads", "1"),
    *("--device", "cpu", "--set", "model_kwargs={stem_kernels: [8], stem_strides: [8], embed_dim: 32, depth: 2, "),
]
TINY[-1] += "num_heads: 2}"


def command(photos, out, *words: str) -> list[str]:
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "everytoken",
    ]
    return [*launch, "train", str(photos), *TINY, "--output", str(out), *words]


def run(words) -> subprocess.CompletedProcess:
    return subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)


def weights(folder):
    return load_file(sorted((folder / "checkpoints").glob("step-*"))[-1] / "model.safetensors")


def epochs(folder):
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] == "epoch"]


def test_two_processes_train_and_validate_as_one_with_the_same_global_batch(photos, tmp_path):
    one = [sys.executable, "-m", "everytoken", "train", str(photos), *TINY, "--output", str(tmp_path / "one")]
    assert run([*one, "--batch-size", "12"]).returncode == 0
    done = run(command(photos, tmp_path / "two", "--batch-size", "6"))
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, value in first.items():
        assert torch.allclose(value, second[name], atol=1e-5), name
    a, b = epochs(tmp_path / "one")[0], epochs(tmp_path / "two")[0]
    assert a["score"] == b["score"]  # 12 validation images, exactly once each
    assert a["val_loss"] == pytest.approx(b["val_loss"], abs=1e-5)
    losses = [
        [json.loads(line)["loss"] for line in (f / "metrics.jsonl").read_text().splitlines() if '"step"' in line[:16]]
        for f in (tmp_path / "one", tmp_path / "two")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_sharded_weights_train_as_copied_ones_and_resume(photos, tmp_path):
    words = ("--batch-size", "6", "--epochs", "2", "--val-batch-size", "5", "--set", "objectives.drloc={}")
    done = run(command(photos, tmp_path / "ddp", *words))
    assert done.returncode == 0, done.stderr[-2000:]
    done = run(command(photos, tmp_path / "fsdp", *words, "--fsdp"))
    assert done.returncode == 0, done.stderr[-2000:]
    copied, sharded = weights(tmp_path / "ddp"), weights(tmp_path / "fsdp")
    for name, value in copied.items():
        assert torch.allclose(value, sharded[name], atol=2e-5), name
    shutil.rmtree(sorted((tmp_path / "fsdp/checkpoints").glob("step-*"))[-1])  # back to the end of the first epoch
    done = run(command(photos, tmp_path / "fsdp", *words, "--fsdp"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "continuing from" in done.stdout
    again = weights(tmp_path / "fsdp")
    assert all(torch.equal(value, again[name]) for name, value in sharded.items())


def start_two(photos, out, *words: str) -> list[subprocess.Popen]:
    """Two processes without torchrun, which would tell of a killed one in its own words, and stop the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    line = [sys.executable, "-m", "everytoken", "train", str(photos), *TINY, "--output", str(out), *words]
    return [
        subprocess.Popen(
            line, env={**common, "RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip


def test_a_killed_rank_ends_the_job_with_a_clear_message_and_it_resumes(photos, tmp_path):
    out, words = tmp_path / "r", ("--batch-size", "6", "--checkpoint-steps", "2")
    first, second = start_two(photos, out, *words, "--epochs", "400")
    try:
        while not list(out.glob("checkpoints/step-*")):
            assert first.poll() is None
            time.sleep(0.05)
        second.kill()
        _, told = first.communicate(timeout=120)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
    assert first.returncode == 2
    assert "rank 0 lost contact with another process of the job" in told
    assert "run the same again" in told
    assert "Traceback" not in told
    step = max(int(p.name[5:]) for p in out.glob("checkpoints/step-*"))
    done = run(command(photos, out, *words, "--epochs", str(step // 3 + 1)))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "continuing from" in done.stdout


def test_a_folder_that_is_in_use_stops_every_process_alike(photos, tmp_path):
    with Lock(tmp_path, "run"):
        done = [process.communicate(timeout=120)[1] for process in start_two(photos, tmp_path, "--batch-size", "6")]
    assert all(f"another process is training in {tmp_path}" in told for told in done), done

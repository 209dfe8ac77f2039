"""Segmentation with two processes."""

import json
import multiprocessing
import os
import socket

import pytest

from everytoken.cli import main


def run_rank(rank: int, port: int, words: list[str]) -> None:
    """One of two processes, as torchrun would start it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    raise SystemExit(main(words))


@pytest.mark.timeout(600)
def test_two_processes_share_the_validation_and_the_weights_give_its_numbers(tmp_path, capsys, make_shapes):
    shapes, out = make_shapes(tmp_path / "shapes", train=8, val=3, size=(80, 64)), tmp_path / "run"
    words = [
        *("segment", "train", str(shapes), "--model", "mobilenetv3_small_050", "--channels", "8"),
        *("--aux-channels", "8"),
        *("--crop-size", "32", "--iters", "3", "--val-iters", "3", "--warmup-iters", "1", "--batch-size", "2"),
        *("--workers", "0", "--threads", "1", "--device", "cpu", "--output", str(out)),
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("forkserver")  # torch is imported once, and forked
    context.set_forkserver_preload(["everytoken.tasks.segment.task", __name__])
    processes = [context.Process(target=run_rank, args=(rank, port, words)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(500)
    assert [process.exitcode for process in processes] == [0, 0]
    assert "global batch 4" in (out / "log.txt").read_text()
    best = json.loads((out / "summary.json").read_text())["best"]["score"]
    assert main(["segment", "eval", str(out), str(shapes), "--device", "cpu", "-j", "0", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["images"] == 3
    assert numbers["mIoU"] == pytest.approx(best, abs=1e-3)  # batch norm's running means are the file's on both

"""Segmentation with two processes."""

import json

import pytest

from everytoken_lab.cli import main


@pytest.mark.timeout(600)
def test_two_processes_share_the_validation_and_the_weights_give_its_numbers(
    tmp_path, capsys, make_shapes, start_ranks
):
    shapes, out = make_shapes(tmp_path / "shapes", train=8, val=3, size=(80, 64)), tmp_path / "run"
    words = [
        *("segment", "train", str(shapes), "--model", "mobilenetv3_small_050", "--channels", "8"),
        *("--aux-channels", "8"),
        *("--crop-size", "32", "--iters", "3", "--val-iters", "3", "--warmup-iters", "1", "--batch-size", "2"),
        *("--workers", "0", "--threads", "1", "--device", "cpu", "--out", str(out)),
    ]
    assert [program.wait(500) for program in start_ranks(2, *words)] == [0, 0]
    assert "2 processes x 1 accumulated = 4" in (out / "log.txt").read_text()
    best = json.loads((out / "summary.json").read_text())["best"]["score"]
    assert main(["segment", "eval", str(out), str(shapes), "--device", "cpu", "-j", "0", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["images"] == 3
    assert numbers["mIoU"] == pytest.approx(best, abs=1e-3)  # batch norm's running means are the file's on both

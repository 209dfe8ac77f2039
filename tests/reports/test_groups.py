"""Reading run folders, grouping them, and the numbers over seeds."""

import json
import math
import random

import pytest

from everytoken.engine.run_folder import RunFolder, find_runs, read_run
from everytoken.errors import EverytokenError
from everytoken.reports.groups import config_differences, difference, group_runs
from everytoken.stats import mean, t_quantile


def write_run(path, score: float, seed: int, epochs: int = 2, done: int = 2, **config):
    folder = RunFolder(path)
    folder.write_config({"epochs": epochs, "seed": seed, "data": "photos", "out": str(path), **config})
    for epoch in range(1, done + 1):
        folder.record({"kind": "step", "step": epoch, "epoch": epoch, "lr": 0.1, "loss": 1.0, "images_per_second": 9})
        folder.record({"kind": "epoch", "step": epoch, "epoch": epoch, "seconds": 3.0 * epoch, "score": score})
    if done == epochs:
        folder.write("summary.json", json.dumps({"epochs": epochs, "seconds": 6.0, "best": {"score": score}}))
    return path


def test_runs_that_differ_in_the_seed_only_are_one_group_named_without_it(tmp_path):
    places = [write_run(tmp_path / f"plain-seed{s}", 50 + s, s, lr=1.0) for s in (1, 2, 3)]
    places += [
        write_run(tmp_path / f"token-seed{s}", 52 + 2 * s, s, lr=1.0, objectives={"token_labeling": {"beta": 1}})
        for s in (1, 2, 3)
    ]
    groups = group_runs(find_runs(places))
    assert [g.name for g in groups] == ["plain", "token"]
    assert groups[0].accuracy.values == (51, 52, 53)
    assert config_differences(groups) == [("objectives.token_labeling.beta", [None, 1])]
    found = difference(*groups)
    assert found.estimate.values == (3, 4, 5)
    half = 4.303 * 1 / math.sqrt(3)
    assert found.estimate.low == pytest.approx(4 - half)
    assert found.estimate.high == pytest.approx(4 + half)


def test_a_difference_pairs_equal_seeds_only(tmp_path):
    for seed, score in ((1, 50.0), (2, 60.0)):
        write_run(tmp_path / f"a-seed{seed}", score, seed, lr=1.0)
    for seed, score in ((2, 63.0), (3, 99.0)):
        write_run(tmp_path / f"b-seed{seed}", score, seed, lr=2.0)
    found = difference(*group_runs(find_runs([tmp_path])))
    assert found.seeds == (2,)
    assert found.estimate.values == (3.0,)
    assert found.estimate.low is None


def test_the_t_interval_covers_the_mean_95_times_of_100():
    draw = random.Random(0)
    for count in (2, 3, 6):
        hits = 0
        for _ in range(4000):
            e = mean([draw.gauss(1.0, 2.0) for _ in range(count)])
            hits += e.low <= 1.0 <= e.high
        assert 0.94 < hits / 4000 < 0.96
    assert t_quantile(31) == pytest.approx(2.0395, abs=0.002)
    assert t_quantile(120) == pytest.approx(1.9799, abs=0.001)


def test_unfinished_empty_and_damaged_folders_are_states_and_not_tracebacks(tmp_path):
    half = read_run(write_run(tmp_path / "half", 40.0, 1, epochs=5, done=2))
    assert (half.state, half.done_epochs, half.planned_epochs) == ("unfinished", 2, 5)
    (tmp_path / "empty").mkdir()
    empty = read_run(tmp_path / "empty")
    assert empty.state == "damaged"
    assert "holds no run" in empty.troubles[0]
    broken = write_run(tmp_path / "broken", 40.0, 1)
    (broken / "config.yaml").write_bytes(b"\xff\xfe: [")
    (broken / "summary.json").write_text("[1, 2")
    with (broken / "metrics.jsonl").open("ab") as file:
        file.write(b'12\n\xff\xff\n{"kind": "epoch", "epoch": 3, "score": NaN}\n{"kind": "epo')
    run = read_run(broken)
    assert run.state == "damaged"
    assert len(run.troubles) == 3
    assert run.score == 40.0  # the score that is no number does not count
    assert run.done_epochs == 3
    begun = RunFolder(tmp_path / "begun")
    begun.write_config({"epochs": 3})
    assert read_run(begun.path).state == "not begun"


def test_a_folder_of_runs_stands_for_its_runs_and_a_wrong_name_is_named(tmp_path):
    write_run(tmp_path / "runs/one", 1.0, 1)
    write_run(tmp_path / "runs/two", 1.0, 2)
    write_run(tmp_path / "more/one", 1.0, 2)
    names = [run.name for run in find_runs([tmp_path / "runs", tmp_path / "more", tmp_path / "runs/one"])]
    assert names == ["runs/one", "runs/two", "more/one"]
    with pytest.raises(EverytokenError, match="Did you mean 'runs'"):
        find_runs([tmp_path / "runz"])


def test_runs_of_another_task_keep_the_name_of_their_score(tmp_path, capsys):
    from everytoken.cli import main

    folder = RunFolder(write_run(tmp_path / "seg", 40.0, 1))
    folder.record({"kind": "epoch", "step": 3, "epoch": 3, "score": 41.0, "val_mIoU": 41.0})
    assert main(["report", str(folder.path), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "mIoU 41.00 %" in text
    assert "top-1" not in text
    assert "for classifiers only" in capsys.readouterr().out

"""Reading run folders, grouping them, and the numbers over seeds."""

import json

import pytest

from everytoken.errors import EverytokenError
from everytoken_lab.engine.run_folder import RunFolder, find_runs, read_run
from everytoken_lab.reports.collect import config_differences, difference, differences, group_runs, report


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


def test_a_difference_pairs_equal_seeds_only(tmp_path):
    for seed, score in ((1, 50.0), (2, 60.0)):
        write_run(tmp_path / f"a-seed{seed}", score, seed, lr=1.0)
    for seed, score in ((2, 63.0), (3, 99.0)):
        write_run(tmp_path / f"b-seed{seed}", score, seed, lr=2.0)
    found = difference(*group_runs(find_runs([tmp_path])))
    assert found.seeds == (2,)
    assert found.estimate.values == (3.0,)
    assert found.estimate.low is None


@pytest.mark.parametrize("other", [{"data": "elsewhere"}, {"classes": ("ants", "bees", "wasps")}, {"metric": "mIoU"}])
def test_runs_of_other_data_classes_or_scores_are_never_compared(tmp_path, other):
    metric, classes = other.pop("metric", "top1"), other.pop("classes", ("ants", "bees"))
    places = [write_run(tmp_path / "a", 80.0, 42), write_run(tmp_path / "b", 90.58, 42, lr=2.0, **other)]
    for place, names, score in zip(places, (("ants", "bees"), classes), ("top1", metric), strict=True):
        RunFolder(place).write("classes.json", json.dumps([{"class": name, "images": 9} for name in names]))
        RunFolder(place).record(
            {"kind": "epoch", "step": 2, "epoch": 2, "score": read_run(place).score, f"val_{score}": 1}
        )
    found = report(places, tmp_path / "r.html", predictions=False)
    assert found.differences == []
    assert "points" not in found.headline
    assert "80.00 %" in found.headline
    assert "90.58 %" in found.headline
    assert "b and a have other validation images or classes: not compared." in (tmp_path / "r.html").read_text()


def test_every_dataset_has_its_own_baseline(tmp_path):
    for data, scores in (("ants", (80.0, 81.0)), ("dogs", (50.0, 57.0))):
        for kind, score in zip(("plain", "token"), scores, strict=True):
            write_run(tmp_path / f"{data}-{kind}", score, 1, data=data, objectives={kind: {}})
    found = differences(group_runs(find_runs([tmp_path])))
    assert [(d.base.name, d.other.name, d.estimate.value) for d in found] == [
        ("ants-plain", "ants-token", 1.0), ("dogs-plain", "dogs-token", 7.0),
    ]  # fmt: skip


def test_the_same_name_started_in_two_folders_is_not_the_same_data(tmp_path):
    for place in ("x", "y"):
        (tmp_path / place / "photos").mkdir(parents=True)
        write_run(tmp_path / place / "runs/one", 50.0, 1)
        (tmp_path / place / "runs/one/environment.json").unlink()
    assert len(group_runs(find_runs([tmp_path / "x/runs", tmp_path / "y/runs"]))) == 2


def test_a_seed_counts_once_however_often_it_was_run(tmp_path):
    for name, seed, score in (("one", 42, 81.0), ("again", 42, 82.0), ("two", 43, 80.5)):
        write_run(tmp_path / name, score, seed)
    (group,) = group_runs(find_runs([tmp_path]))
    assert sorted(group.accuracy.values) == [80.5, 81.5]
    (group,) = group_runs(find_runs([tmp_path / "one", tmp_path / "again"]))
    assert group.accuracy.values == (81.5,)
    assert group.accuracy.low is None
    headline = report([tmp_path / "one", tmp_path / "again"], predictions=False).headline
    assert headline == "one and 1 more: score 81.50 % on the validation images (1 seed, no interval)"


@pytest.mark.parametrize(
    ("name", "seed", "wanted"),
    [("photos8", 8, "photos8"), ("a-seed8", 8, "a"), ("a_s8", 8, "a"), ("galaxy-s8", 42, "galaxy-s8"), ("s8", 8, "s8")],
)
def test_only_the_seed_is_left_out_of_a_name(tmp_path, name, seed, wanted):
    assert group_runs(find_runs([write_run(tmp_path / name, 1.0, seed)]))[0].name == wanted


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
    from everytoken_lab.cli import main

    folder = RunFolder(write_run(tmp_path / "seg", 40.0, 1))
    folder.record({"kind": "epoch", "step": 3, "epoch": 3, "score": 41.0, "val_mIoU": 41.0})
    assert main(["report", str(folder.path), "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "mIoU 41.00 %" in text
    assert "top-1" not in text
    assert "for classifiers only" in capsys.readouterr().out

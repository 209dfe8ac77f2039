"""The pages of `everytoken report`: what is on them, and that trouble is told."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from everytoken_lab.calibration import Calibration
from everytoken_lab.cli import main
from everytoken_lab.data.augment import eval_view
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.evaluation.run import ANSWERS, network_inputs, validation_set
from everytoken_lab.reports.page import POINTS, render, thin
from everytoken_lab.reports.predictions import choose, labelling, photos, predict_run

from .conftest import facts_of


def write(trained, out, *words: str) -> dict:
    assert main(["report", str(trained / "runs"), "--out", str(out), *words]) == 0
    return facts_of(out)


def test_the_page_has_everything_and_asks_for_nothing_from_outside(trained, tmp_path, capsys):
    page = tmp_path / "report.html"
    facts = write(trained, page, "--samples", "4", "--title", "A <b> & title")
    assert "report.html" in capsys.readouterr().out
    text = page.read_text()
    assert '<h1 id="title">A &lt;b&gt; &amp; title</h1>' in text
    assert facts["title"] == "A <b> & title"
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert not re.search(r'(?:src|href)="(?!data:|#)', text)
    assert facts["details"][0].startswith("token minus plain, seed by seed (1, 2)")
    assert "objectives.token_labeling.class_target" in dict(facts["settings"])
    columns = {"score", "val_loss", "loss", "token_labeling/token", "lr", "images_per_second", "waiting", "grad_norm"}
    assert columns <= {column for run in facts["runs"] for column in run["curves"]}
    assert [model["name"] for model in facts["models"]] == ["plain", "token"]
    assert len(facts["photos"]) == 12
    looked = [photo for photo in facts["photos"] if "tokens" in photo["answers"][0]]
    assert len(looked) == 4
    for answer in (answer for photo in looked for answer in photo["answers"]):
        assert len(answer["tokens"]["top"]) == 8 * 8 == len(answer["tokens"]["percent"])
        assert set(map(str, answer["tokens"]["top"])) == set(answer["tokens"]["names"])
        assert sum(answer.get("mask", [96 * 96])) > 0


def test_nothing_that_a_name_says_becomes_a_part_of_the_page():
    hostile = "</script><script>alert(1)</script><!-- & \u2028 {{ facts }} {{ title }} \\ \udce9"
    page = render(hostile, {"classes": [hostile], hostile: hostile})
    harmless = render("", {})
    for letters in ("<script", "</script", "<!--", "&"):
        assert page.count(letters) == harmless.count(letters) + {"&": 16}.get(letters, 0)  # escaped in <title> and <h1>
    content = page.split('id="facts">')[1].split("</script>")[0]
    facts = json.loads(content)
    assert facts["classes"] == [hostile]
    assert facts[hostile] == hostile
    assert content.isascii()


def test_addresses_on_a_page_have_no_passwords():
    address = "https://user:S3CRET@host/train.tar?signature=S3CRET"
    page = render(address, {"details": [address], "labelling": {"data": address}, "settings": [("data", [address])]})
    assert "S3CRET" not in page
    assert page.count("https://host/train.tar") == 6


def test_in_a_folder_of_runs_the_one_with_plain_labels_is_the_baseline(trained, tmp_path):
    for name in ("plain", "token"):
        renamed = "zplain" if name == "plain" else "token"
        shutil.copytree(trained / f"runs/{name}-seed1", tmp_path / f"runs/{renamed}-seed1")
    words = ["--no-predictions", "--out", str(tmp_path / "r.html")]
    assert main(["report", str(tmp_path / "runs"), *words]) == 0
    assert "token minus zplain" in (tmp_path / "r.html").read_text()
    assert main(["report", *(str(tmp_path / f"runs/{n}-seed1") for n in ("token", "zplain")), *words]) == 0
    assert "zplain minus token" in (tmp_path / "r.html").read_text()


def test_numbers_on_the_page_are_those_of_the_runs(trained, tmp_path):
    facts = write(trained, tmp_path / "report.html", "--no-predictions")
    assert len(facts["runs"]) == 4
    for run in facts["runs"]:
        rows = (trained / "runs" / run["name"] / "metrics.jsonl").read_text().splitlines()
        assert run["score"] == [json.loads(r) for r in rows if '"epoch"' in r and '"score"' in r][-1]["score"]
    assert facts["notes"] == ["Predictions were left out on request."]
    assert facts["photos"] == facts["models"] == []


def test_predictions_are_those_of_eval_and_are_kept(trained, photos, capsys):
    run = read_run(trained / "runs/token-seed1")
    (run.path / ANSWERS).unlink(missing_ok=True)
    found = predict_run(run, "cpu")
    capsys.readouterr()
    main(["eval", str(run.path), str(photos), "--workers", "0", "--device", "cpu", "--json"])
    assert found.predictions.summary()["top1"] == pytest.approx(json.loads(capsys.readouterr().out)["top1"])
    told = []
    again = predict_run(run, "cpu", tell=lambda done, total: told.append(done))
    assert told == []
    assert np.array_equal(again.predictions.top, found.predictions.top)
    (run.path / ANSWERS).write_bytes(b"torn")
    predict_run(run, "cpu", tell=lambda done, total: told.append(done))
    assert told[-1] == 12


def drawn(runs, count: int = 0, split: str = "") -> list:
    return photos(runs, count, "cpu", split, lambda done, total: None)


def test_photos_show_calibrated_probabilities_and_none_of_few_images(trained):
    found = predict_run(read_run(trained / "runs/token-seed1"), "cpu")
    assert found.calibration is None  # of 12 images
    assert not any("times" in photo["answers"][0] for photo in drawn([found]))
    opened, place = found.model(), {key: i for i, key in enumerate(found.keys)}
    for temperature in (0.1, 3.0):
        calibrated = replace(found, calibration=Calibration(temperature, 12, (), (), ()))
        rows = drawn([calibrated], 12)
        _, images = network_inputs(opened.info, [found.data.picture(place[row["key"]]) for row in rows])
        with torch.no_grad():
            logits = opened.model(images).logits / temperature
        assert [row["answers"][0]["p"] for row in rows] == pytest.approx(logits.softmax(-1).amax(-1).tolist(), abs=1e-3)
        for row, values in zip(rows, logits, strict=True):
            if not row["answers"][0]["right"]:
                gap = values[row["answers"][0]["top"][0]] - values[row["label"][0]]
                assert row["answers"][0]["times"] == pytest.approx(min(gap.exp().item(), np.exp(12)), rel=1e-2)


def test_tokens_and_mask_lie_where_the_network_saw_them(trained):
    found = predict_run(read_run(trained / "runs/token-seed1"), "cpu")
    (row, *_) = drawn([found], 12)
    _, placement = eval_view(found.model().info)(found.data.picture(found.keys.index(row["key"])))
    (width, _, x), (_, height, y) = placement.tolist()
    assert row["answers"][0]["tokens"]["area"] == pytest.approx([x, y, x + width, y + height])


def answers(label, top, sure, loss) -> SimpleNamespace:
    correct = np.array(label) == np.array(top)
    parts = {"label": np.array(label), "correct": correct, "confidence": np.array(sure), "loss": np.array(loss)}
    return SimpleNamespace(predictions=SimpleNamespace(**parts))


def test_mistakes_of_any_run_come_first_by_doubt_and_a_quarter_of_the_tokens_are_of_right_answers():
    first = answers([0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 1, 0], [0.9, 0.9, 0.8, 0.7, 0.6, 0.5], [3, 0.1, 0.2, 0.3, 1, 0.7])
    second = answers(
        [0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0.9, 0.9, 0.8, 0.7, 0.6, 0.5], [0.1, 0.1, 5, 0.3, 0.5, 0.7]
    )
    chosen, detailed = choose([first, second], 4)
    assert chosen == [2, 0, 4, 1, 3, 5]
    assert detailed == {2, 0, 4, 1}
    assert choose([first], 2) == ([0, 4, 1, 2, 3, 5], {0, 4})
    assert choose([first], 0)[1] == set()


def test_corrections_name_the_split_only_where_it_has_a_folder_and_keep_earlier_ones(trained, tmp_path):
    found = predict_run(read_run(trained / "runs/plain-seed1"), "cpu")
    facts = labelling(found)
    assert facts["split"] == "val"
    assert facts["earlier"] == []
    assert facts["names"] == [f"class-{i}" for i in range(3)]
    table = tmp_path / "earlier.csv"
    table.write_text("path,label\nclass-0/a.png,class-1\nclass-0/b.png,\n")
    config = {**found.run.config, "corrections": str(table), "val_split": 0.5}
    facts = labelling(replace(found, run=replace(found.run, config=config)))
    assert facts["split"] == ""
    assert facts["earlier"] == [("class-0/a.png", "class-1", ""), ("class-0/b.png", "", "")]


def test_images_are_found_from_any_folder(trained, photos, tmp_path, monkeypatch):
    shutil.copytree(trained / "runs/token-seed1", tmp_path / "project/runs/one")
    (tmp_path / "project/photos").symlink_to(photos)
    config = tmp_path / "project/runs/one/config.yaml"
    config.write_text(re.sub(r"^data: .*$", "data: photos", config.read_text(), flags=re.MULTILINE))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()  # of the same name, and not it
    assert len(validation_set(read_run(tmp_path / "project/runs/one"))) == 12


def test_runs_in_trouble_are_shown_and_told(trained, tmp_path, capsys):
    runs = tmp_path / "runs"
    shutil.copytree(trained / "runs/plain-seed1", runs / "good")
    shutil.copytree(trained / "runs/plain-seed2", runs / "half")
    (runs / "half/summary.json").unlink()
    lines = (runs / "half/metrics.jsonl").read_text().splitlines()
    (runs / "half/metrics.jsonl").write_text("\n".join(lines[:4]) + '\n{"kind": "st')
    shutil.copytree(trained / "runs/token-seed1", runs / "noconfig")
    (runs / "noconfig/config.yaml").unlink()
    (runs / "good/skipped-images.jsonl").write_text('{"key": "cat/<1>.jpg", "reason": "torn"}\n')
    (runs / "good/bad-updates.jsonl").write_text('{"step": 3}\n')
    (runs / "empty").mkdir()
    assert main(["report", str(runs), str(runs / "empty"), "--out", str(tmp_path / "r.html")]) == 0
    facts = facts_of(tmp_path / "r.html")
    half = next(run for run in facts["runs"] if run["name"] == "half")
    assert (half["state"], half["epochs"]) == ("unfinished", [1, 2])
    assert facts["skipped"] == {"cat/<1>.jpg": "torn"}
    for words in ("config.yaml is missing", "1 updates were left out", "holds no run"):
        assert any(words in note for note in facts["notes"]), words
    assert "config.yaml is missing" in capsys.readouterr().out


def test_lost_images_are_told_and_found_again_with_data(trained, photos, tmp_path, capsys):
    shutil.copytree(trained / "runs/plain-seed1", tmp_path / "run")
    config = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(config.replace(str(photos), "/gone/photos"))
    words = ["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]
    assert main(words) == 0
    assert (
        "no predictions, because There is no file or folder /gone/photos" in facts_of(tmp_path / "r.html")["notes"][0]
    )
    assert main([*words, "--data", str(photos)]) == 0
    assert len(facts_of(tmp_path / "r.html")["photos"]) == 12


@pytest.mark.parametrize("what", ["nothing", "missing", "file", "folder"])
def test_what_cannot_be_reported_on_gets_a_message(what, tmp_path, capsys, trained):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").write_text("")
    words = [str(tmp_path / what), "--out", str(tmp_path / "r.html")]
    if what == "folder":
        words = [str(trained / "runs/plain-seed1"), "--out", str(tmp_path)]
    assert main(["report", *words]) == 2
    assert "Traceback" not in (told := capsys.readouterr().err)
    expected = {
        "nothing": "nothing to report",
        "missing": "does not exist",
        "file": "is a file",
        "folder": "is a folder",
    }
    assert expected[what] in told


def test_thinning_keeps_the_mean_and_the_end():
    points = [(float(i), float(i % 7)) for i in range(5000)]
    found = thin(points)
    assert len(found) <= POINTS
    assert found[-1] == points[-1]
    assert sum(y for _, y in found) / len(found) == pytest.approx(3.0, abs=0.1)

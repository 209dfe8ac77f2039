"""The pages of `everytoken report`: what is on them, and that trouble is told."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from everytoken_lab.cli import main
from everytoken_lab.draw import rgb
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.evaluation.calibrated import validation_set
from everytoken_lab.reports.charts import Series, line_chart, thin, ticks
from everytoken_lab.reports.predictions import CACHE, predict_run
from everytoken_lab.reports.samples import choose, token_pictures


class Page(HTMLParser):
    """Collects what the tests ask for, and checks that elements are closed in order."""

    VOID = frozenset({"meta", "link", "img", "br", "line", "circle", "polyline"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict] = []
        self.charts: list[dict] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "img":
            self.images.append(values)
        if tag == "svg":
            self.charts.append(values)
        self.ids += [values["id"]] if "id" in values else []
        self.addresses += [values[name] for name in ("src", "href") if name in values]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def write(trained, out, *words: str) -> str:
    assert main(["report", str(trained / "runs"), "--out", str(out), *words]) == 0
    return out.read_text(encoding="utf-8")


def test_the_page_has_everything_and_asks_for_nothing_from_outside(trained, tmp_path, capsys):
    text = write(trained, tmp_path / "report.html", "--samples", "4", "--title", "A <b> & title")
    assert "report.html" in capsys.readouterr().out
    page = Page(text)
    assert "<h1>A &lt;b&gt; &amp; title</h1>" in text
    for words in (
        "token minus plain, seed by seed (1, 2)", "95 % interval", "Confusion matri",
        "objectives.token_labeling.class_target",
        "recall %: token", "Learning rate", "Images per second", "Waiting for data", "best top-1 %",
        "Nothing was skipped", "Training: token_labeling/token", "Validation loss",
    ):  # fmt: skip
        assert words in text, words
    assert all(a.startswith(("data:", "#")) for a in page.addresses)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert {a[1:] for a in page.addresses if a.startswith("#")} <= set(page.ids)
    assert all("alt" in image for image in page.images)
    assert len(page.images) >= 2 * 3  # a photo and what the tokens of each group say
    assert all(chart["aria-label"] and chart["role"] == "img" for chart in page.charts)
    assert all(json.loads(chart["data-chart"]) for chart in page.charts if "data-chart" in chart)


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
    text = write(trained, tmp_path / "report.html", "--no-predictions")
    for kind in ("plain", "token"):
        for seed in (1, 2):
            rows = (trained / f"runs/{kind}-seed{seed}/metrics.jsonl").read_text().splitlines()
            score = [json.loads(r) for r in rows if '"epoch"' in r and '"score"' in r][-1]["score"]
            row = re.search(rf">{kind}-seed{seed}</th>.*?</tr>", text)
            assert f"<td>{score:.2f}</td>" in row[0]
    assert "left out on request" in text


def test_predictions_are_those_of_eval_and_are_kept(trained, photos, capsys):
    run = read_run(trained / "runs/token-seed1")
    (run.path / CACHE).unlink(missing_ok=True)
    found = predict_run(run, "cpu")
    capsys.readouterr()
    main(["eval", str(run.path), str(photos), "--workers", "0", "--device", "cpu", "--json"])
    assert found.predictions.summary()["top1"] == pytest.approx(json.loads(capsys.readouterr().out)["top1"])
    told = []
    again = predict_run(run, "cpu", tell=lambda done, total: told.append(done))
    assert told == []
    assert np.array_equal(again.predictions.top, found.predictions.top)
    (run.path / CACHE).write_bytes(b"torn")
    predict_run(run, "cpu", tell=lambda done, total: told.append(done))
    assert told[-1] == 12


def test_samples_show_calibrated_probabilities_and_none_of_few_images(trained, photos):
    found = predict_run(read_run(trained / "runs/token-seed1"), "cpu")
    assert found.calibration is None  # of 12 images
    opened = found.model()
    for temperature in (0.1, 3.0):
        calibrated = replace(found, calibration=SimpleNamespace(temperature=temperature))
        picture, (sure,), _ = token_pictures(calibrated, [5])
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (opened.info.mean, opened.info.std))
        pixels = torch.from_numpy(np.array(picture[0])).permute(2, 0, 1) / 255
        with torch.no_grad():
            logits = opened.model(((pixels - mean) / std)[None]).logits
        assert sure == pytest.approx((logits / temperature).softmax(-1).max().item(), rel=1e-4)


def test_samples_are_equally_many_of_what_each_set_of_groups_gets_right():
    right = np.array([[1, 1, 0, 0, 0, 0, 1, 1], [1, 0, 1, 0, 0, 0, 1, 1]], bool)
    sure = np.linspace(0.1, 0.9, 8)
    groups = [
        SimpleNamespace(group=name, predictions=SimpleNamespace(correct=row, confidence=sure))
        for name, row in zip(("plain", "token"), right, strict=True)
    ]
    picked = choose(groups, 8)
    assert picked[:4] == [(5, "wrong"), (4, "wrong"), (2, "right: token"), (1, "right: plain")]
    assert [why for _, why in picked[4:]] == ["right", "right"]
    assert {why for _, why in choose(groups[:1], 4)} == {"wrong", "right"}


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
    text = (tmp_path / "r.html").read_text()
    Page(text)
    assert "unfinished, 1 of 2 epochs" in text
    assert "config.yaml is missing" in text
    assert "cat/&lt;1&gt;.jpg" in text
    assert "1 updates were left out" in text
    assert "holds no run" in text
    assert "config.yaml is missing" in capsys.readouterr().out


def test_lost_images_are_told_and_found_again_with_data(trained, photos, tmp_path, capsys):
    shutil.copytree(trained / "runs/plain-seed1", tmp_path / "run")
    config = (tmp_path / "run/config.yaml").read_text()
    (tmp_path / "run/config.yaml").write_text(config.replace(str(photos), "/gone/photos"))
    words = ["report", str(tmp_path / "run"), "--out", str(tmp_path / "r.html")]
    assert main(words) == 0
    assert "no predictions, because There is no file or folder /gone/photos" in (tmp_path / "r.html").read_text()
    assert main([*words, "--data", str(photos)]) == 0
    assert "Confusion matri" in (tmp_path / "r.html").read_text()


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


def test_ticks_are_round_and_cover_the_values():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(34.15, 34.4)[0] <= 34.15
    for low, high in ((0.0, 0.0), (5.0, 5.0), (-3.0, 0.5), (1e-7, 3e-7), (1e6, 1e6 + 1)):
        found = ticks(low, high)
        assert found[0] <= low
        assert found[-1] >= high
        assert 2 <= len(found) <= 8


def test_thinning_keeps_the_mean_and_the_end():
    points = [(float(i), float(i % 7)) for i in range(5000)]
    found = thin(points)
    assert len(found) <= 250
    assert found[-1] == points[-1]
    assert sum(y for _, y in found) / len(found) == pytest.approx(3.0, abs=0.1)


def test_a_line_is_where_its_numbers_are():
    chart = line_chart("t", "", [Series("a", [(0.0, 0.0), (1.0, 10.0), (2.0, 5.0)], 0)])
    (x0, y0), (x1, y1), (x2, y2) = chart.lines[0][2]
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2))  # up is less
    assert line_chart("t", "", [Series("a", [], 0)]) is None


def test_foreign_text_stays_text(trained, tmp_path):
    shutil.copytree(trained / "runs/plain-seed1", tmp_path / "run")
    (tmp_path / "run/skipped-images.jsonl").write_text('{"key": "<script>alert(1)</script>|x", "reason": "*torn*"}\n')
    assert main(["report", str(tmp_path / "run"), "--no-predictions", "--out", str(tmp_path / "r.html")]) == 0
    text = (tmp_path / "r.html").read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio of two colours, 1 to 21."""

    def luminance(colour: str) -> float:
        parts = [c / 255 for c in rgb(colour)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    a, b = sorted((luminance(first), luminance(second)), reverse=True)
    return (a + 0.05) / (b + 0.05)


def test_all_text_is_readable_in_light_and_dark():
    style = (resources.files("everytoken_lab.reports") / "templates/style.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\n\s*\}", style, re.DOTALL)[:2]
    for block in (light, dark):
        colours = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", block))
        for back in ("bg", "card"):
            for text in ("ink", "faint", "accent", "good", "bad", "warn"):
                assert contrast(colours[text], colours[back]) >= 4.5, (text, back)
            assert all(contrast(colours[f"s{i}"], colours[back]) >= 3 for i in range(8))
        for percent in range(0, 101, 10):  # of the confusion matrix: half of the accent at most
            back = [
                b + percent / 200 * (a - b) for a, b in zip(*(rgb(colours[n]) for n in ("accent", "bg")), strict=True)
            ]
            assert contrast(colours["ink"], "#" + "".join(f"{round(c):02x}" for c in back)) >= 4.5
    assert "calc(var(--p, 0%) / 2)" in style
    assert contrast("#ffffff", "#000000") == pytest.approx(21)

"""Several labels per image: loss, mixing, metrics, and a run through all commands."""

import csv
import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.nn import functional as F

import everytoken_lab as lab
from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.mixing.methods import CutMix
from everytoken.models import TokenView
from everytoken.objectives.distillation import OnlineTokenLabeling
from everytoken.objectives.hard import HardLabels
from everytoken_lab.annotators.linear import fit_linear, stratified_folds
from everytoken_lab.calibration import calibrate
from everytoken_lab.cli import main
from everytoken_lab.engine.accuracy import MultiLabelPredictions, average_precision
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.models.description import Description
from everytoken_lab.training.build import build

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (60, 80, 230)}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """96 images with squares of any of three colours."""
    root, rng = tmp_path_factory.mktemp("several") / "photos", np.random.default_rng(0)
    root.mkdir()
    with (root / "labels.csv").open("w") as file:
        file.write("path,label\n")
        for i in range(96):
            pixels = rng.integers(60, 160, (32, 32, 3)).astype(np.uint8)
            shown = [name for name in COLOURS if rng.random() < 0.4]
            for place, name in zip(rng.permutation(4), shown, strict=False):
                y, x = 16 * (place // 2) + 2, 16 * (place % 2) + 2
                pixels[y : y + 12, x : x + 12] = COLOURS[name]
            Image.fromarray(pixels).save(root / f"{i}.png")
            file.write(f"{i}.png,{';'.join(shown) or ';'}\n")
    return root


SMALL = {"model": "test_vit", "img_size": 32, "device": "cpu", "workers": 0, "batch_size": 12, "val_split": 0.3}


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "several"
    settings = SMALL | {"epochs": 12, "lr": 4e-3, "scale": (0.8, 1.0), "aa": "", "warmup_epochs": 1}
    return lab.train(photos, out=str(out), mixing={"cutmix": {"prob": 0.3}}, **settings)


def test_the_loss_of_mixed_images_is_the_binary_cross_entropy_of_mixed_labels():
    torch.manual_seed(0)
    images, labels = torch.rand(6, 3, 16, 16), (torch.rand(6, 5) < 0.4).to(torch.uint8)
    logits = torch.randn(6, 5, requires_grad=True)
    _, mix = CutMix()(images)
    view = TokenView(logits, torch.zeros(6, 1, 1, 2), None)
    for s in (0.0, 0.1):
        ours = HardLabels(smoothing=s)(view, Batch(images, labels, mix=mix))["loss"]
        y = labels.float()
        y = mix.ratio[:, None] * y + (1 - mix.ratio[:, None]) * y[mix.partner]
        wanted = F.binary_cross_entropy_with_logits(logits, y * (1 - s) + s / 5, reduction="none").sum(1).mean()
        torch.testing.assert_close(ours, wanted)
        gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, wanted)]
        torch.testing.assert_close(*gradients)


def test_objectives_that_learn_one_class_refuse_several_by_name(photos):
    from everytoken_lab.engine.distributed import World
    from everytoken_lab.engine.options import TrainOptions, apply

    with pytest.raises(EverytokenError, match="OnlineTokenLabeling learns one label per image"):
        OnlineTokenLabeling()(TokenView(torch.zeros(2, 3), torch.zeros(2, 1, 1, 2), None), Batch(
            torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, dtype=torch.uint8)))  # fmt: skip
    for objectives, name in (({"distillation": {}}, "distillation"), ({"relabel": {}}, "relabel")):
        options = apply(TrainOptions(), SMALL | {"data": str(photos), "objectives": objectives}, "test")
        with pytest.raises(EverytokenError, match=f"objective '{name}' learns one class per image"):
            build(options, World(0, 1, torch.device("cpu")))
    with pytest.raises(EverytokenError, match="leave --maps out"):
        lab.train(photos, maps="auto", out=str(photos.parent / "none"))
    with pytest.raises(EverytokenError, match="`fit` learns one class per image"):
        lab.annotate(photos, photos.parent / "maps", annotator="fit")


def test_alignment_and_drloc_train_on_several_labels(photos, tmp_path):
    settings = SMALL | {"epochs": 1, "out": str(tmp_path / "run"), "mixing": {"cutmix": {}}}
    done = lab.train(photos, objectives={"tl_align": {}, "drloc": {"weight": 0.1}}, **settings)
    assert done.metric == "mAP"
    assert done.classifies
    assert {"tl_align/class", "drloc/drloc"} & set(done.steps[-1])


def test_a_run_learns_and_every_command_works_with_it(photos, run, tmp_path, capsys):
    assert run.best > 75
    result = lab.evaluate(run.path, photos, device="cpu", workers=0)
    assert result.numbers["mAP"] == pytest.approx(run.summary["best"]["score"], abs=0.01)
    assert result.top1.low <= result.top1.value <= result.top1.high
    assert [row["class"] for row in result.per_class()] == ["blue", "green", "red"]
    result.to_csv(tmp_path / "eval.csv")
    assert main(["eval", str(run.path), str(photos), "-j", "0", "--device", "cpu"]) == 0
    assert "mAP" in capsys.readouterr().out
    out = tmp_path / "predictions.csv"
    assert main(["predict", str(run.path), str(photos), "--out", str(out), "-j", "0", "--device", "cpu"]) == 0
    assert "recall 100 % on the held-out images" in capsys.readouterr().err
    with out.open() as file:
        rows = list(csv.DictReader(file))
    right = sum(
        set(filter(None, row["label"].split(";"))) == truth(photos)[row["image"].rsplit("/", 1)[1]] for row in rows
    )
    assert right > 48
    exported = lab.export(run.path, tmp_path / "exported", to=("timm",))
    card = (exported.folder / "README.md").read_text()
    assert "before the sigmoid" in card
    assert "Mean average precision" in card
    again = lab.predict(exported.folder, photos, workers=0, device="cpu")
    assert [image.answer for image in again] == [row["label"] for row in rows]
    sure = lab.predict(exported.folder, photos, workers=0, device="cpu", sure=0.99)
    assert sure.threshold >= again.threshold
    report = lab.report(run.path, tmp_path / "report.html", samples=4, device="cpu")
    page = (tmp_path / "report.html").read_text()
    assert report.metric == "mAP"
    assert '"AP": ' in page
    assert lab.report(run.path, samples=0, device="cpu").classes[0].predictions.accuracy.value == pytest.approx(
        result.numbers["mAP"])  # fmt: skip


def truth(photos):
    with (photos / "labels.csv").open() as file:
        return {row["path"]: set(filter(None, row["label"].split(";"))) for row in csv.DictReader(file)}


def test_a_model_of_one_label_is_not_measured_by_several_and_the_other_way_round_it_is(photos, run, tmp_path):
    single = photos.parent / "single.csv"
    lines = [f"photos/{path},{min(labels)}\n" for path, labels in truth(photos).items() if labels]
    single.write_text("path,label\n" + "".join(lines))
    assert 0 < lab.evaluate(run.path, single, split="all", device="cpu", workers=0).numbers["mAP"] <= 100
    other = lab.train(single, out=str(tmp_path / "one"), **SMALL | {"epochs": 1})
    assert other.metric == "top-1"
    with pytest.raises(EverytokenError, match="answers one class per image"):
        lab.evaluate(other.path, photos, device="cpu", workers=0)


def test_average_precision_is_the_mean_precision_at_each_positive():
    assert average_precision(np.array([4.0, 3, 2, 1]), np.array([1, 0, 1, 0], bool)) == pytest.approx((1 + 2 / 3) / 2)
    assert average_precision(np.zeros(4), np.array([1, 0, 0, 0], bool)) == 0.25  # ties in any order
    rng = np.random.default_rng(0)
    label = rng.random((40, 6)) < 0.2
    answers = MultiLabelPredictions(np.arange(40), label, (rng.normal(size=label.shape) + 2 * label).astype(np.float32))
    estimate = answers.accuracy
    assert estimate.low < estimate.value < estimate.high
    assert answers.difference(answers).value == 0
    assert not answers.difference(answers).clear


def test_few_photos_without_an_error_have_a_wide_interval():
    label = np.eye(3, dtype=bool)[np.arange(12) % 3]
    perfect = MultiLabelPredictions(np.arange(12), label, np.where(label, 1, -1).astype(np.float32))
    estimate = perfect.accuracy
    assert (estimate.value, estimate.high) == (100, 100)
    assert 60 < estimate.low < 80  # of 12 images without an error, Wilson's is 76 to 100
    few = label.copy()
    few[3:, 1:] = False  # one photo of each of two classes says less
    assert (
        MultiLabelPredictions(perfect.index, few, np.where(few, 1, -1).astype(np.float32)).accuracy.low < estimate.low
    )
    none = np.zeros_like(label)
    assert (MultiLabelPredictions(perfect.index, none, perfect.logits).accuracy.low) == 0


def test_the_calibration_of_several_labels_finds_the_temperature_and_thresholds_by_precision():
    rng = np.random.default_rng(0)
    logits = rng.normal(-1, 2, (4000, 5)).astype(np.float32)
    label = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / 2.5))
    calibration = calibrate(logits, label)
    assert calibration.temperature == pytest.approx(2.5, rel=0.05)
    threshold, recall = calibration.threshold(0.7)
    chosen = 1 / (1 + np.exp(-logits / calibration.temperature)) >= threshold
    assert label[chosen].mean() == pytest.approx(0.7, abs=0.02)
    assert (label & chosen).sum() / label.sum() == pytest.approx(recall / 100, abs=0.02)


def test_the_linear_head_of_several_labels_is_a_logistic_regression_for_each_class():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 8)).astype(np.float32)
    labels = (features @ rng.normal(size=(8, 3)) + rng.normal(size=(200, 3)) > 0.5).astype(np.uint8)
    folds = stratified_folds(labels.argmax(1), list(map(str, range(200))), 4)
    fit = fit_linear(features, labels, 3, folds, strength=1e-2)
    alone = [fit_linear(features, labels[:, [k]], 1, folds, strength=1e-2) for k in range(3)]
    np.testing.assert_allclose(fit.out_of_fold, np.concatenate([f.out_of_fold for f in alone], 1), atol=2e-2)
    assert fit.accuracy > 0.85


def test_training_without_a_recipe_fits_a_head_for_several_labels_and_fine_tunes_it(photos, tmp_path):
    torch.manual_seed(0)
    weights = tmp_path / "tiny.safetensors"
    about = Description("test_resnet", {"num_classes": 7}, img_size=(32, 32), crop_pct=1.0)
    write_weights(weights, timm.create_model("test_resnet", num_classes=7).state_dict(), about.to_metadata())
    done = lab.train(photos, weights=str(weights), minutes=2, epochs=1, out=str(tmp_path / "run"), workers=0,
                    device="cpu", val_split=0.3, batch_size=16)  # fmt: skip
    result = json.loads((done.path / "auto.json").read_text())["result"]
    assert result["mAP"] > 40
    assert "mAP" in result["text"]
    assert lab.load(done.path / "linear").info.multi_label
    assert lab.load(done.path).info.multi_label
    assert done.metric == "mAP"

"""Linear classifiers on frozen features: the optimum, honest cross-validation, the cache, the folded model, `fit`."""

from __future__ import annotations

import json

import numpy as np
import pytest
import timm
import torch

from everytoken.errors import EverytokenError
from everytoken.maps import Maps
from everytoken_lab.annotators import AnnotateOptions, AnnotatorError
from everytoken_lab.annotators import annotator as annotator_module
from everytoken_lab.annotators import features as features_module
from everytoken_lab.annotators import job as job_module
from everytoken_lab.annotators.annotator import fit_annotator
from everytoken_lab.annotators.features import (
    Candidate,
    FrozenBackbone,
    choose_backbone,
    compute_features,
    fit_features,
)
from everytoken_lab.annotators.job import fill_store
from everytoken_lab.annotators.linear import LinearHead, fit_linear, stratified_folds
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.distributed import World
from everytoken_lab.models.description import Description, timm_config
from everytoken_lab.models.open import open_model

ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="session")
def backbone(weights, tmp_path_factory):
    """A tiny network with random weights, in a file that describes itself."""
    path = tmp_path_factory.mktemp("backbone") / "tiny.safetensors"
    model = timm.create_model("test_resnet", num_classes=3, checkpoint_path=str(weights("test_resnet")))
    about = Description("test_resnet", {"num_classes": 3}, img_size=(64, 64), crop_pct=1.0)
    write_weights(path, model.state_dict(), about.to_metadata())
    return str(path)


def clusters(per_class=20, dim=6, classes=3, spread=1.0, seed=0):
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), per_class)
    centres = rng.normal(0, 2, (classes, dim))
    return (centres[labels] + rng.normal(0, spread, (len(labels), dim)) + 5).astype(np.float32), labels


@pytest.mark.parametrize("dim", [6, 100])  # 60 images: fewer and more features than images
def test_the_head_is_the_minimum_of_penalised_cross_entropy(dim):
    x, y = clusters(dim=dim)
    fit = fit_linear(x, y, 3, stratified_folds(y, list(map(str, range(60))), 5), strength=0.01)
    weight = fit.head.weight.double().requires_grad_()
    bias = fit.head.bias.double().requires_grad_()
    scale = float((torch.from_numpy(x) - torch.from_numpy(x).mean(0)).std()) * dim**0.5
    logits = torch.from_numpy(x).double() @ weight.T + bias
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)) + 0.005 * (weight * scale).square().sum()
    loss.backward()
    assert float((weight.grad / scale).abs().max()) < 2e-4
    assert float(bias.grad.abs().max()) < 2e-4


def test_out_of_fold_answers_come_from_heads_that_have_not_seen_the_image():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 100)).astype(np.float32), rng.integers(0, 2, 60)  # noise: nothing can be learnt
    fit = fit_linear(x, y, 2, stratified_folds(y, list(map(str, range(60))), 5), strength=1e-4)
    known = (fit.head(torch.from_numpy(x)).argmax(1).numpy() == y).mean()
    assert known == 1.0
    assert fit.accuracy < 0.75
    for number, head in enumerate(fit.fold_heads):
        inside = fit.fold == number
        np.testing.assert_allclose(head(torch.from_numpy(x[inside])).numpy(), fit.out_of_fold[inside], atol=1e-3)


def test_the_strength_follows_the_noise():
    clean, noisy = (fit_linear(*clusters(dim=40, spread=s), 3, np.arange(60) % 5) for s in (0.3, 6.0))
    assert noisy.strength > clean.strength
    assert clean.accuracy > 0.95


@pytest.mark.parametrize("classes", [2, 10])
def test_random_labels_are_right_by_chance_only(classes):
    rng = np.random.default_rng(1)
    labels = rng.permutation(np.arange(300) % classes)
    x = rng.normal(size=(300, 600)).astype(np.float32)
    for strength in (0.0, 1e-6):  # chosen, and so weak that a warm start would never be left
        fit = fit_linear(x, labels, classes, stratified_folds(labels, list(map(str, range(300))), 5), strength)
        assert fit.accuracy == pytest.approx(1 / classes, abs=4 * (1 / classes * (1 - 1 / classes) / 300) ** 0.5)


def test_a_class_that_a_fold_lacks_is_not_its_answer():
    x, y = clusters(per_class=10)
    fold = np.arange(30) % 3
    fold[y == 2] = 1  # nothing of class 2 outside fold 1
    fit = fit_linear(x, y, 3, fold, strength=1e-3)
    assert set(fit.out_of_fold[fold == 1].argmax(1)) <= {0, 1}
    assert (fit.head(torch.from_numpy(x)).argmax(1).numpy() == y).mean() > 0.9


def test_folds_share_every_class_and_keep_copies_together():
    labels = np.repeat(np.arange(3), 10)
    fold = stratified_folds(labels, list(map(str, range(30))), 5)
    assert all(np.bincount(labels[fold == k]).tolist() == [2, 2, 2] for k in range(5))
    keys = list(map(str, range(30)))
    keys[7] = keys[3]
    assert stratified_folds(labels, keys, 5)[7] == stratified_folds(labels, keys, 5)[3]


def test_features_are_computed_once_and_follow_the_content_of_an_image(photos, backbone, tmp_path, network_input):
    network = FrozenBackbone(backbone)
    first = compute_features(open_dataset(photos), network, tmp_path / "cache", workers=0)
    assert first.computed == 12
    (photos / "red/0.red.png").rename(photos / "red/9.red.png")
    (photos / "blue/again.png").write_bytes((photos / "blue/1.blue.png").read_bytes())
    data = open_dataset(photos)
    again = compute_features(data, network, tmp_path / "cache", workers=0)
    assert again.computed == 0
    at = {data.key(i): i for i in range(len(data))}
    assert (again.values[at["blue/again.png"]] == again.values[at["blue/1.blue.png"]]).all()
    images = network_input(network.preprocessing, data.picture(0))
    np.testing.assert_allclose(network.pooled(images)[0].numpy(), again.values[0], rtol=2e-3, atol=2e-3)
    other = FrozenBackbone(backbone, 96)
    assert compute_features(data, other, tmp_path / "cache", workers=0).computed == 12  # of 13: one is a copy


def test_a_damaged_part_is_computed_again(data, backbone, tmp_path):
    network = FrozenBackbone(backbone)
    first = compute_features(data, network, tmp_path, workers=0)
    (part,) = tmp_path.glob("*/part-*.safetensors")
    part.write_bytes(part.read_bytes()[:100])
    again = compute_features(data, network, tmp_path, workers=0)
    assert again.computed == 12
    assert (again.values == first.values).all()


def test_a_job_that_was_killed_goes_on_after_its_last_part(data, backbone, tmp_path, monkeypatch):
    network = FrozenBackbone(backbone)
    monkeypatch.setattr(features_module, "_PART", 4)
    monkeypatch.setattr(features_module, "_BATCH", 4)

    def killed(done, total):
        if done == 8:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        compute_features(data, network, tmp_path, workers=0, progress=killed)
    assert compute_features(data, network, tmp_path, workers=0).computed == 4


def test_unreadable_images_are_named_and_left_out(photos, backbone):
    (photos / "red/0.red.png").write_bytes(b"broken")
    data = open_dataset(photos)
    features = compute_features(data, FrozenBackbone(backbone), workers=0)
    (bad,) = features.failures
    assert data.key(bad) == "red/0.red.png"
    assert len(fit_features(features, data, 2).labels) == 11


def test_the_folded_model_answers_as_the_head_and_opens_by_itself(data, backbone, tmp_path, network_input):
    network = FrozenBackbone(backbone)
    features = compute_features(data, network, workers=0)
    fit = fit_features(features, data, 2)
    model, info = network.with_head(fit.head, data.class_names)
    write_weights(tmp_path / "best.safetensors", model.state_dict(), info.to_metadata())
    opened = open_model(tmp_path)
    assert opened.class_names == tuple(data.class_names)
    assert (opened.info.img_size, opened.info.crop_pct) == ((64, 64), 1.0)
    images = network_input(network.preprocessing, data.picture(3))
    with torch.no_grad():
        answer = opened.model.backbone(images)[0]
    torch.testing.assert_close(answer, fit.head(torch.from_numpy(features.values[3])), rtol=1e-2, atol=1e-2)


def test_a_squashed_view_travels_with_the_model(data, backbone, tmp_path):
    network = FrozenBackbone(backbone, squash=True)
    assert network.key != FrozenBackbone(backbone).key
    model, info = network.with_head(
        fit_features(compute_features(data, network, workers=0), data, 2).head, data.class_names
    )
    write_weights(tmp_path / "best.safetensors", model.state_dict(), info.to_metadata())
    opened = open_model(tmp_path)
    assert (eval_view(opened.info).crop_mode, opened.info.crop_pct) == ("squash", 1.0)
    assert timm_config(opened.model.backbone, opened.info)["pretrained_cfg"]["crop_mode"] == "squash"


def test_models_without_a_linear_classifier_are_refused(backbone, monkeypatch):
    assert features_module._classifiers(timm.create_model("test_byobnet", num_classes=0)) == []
    monkeypatch.setattr(features_module, "_classifiers", lambda model: [])
    with pytest.raises(AnnotatorError, match="no linear classifier"):
        FrozenBackbone(backbone)


def test_cross_validation_chooses_between_backbones_and_leaves_slow_ones_out(
    photos_of, backbone, tmp_path, monkeypatch
):
    data = open_dataset(photos_of(per_class=10))
    offered = [Candidate(backbone, 32), Candidate(backbone, 64)]
    choice = choose_backbone(data, offered, tmp_path, workers=0)
    assert [trial.candidate.squash for trial in choice.trials] == [False, False, True]  # the best one, squashed
    best = min(choice.trials, key=lambda trial: trial.loss)
    assert choice.backbone.info.img_size == (best.candidate.img_size,) * 2
    assert (choice.backbone.preprocessing.crop_mode == "squash") == best.candidate.squash
    assert len(choice.fit.labels) == 30
    quick = choose_backbone(data, offered, tmp_path, seconds=0.0, workers=0)
    assert [trial.candidate.img_size for trial in quick.trials] == [32]
    assert "64 px" in quick.skipped[0]
    with pytest.raises(AnnotatorError, match="no pretrained weights"):
        choose_backbone(data, [])


def test_where_time_is_short_the_first_candidate_sees_small_images(photos_of, backbone, tmp_path, monkeypatch):
    data = open_dataset(photos_of(per_class=10))
    monkeypatch.setattr(features_module, "_SMALL", 32)
    offered = [Candidate(backbone), Candidate(backbone, 96)]
    assert choose_backbone(data, offered, tmp_path, seconds=0.0, workers=0).backbone.info.img_size == (32, 32)
    fixed = choose_backbone(data, [Candidate(backbone, 64), *offered], tmp_path, seconds=0.0, workers=0)
    assert fixed.backbone.info.img_size == (64, 64)


def test_all_photos_decide_between_backbones_that_few_do_not_tell_apart(photos_of, backbone, tmp_path, monkeypatch):
    data = open_dataset(photos_of(per_class=12))
    monkeypatch.setattr(features_module, "PROBED", 15)
    offered = [Candidate(backbone, 32), Candidate(backbone, 64)]
    seen: list[int] = []
    monkeypatch.setattr(
        features_module,
        "fit_features",
        lambda features, data, **more: (seen.append(len(features.values)), fit_features(features, data, **more))[1],
    )
    monkeypatch.setattr(features_module, "_is_decided", lambda first, second: False)
    chosen = choose_backbone(data, offered, tmp_path, workers=0)
    assert seen == [15, 15, 15, 36, 36, 36]
    losses = [
        fit_features(compute_features(data, FrozenBackbone(backbone, s), tmp_path, workers=0), data).loss
        for s in (32, 64)
    ]
    squashed = FrozenBackbone(backbone, chosen.backbone.info.img_size[0], squash=True)
    losses.append(fit_features(compute_features(data, squashed, tmp_path, workers=0), data).loss)
    assert chosen.fit.loss <= min(losses) + 1e-6
    seen.clear()
    monkeypatch.setattr(features_module, "_is_decided", lambda first, second: True)
    choose_backbone(data, offered, tmp_path, workers=0)
    assert seen == [15, 15, 15, 36]


# -- the annotator -----------------------------------------------------------------------------------------------------


def options(model="", **more):
    return AnnotateOptions(workers=0, fit_model=model, **more)


@pytest.mark.parametrize("many", [1, 1000])  # images from which on ONNX Runtime is used, if it is installed
def test_fit_is_a_linear_head_at_every_cell_by_heads_that_have_not_seen_the_image(
    photos_of, backbone, tmp_path, caplog, many, monkeypatch
):
    monkeypatch.setattr(job_module, "_MANY", many)
    data, out = open_dataset(photos_of(per_class=16)), tmp_path / "maps"
    with caplog.at_level("INFO"):
        annotator = fit_annotator(data, out, options(backbone), ALONE)
    assert annotator.settings["held_out_accuracy"] > 0.9
    assert annotator.settings["fit"]["held_out"] == 0.1
    assert "right in cross-validation" in caplog.text
    validation = {
        i for i in range(len(data)) if data.key(i) in set(open_dataset(data.name, "val", val_split=0.1).keys())
    }
    assert {i for i, number in enumerate(annotator.part) if number == 5} == validation
    fill_store(data, out, annotator, options())
    store = Maps(out)
    assert store.meta.class_names == data.class_names
    assert np.mean([(store[data.key(i)].classes[..., 0] == data.label(i)).mean() for i in range(len(data))]) > 0.7
    # the mean of the cells is the answer for the image, by the head of its fold
    image = torch.randn(1, 3, 64, 64)
    for index in (0, 20):
        cells = annotator.score(image, np.array([index])).mean((1, 2))
        head = LinearHead(annotator.weight[annotator.part[index]], annotator.bias[annotator.part[index]])
        wanted = head(FrozenBackbone(backbone).pooled(image))
        torch.testing.assert_close(cells, wanted, rtol=1e-3, atol=1e-3)


def test_a_fitted_head_is_used_again_and_refuses_other_settings(data, backbone, tmp_path, monkeypatch):
    out = tmp_path / "maps"
    first = fit_annotator(data, out, options(backbone), ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(annotator_module, "choose_backbone", None)  # would fail if it were called
        again = fit_annotator(data, out, options(), ALONE)
    assert again.describe() == first.describe()
    kept = open_model(out / "annotator")
    assert kept.class_names == tuple(data.class_names)
    assert kept.info.img_size == (64, 64)
    for changed in (options(backbone, fit_size=32), options("registry:efficientnet_lite0")):
        with pytest.raises(AnnotatorError, match="other settings"):
            fit_annotator(data, out, changed, ALONE)
    with pytest.raises(AnnotatorError, match="the images or their classes"):
        fit_annotator(data.subset(range(11)), out, options(), ALONE)
    note = out / "annotator/linear.json"
    note.write_text(json.dumps({"plan": {}}))
    with pytest.raises(AnnotatorError, match="damaged"):
        fit_annotator(data, out, options(), ALONE)


def test_without_pretrained_weights_fit_says_what_to_install(data, tmp_path, monkeypatch):
    monkeypatch.setattr(features_module, "available_weights", list)
    with pytest.raises(AnnotatorError, match=r"the extra `registry`.*timm:NAME"):
        fit_annotator(data, tmp_path / "maps", options(), ALONE)
    assert not (tmp_path / "maps").exists()


def test_a_backbone_without_a_prefix_is_refused(data, tmp_path):
    with pytest.raises(EverytokenError, match="must be registry:NAME, timm:NAME"):
        fit_annotator(data, tmp_path, options("test_resnet"), ALONE)


def test_one_class_is_not_enough_to_learn(photos_of, tmp_path):
    data = open_dataset(photos_of(colours={"red": (200, 0, 0)}))
    with pytest.raises(EverytokenError, match="tell classes apart"):
        fit_annotator(data, tmp_path / "maps", options(), ALONE)


def test_unreadable_images_do_not_stop_fit(photos, backbone, tmp_path):
    (photos / "red/0.red.png").write_bytes(b"broken")
    data, out = open_dataset(photos), tmp_path / "maps"
    fill_store(data, out, fit_annotator(data, out, options(backbone), ALONE), options())
    assert list(Maps(out).skipped) == ["red/0.red.png"]

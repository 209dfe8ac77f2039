"""Annotators that are trained on the data set: folds, reproducibility, networks that are not trained twice."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from everytoken.annotators import AnnotateOptions, AnnotatorError, FitOptions, fill_store, fit_annotator
from everytoken.annotators import fit_network as fit_module
from everytoken.annotators.fit import kept_network
from everytoken.annotators.fit_network import make_folds, small_cnn
from everytoken.data.datasets import open_dataset
from everytoken.engine.distributed import World
from everytoken.errors import EverytokenError
from everytoken.maps import Maps
from everytoken.models import TokenModel

ALONE = World(0, 1, torch.device("cpu"))
WORKERS = AnnotateOptions(workers=0)


def options(epochs=3, folds=1, img_size=(), **more):
    fitted = {"fit_size": (32, 32), "fit_epochs": epochs, "fit_batch_size": 8, "folds": folds, **more}
    return AnnotateOptions(workers=0, img_size=img_size, fit=FitOptions(**fitted))


def fit(data, out, chosen=None, world=ALONE):
    return fit_annotator(data, out, chosen or options(), world)


def state(annotator, number=0):
    return annotator.models[number].state_dict()


def test_folds_hold_every_image_out_once_and_share_every_class(data):
    folds, part = make_folds(data, 3, seed=1)
    assert sorted(np.concatenate([fold.held_out for fold in folds]).tolist()) == list(range(len(data)))
    for fold in folds:
        assert not set(fold.train.tolist()) & set(fold.held_out.tolist())
        assert set(data.labels[fold.held_out].tolist()) == {0, 1, 2}
        assert (part[fold.held_out] == fold.number).all()
    again, _ = make_folds(data, 3, seed=2)
    assert any(set(a.held_out.tolist()) != set(b.held_out.tolist()) for a, b in zip(folds, again, strict=True))


@pytest.mark.parametrize("count", [1, 3])
def test_no_network_learns_from_images_that_training_validates_on(photos_of, count):
    folder = photos_of(per_class=20)
    data, validation = open_dataset(folder), open_dataset(folder, "val", val_split=0.1)
    keys = {validation.key(i) for i in range(len(validation))}
    validated = {i for i in range(len(data)) if data.key(i) in keys}
    folds, part = make_folds(data, count, seed=1)
    assert validated
    assert all(not validated & set(fold.train.tolist()) for fold in folds)
    if count == 1:
        assert set(folds[0].held_out.tolist()) == validated
        assert part.tolist() == [0] * 60
    seen, _ = make_folds(data, count, seed=1, for_training=False)  # validation images were left out before
    assert {int(i) for fold in seen for i in fold.train} >= set(range(60)) - set(seen[0].held_out.tolist())


def test_a_class_with_one_image_cannot_be_held_out(photos_of, photos):
    for path in list((photos / "red").iterdir())[1:]:
        path.unlink()
    with pytest.raises(EverytokenError, match="'red' has only 1 image"):
        make_folds(open_dataset(photos), 1, seed=1)


def test_one_class_is_not_enough_to_learn(photos_of, tmp_path):
    data = open_dataset(photos_of(colours={"red": (200, 0, 0)}))
    with pytest.raises(EverytokenError, match="tell classes apart"):
        fit(data, tmp_path / "maps")


@pytest.mark.parametrize(("side", "cells"), [(32, 8), (64, 8), (128, 8), (224, 14)])
def test_the_small_network_has_maps_of_eight_cells_or_more(side, cells):
    model = TokenModel(small_cnn(4, side)).eval()
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        made = model.cell_logits(images)
        torch.testing.assert_close(made.mean((1, 2)), model.backbone(images), rtol=1e-4, atol=1e-5)
    assert made.shape == (2, cells, cells, 4)


@pytest.mark.parametrize("side", [32, 64, 128])
def test_cells_of_the_small_network_lie_in_the_middle_of_their_pixels(side):
    model = TokenModel(small_cnn(4, side)).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.Conv2d):  # kernels that a flip leaves alone, so only the geometry is left
            part.weight.data += part.weight.data.flip(2)
            part.weight.data += part.weight.data.flip(3)
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        for axes in ((2,), (3,)):
            cells = model.cell_logits(images.flip(axes)).flip([axis - 1 for axis in axes])
            torch.testing.assert_close(cells, model.cell_logits(images), rtol=1e-3, atol=1e-3)


def test_fit_learns_colours_and_labels_every_cell_with_them(photos_of, tmp_path, caplog):
    data = open_dataset(photos_of(per_class=16))
    with caplog.at_level("INFO"):
        annotator = fit(data, tmp_path / "maps", options(epochs=8))
    assert annotator.settings["held_out_accuracy"] == 1.0
    assert annotator.settings["fit"]["held_out"] == 0.1
    assert "held-out accuracy 100.0%" in caplog.text
    fill_store(data, tmp_path / "maps", annotator, WORKERS)
    store = Maps(tmp_path / "maps")
    assert store.manifest.class_names == data.class_names
    for i in range(len(data)):
        assert (store[data.key(i)].classes[..., 0] == data.label(i)).mean() > 0.8


def test_the_same_seed_gives_the_same_network_and_another_does_not(data, tmp_path):
    one, two = fit(data, tmp_path / "one"), fit(data, tmp_path / "two")
    assert all(torch.equal(a, b) for a, b in zip(state(one).values(), state(two).values(), strict=True))
    assert one.describe() == two.describe()
    other = fit(data, tmp_path / "other", options(seed=1))
    assert not torch.equal(state(one)["model.backbone.fc.weight"], state(other)["model.backbone.fc.weight"])


def test_training_leaves_the_global_random_numbers_alone(data, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fit(data, tmp_path / "maps")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_finished_network_is_not_trained_again_and_a_missing_one_is(data, tmp_path, monkeypatch):
    crossed = options(epochs=1, folds=2)
    first = fit(data, tmp_path / "maps", crossed)
    trained: list[int] = []
    real = fit_module._train_fold

    def train(data, fold, *rest):
        trained.append(fold.number)
        return real(data, fold, *rest)

    monkeypatch.setattr(fit_module, "_train_fold", train)
    fit(data, tmp_path / "maps", crossed)
    assert trained == []
    (tmp_path / "maps/annotator/fold-1.json").unlink()  # killed before the note was written
    again = fit(data, tmp_path / "maps", crossed)
    assert trained == [1]
    for number in (0, 1):
        for a, b in zip(state(first, number).values(), state(again, number).values(), strict=True):
            assert torch.equal(a, b)


def test_processes_share_the_folds(data, tmp_path):
    crossed = options(epochs=1, folds=2)

    class Second(World):
        def barrier(self):
            raise InterruptedError

    class First(World):
        def barrier(self):
            pass

    with pytest.raises(InterruptedError):
        fit(data, tmp_path / "maps", crossed, Second(1, 2, torch.device("cpu")))
    assert (tmp_path / "maps/annotator/fold-1.json").exists()
    assert not (tmp_path / "maps/annotator/fold-0.json").exists()
    assert len(fit(data, tmp_path / "maps", crossed, First(0, 2, torch.device("cpu"))).models) == 2


def test_a_network_that_was_trained_otherwise_is_not_used(data, tmp_path):
    fit(data, tmp_path / "maps")
    with pytest.raises(AnnotatorError, match=r"other settings \(epochs changed\)"):
        fit(data, tmp_path / "maps", options(epochs=4))
    fewer = data.subset(range(len(data) - 1))
    with pytest.raises(AnnotatorError, match="the images or their classes changed"):
        fit(fewer, tmp_path / "maps")


def test_each_image_is_annotated_by_the_network_that_did_not_see_it(data, tmp_path):
    crossed = options(epochs=1, folds=3)
    annotator = fit(data, tmp_path / "maps", crossed)
    folds, _ = make_folds(data, 3, crossed.fit.seed)
    annotator.to(torch.device("cpu"))
    images, indices = torch.randn(12, 3, 32, 32), np.arange(12)[::-1].copy()
    with torch.inference_mode():
        made = annotator.score(images, indices)
        for place, index in enumerate(indices.tolist()):
            (own,) = [fold.number for fold in folds if index in fold.held_out]
            wanted = annotator.models[own](images[place : place + 1])[0]
            torch.testing.assert_close(made[place], wanted, rtol=1e-3, atol=1e-4)
            other = annotator.models[(own + 1) % 3](images[place : place + 1])[0]
            assert not torch.allclose(made[place], other, rtol=1e-3, atol=1e-4)


def test_unreadable_images_do_not_stop_training(photos, tmp_path):
    (photos / "red/0.red.png").write_bytes(b"broken")
    data = open_dataset(photos)
    fill_store(data, tmp_path / "maps", fit(data, tmp_path / "maps"), WORKERS)
    assert list(Maps(tmp_path / "maps").skipped) == ["red/0.red.png"]


def test_any_timm_model_can_be_fitted_at_its_own_size(data, tmp_path):
    chosen = options(epochs=1, fit_model="test_resnet", fit_size=(64, 64), img_size=(96, 96))
    annotator = fit(data, tmp_path / "maps", chosen)
    assert annotator.preprocessing.size == (96, 96)
    assert type(annotator.models[0].model.backbone).__name__ == "ResNet"
    with pytest.raises(EverytokenError, match="no token view"):
        fit(data, tmp_path / "other", options(fit_model="test_mambaout", fit_size=(64, 64)))
    with pytest.raises(EverytokenError, match="test_resnet"):
        fit(data, tmp_path / "other", options(fit_model="test_resnot", fit_size=(64, 64)))


def test_a_network_of_another_version_is_refused_in_words(data, tmp_path):
    fit(data, tmp_path / "maps", options(epochs=1))
    file = tmp_path / "maps/annotator/fold-0.safetensors"
    save_file({name.replace("layer1", "stage1"): value for name, value in load_file(file).items()}, file)
    with pytest.raises(EverytokenError, match="another version"):
        fit(data, tmp_path / "maps", options(epochs=1))
    with pytest.raises(EverytokenError, match="another version"):
        kept_network(tmp_path / "maps")


def test_a_killed_training_continues_and_ends_with_the_same_network(data, tmp_path, monkeypatch):
    whole = fit(data, tmp_path / "whole")
    real = fit_module.FitTask.train_batches

    def cut(self, epoch, start):
        for batch in real(self, epoch, start):
            if epoch == 1:
                raise InterruptedError
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(fit_module.FitTask, "train_batches", cut)
        with pytest.raises(InterruptedError):
            fit(data, tmp_path / "cut")
    assert list((tmp_path / "cut/annotator/fold-0/checkpoints").iterdir())
    again = fit(data, tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(state(whole).values(), state(again).values(), strict=True))
    assert sorted(p.name for p in (tmp_path / "cut/annotator").iterdir()) == ["fold-0.json", "fold-0.safetensors"]


def test_networks_of_the_first_version_are_used_again(data, tmp_path):
    """They do not say what they held out, and the store's manifest must not say it either."""
    fit(data, tmp_path / "maps")
    note = tmp_path / "maps/annotator/fold-0.json"
    content = json.loads(note.read_text())
    del content["plan"]["held_out"]
    note.write_text(json.dumps(content))
    assert "held_out" not in fit(data, tmp_path / "maps").settings["fit"]

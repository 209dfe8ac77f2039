"""Annotators that are trained on the data set: folds, reproducibility, networks that are not trained twice."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from everytoken.annotators import AnnotatorError, FitOptions, JobOptions, Team, annotate, fit_annotator
from everytoken.annotators import training as training_module
from everytoken.annotators.fit_model import kept_network
from everytoken.annotators.folds import make_folds
from everytoken.annotators.small_cnn import small_cnn
from everytoken.data.datasets import open_dataset
from everytoken.errors import EverytokenError
from everytoken.maps import Maps
from everytoken.models import TokenModel

QUICK = FitOptions(size=(32, 32), epochs=3, batch_size=8, workers=0)


def fit(data, out, options=QUICK, size=None, team=None, said=None):
    say = (lambda text: None) if said is None else said.append
    return fit_annotator(
        data, out, options, size, "squash", team or Team(), say, lambda what: nullcontext(lambda done, total: None)
    )


def state(annotator, number=0):
    return annotator.models[number].state_dict()


def test_folds_hold_every_image_out_once_and_share_every_class(data):
    folds, part = make_folds(data, 3, seed=1)
    assert sorted(np.concatenate([fold.held_out for fold in folds]).tolist()) == list(range(len(data)))
    for fold in folds:
        assert sorted([*fold.train.tolist(), *fold.held_out.tolist()]) == list(range(len(data)))
        assert set(data.labels[fold.held_out].tolist()) == {0, 1, 2}
        assert (part[fold.held_out] == fold.number).all()
    again, _ = make_folds(data, 3, seed=2)
    assert any(set(a.held_out.tolist()) != set(b.held_out.tolist()) for a, b in zip(folds, again, strict=True))


def test_one_network_holds_out_a_tenth_and_annotates_all(photos_of):
    data = open_dataset(photos_of(per_class=20))
    folds, part = make_folds(data, 1, seed=1)
    assert len(folds) == 1
    assert len(folds[0].held_out) == 6
    assert part.tolist() == [0] * 60


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


def test_fit_learns_colours_and_labels_every_cell_with_them(photos_of, tmp_path):
    data = open_dataset(photos_of(per_class=16))
    said: list[str] = []
    annotator = fit(data, tmp_path / "maps", FitOptions(size=(32, 32), epochs=8, batch_size=8, workers=0), said=said)
    assert annotator.settings["held_out_accuracy"] == 1.0
    assert any("held-out accuracy 100.0% (4 images)" in text for text in said)
    annotate(data, tmp_path / "maps", annotator, JobOptions(workers=0))
    store = Maps(tmp_path / "maps")
    assert store.manifest.class_names == data.class_names
    for i in range(len(data)):
        assert (store[data.key(i)].classes[..., 0] == data.label(i)).mean() > 0.8


def test_the_same_seed_gives_the_same_network_and_another_does_not(data, tmp_path):
    one, two = fit(data, tmp_path / "one"), fit(data, tmp_path / "two")
    assert all(torch.equal(a, b) for a, b in zip(state(one).values(), state(two).values(), strict=True))
    assert one.describe() == two.describe()
    other = fit(data, tmp_path / "other", FitOptions(size=(32, 32), epochs=3, batch_size=8, workers=0, seed=1))
    assert not torch.equal(state(one)["model.backbone.fc.weight"], state(other)["model.backbone.fc.weight"])


def test_training_leaves_the_global_random_numbers_alone(data, tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fit(data, tmp_path / "maps")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_finished_network_is_not_trained_again_and_a_missing_one_is(data, tmp_path, monkeypatch):
    crossed = FitOptions(size=(32, 32), epochs=1, batch_size=8, workers=0, folds=2)
    first = fit(data, tmp_path / "maps", crossed)
    trained: list[int] = []
    real = training_module.Trainer.train

    def train(self, fold, *rest):
        trained.append(fold.number)
        return real(self, fold, *rest)

    monkeypatch.setattr(training_module.Trainer, "train", train)
    fit(data, tmp_path / "maps", crossed)
    assert trained == []
    (tmp_path / "maps/annotator/fold-1.json").unlink()  # killed before the note was written
    again = fit(data, tmp_path / "maps", crossed)
    assert trained == [1]
    for number in (0, 1):
        for a, b in zip(state(first, number).values(), state(again, number).values(), strict=True):
            assert torch.equal(a, b)


def test_processes_share_the_folds(data, tmp_path):
    crossed = FitOptions(size=(32, 32), epochs=1, batch_size=8, workers=0, folds=2)

    def wait():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(data, tmp_path / "maps", crossed, team=Team(1, 2, meet=wait))
    assert (tmp_path / "maps/annotator/fold-1.json").exists()
    assert not (tmp_path / "maps/annotator/fold-0.json").exists()
    assert len(fit(data, tmp_path / "maps", crossed, team=Team(0, 2)).models) == 2


def test_a_network_that_was_trained_otherwise_is_not_used(data, tmp_path):
    fit(data, tmp_path / "maps")
    with pytest.raises(AnnotatorError, match=r"other settings \(epochs changed\)"):
        fit(data, tmp_path / "maps", FitOptions(size=(32, 32), epochs=4, batch_size=8, workers=0))
    fewer = data.subset(range(len(data) - 1))
    with pytest.raises(AnnotatorError, match="the images or their classes changed"):
        fit(fewer, tmp_path / "maps")


def test_each_image_is_annotated_by_the_network_that_did_not_see_it(data, tmp_path):
    crossed = FitOptions(size=(32, 32), epochs=1, batch_size=8, workers=0, folds=3)
    annotator = fit(data, tmp_path / "maps", crossed)
    folds, _ = make_folds(data, 3, crossed.seed)
    annotator.to(torch.device("cpu"))
    images, indices = torch.randn(12, 3, 32, 32), np.arange(12)[::-1].copy()
    with torch.inference_mode():
        made = annotator.score(images, indices)
        for place, index in enumerate(indices.tolist()):
            (own,) = [fold.number for fold in folds if index not in fold.train]
            wanted = annotator.models[own](images[place : place + 1])[0]
            torch.testing.assert_close(made[place], wanted, rtol=1e-3, atol=1e-4)
            other = annotator.models[(own + 1) % 3](images[place : place + 1])[0]
            assert not torch.allclose(made[place], other, rtol=1e-3, atol=1e-4)


def test_unreadable_images_do_not_stop_training(photos, tmp_path):
    (photos / "red/0.red.png").write_bytes(b"broken")
    data = open_dataset(photos)
    annotate(data, tmp_path / "maps", fit(data, tmp_path / "maps"), JobOptions(workers=0))
    assert list(Maps(tmp_path / "maps").skipped) == ["red/0.red.png"]


def test_any_timm_model_can_be_fitted_at_its_own_size(data, tmp_path):
    options = FitOptions(model="test_resnet", size=(64, 64), epochs=1, batch_size=8, workers=0)
    annotator = fit(data, tmp_path / "maps", options, size=(96, 96))
    assert annotator.preprocessing.size == (96, 96)
    assert type(annotator.models[0].model.backbone).__name__ == "ResNet"
    with pytest.raises(EverytokenError, match="no token view"):
        fit(data, tmp_path / "other", FitOptions(model="test_mambaout", size=(64, 64)))
    with pytest.raises(EverytokenError, match="test_resnet"):
        fit(data, tmp_path / "other", FitOptions(model="test_resnot", size=(64, 64)))


def test_a_network_of_another_version_is_refused_in_words(data, tmp_path):
    fit(data, tmp_path / "maps", FitOptions(size=(32, 32), epochs=1, batch_size=8, workers=0))
    file = tmp_path / "maps/annotator/fold-0.safetensors"
    save_file({name.replace("layer1", "stage1"): value for name, value in load_file(file).items()}, file)
    with pytest.raises(EverytokenError, match="another version"):
        fit(data, tmp_path / "maps", FitOptions(size=(32, 32), epochs=1, batch_size=8, workers=0))
    with pytest.raises(EverytokenError, match="another version"):
        kept_network(tmp_path / "maps")

"""batch.jpg shows the images that the network gets, with the labels that their tokens learn, and disturbs nothing."""

import json
import logging

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from everytoken.data.batch import Batch
from everytoken.functional import CompactTarget, from_labels
from everytoken.keyed import StepKey
from everytoken.mixing.methods import Compose, CutMix, MixToken, MixUp
from everytoken.mixing.mix import apply_to_pixels
from everytoken.objectives.hard import HardLabels
from everytoken.objectives.token_labeling import TokenLabeling
from everytoken_lab import draw
from everytoken_lab.training.classify import Classification, _as_pixels, _token_target, batch_picture, train

NAMES = ["cat", "dog", "owl", "fox"]
QUICK = {"model": "vit_nano_patch4_32", "img_size": 32, "batch_size": 8, "workers": 0, "device": "cpu"}
QUICK |= {"warmup_epochs": 0, "aa": "", "epochs": 1, "threads": 1}


@pytest.fixture(autouse=True)
def no_pictures():
    """These runs do leave something to look at."""


def mixed(mixer, size=32, grid=(4, 4)):
    """Four images, each of one grey level, mixed; token targets say the image's own class everywhere."""
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, size, size).contiguous()
    batch = Batch(images, torch.arange(4), keys=tuple("abcd"), key=StepKey(3, 3))
    mix = mixer.draw(4, (size, size), grid, batch.key.generator("mix"))
    classes, h, w = from_labels(batch.labels, 4), *grid
    mass, background = classes.mass[:, None, None], classes.background[:, None, None]
    ones = torch.ones(4, h, w)
    everywhere = CompactTarget(classes.classes, mass.repeat(1, h, w, 1), background.repeat(1, h, w), ones, 4)
    pixels = apply_to_pixels(images, mix) if mix.level == "pixels" else images
    return Batch(pixels, batch.labels, keys=batch.keys, key=batch.key, mix=mix, token_target=everywhere)


@pytest.mark.parametrize("mixer", [CutMix(prob=1.0), MixToken(prob=1.0), Compose(MixUp(prob=1.0), MixToken(prob=1.0))])
@pytest.mark.parametrize("objective", [TokenLabeling(), HardLabels()])
def test_the_label_of_a_place_is_that_of_the_image_which_is_shown_there(mixer, objective):
    batch = mixed(mixer)
    target, from_maps = _token_target(batch, [objective], (4, 4), 4)
    assert from_maps == isinstance(objective, TokenLabeling)
    dense = target.dense()
    images = batch.images
    if batch.mix.of_tokens is not None:
        images = apply_to_pixels(images, _as_pixels(batch.mix.of_tokens, (32, 32)))
    shown = (
        images[:, 0].view(4, 4, 8, 4, 8).mean((2, 4))
    )  # each cell's mean grey level: the mean class of what it shows
    assert torch.allclose((dense * torch.arange(4.0)).sum(-1), shown, atol=1e-4)
    assert (shown != torch.arange(4.0).view(4, 1, 1)).any()  # something was mixed


def test_the_colours_of_the_picture_are_those_of_the_classes():
    batch = mixed(CutMix(prob=1.0))
    picture = batch_picture(batch, [HardLabels()], (4, 4), NAMES)
    pixels = np.asarray(picture).reshape(-1, 3)
    for number in range(4):  # in the legends
        assert (pixels == draw.rgb(draw.colour_of(number))).all(-1).any()


def test_a_class_has_one_colour_on_all_pictures_and_many_classes_have_different_ones():
    few, many = draw.ClassColours(NAMES), draw.ClassColours([*NAMES, *(f"class {i}" for i in range(200))])
    assert few.choose(["owl", "cat"]) == {"owl": many["owl"], "cat": many["cat"]}
    assert many.choose(["class 100", "owl"])["owl"] == few["owl"]
    assert len({draw.colour_of(i) for i in range(100)}) == 100
    assert draw.OTHER not in {draw.colour_of(i) for i in range(200)}


@pytest.fixture(scope="module")
def drawn(photos, tmp_path_factory):
    """A run that draws, and the same run that does not, of mixed images and a network with dropout."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {**QUICK, "drop": 0.2, "mixing": {"cutmix": {}}, "objectives": {"tl_align": {}, "drloc": {}}}
    first = train(photos, out=str(folder / "drawn"), **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classification, "show", lambda self, batch: None)
        patch.setattr(Classification, "is_reported", False)
        second = train(photos, out=str(folder / "not"), **settings)
    return first, second


def test_every_training_leaves_a_picture_a_page_and_a_folder_that_timm_opens(drawn, photos):
    run, _ = drawn
    assert Image.open(run.path / "batch.jpg").size[0] > 500
    page = (run.path / "report.html").read_text()
    assert "interval" in page
    assert "drloc" in page
    config = json.loads((run.path / "config.json").read_text())
    model = timm.create_model(f"local-dir:{run.path}", pretrained=True).eval()
    assert model.pretrained_cfg["input_size"] == (3, 32, 32)
    assert config["label_names"] == list(run.load().class_names)
    image = next((photos / "val").rglob("*.*"))
    data = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    with torch.no_grad():
        logits = model(data(Image.open(image).convert("RGB"))[None])[0]
    (ours,) = run.load().predict([image])
    assert config["label_names"][int(logits.argmax())] == ours.classes[0]


def test_drawing_changes_nothing_that_is_learnt(drawn):
    first, second = drawn
    assert not (second.path / "batch.jpg").exists()
    assert (first.path / "best.safetensors").read_bytes() == (second.path / "best.safetensors").read_bytes()
    strip = [{k: v for k, v in row.items() if k != "seconds"} for row in first.history]
    assert strip == [{k: v for k, v in row.items() if k != "seconds"} for row in second.history]


def test_a_failure_of_the_pictures_is_a_line_in_the_log(photos, tmp_path, monkeypatch, caplog):
    def broken(*args, **more):
        raise ZeroDivisionError("no colours left")

    monkeypatch.setattr("everytoken_lab.training.classify.batch_picture", broken)
    monkeypatch.setattr("everytoken_lab.reports.collect.report", broken)
    with caplog.at_level(logging.INFO):
        run = train(photos, out=str(tmp_path / "run"), **QUICK)
    assert run.state == "finished"
    assert caplog.text.count("no colours left") == 2
    assert "batch.jpg failed: ZeroDivisionError" in (run.path / "log.txt").read_text()

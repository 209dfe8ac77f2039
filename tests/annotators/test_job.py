"""The job: what lands in the store is what the annotator says about each image, whatever happens on the way."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from everytoken.errors import EverytokenError
from everytoken.maps import Maps, map_area, verify
from everytoken_lab.annotators import AnnotateOptions, AnnotatorError
from everytoken_lab.annotators.annotator import Annotator, build_annotator
from everytoken_lab.annotators.job import fill_store, summarise
from everytoken_lab.classes import ClassList
from everytoken_lab.data.augment import EvalTransform
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.engine.distributed import World
from everytoken_lab.models import open as opening
from everytoken_lab.models.description import weights_hash

QUICK = AnnotateOptions(batch_size=3, workers=0, shard_size=5, class_map="order")


CPU = torch.device("cpu")


class OneOf(World):
    """One of several processes that run one after the other: a barrier has nothing to wait for."""

    def barrier(self):
        pass


def function(score, names=("blue", "green", "red"), size=(32, 32)) -> Annotator:
    transform = EvalTransform(size, mean=(0.0,) * 3, std=(1.0,) * 3)
    return Annotator("test", transform, ClassList(len(names), names), {}, score)


def blocks(images: torch.Tensor) -> torch.Tensor:
    """The mean colour of each 8x8 block, as scores of three classes."""
    return torch.nn.functional.avg_pool2d(images, 8).permute(0, 2, 3, 1) * 10


def test_a_map_is_what_the_network_says_about_each_cell(data, network, tmp_path, network_input):
    fill_store(data, tmp_path / "maps", network, QUICK)
    store = Maps(tmp_path / "maps")
    squash = replace(network.preprocessing, crop_pct=1.0, crop_mode="squash")
    assert len(store) == len(data) == 12
    assert store.meta.class_names == ["blue", "green", "red"]
    for i in range(len(data)):
        with torch.inference_mode():
            logits = network.score(network_input(squash, data.picture(i)), np.array([i]))[0]
        found = store[data.key(i)]
        assert found.size == (48, 36)
        assert found.area == (0.0, 0.0, 1.0, 1.0)
        best = logits.topk(3, dim=-1)
        np.testing.assert_allclose(found.scores, best.values.numpy(), rtol=2e-3, atol=2e-3)
        np.testing.assert_array_equal(found.classes, best.indices.numpy())


def quadrants(path: Path, size: tuple[int, int], **save) -> None:
    """Red top left, green top right, blue bottom left, black bottom right."""
    width, height = size
    pixels = np.zeros((height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2, 0] = 255
    pixels[: height // 2, width // 2 :, 1] = 255
    pixels[height // 2 :, : width // 2, 2] = 255
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **save)


@pytest.mark.parametrize(
    ("resize", "area", "cells"),
    [
        ("letterbox", (0.0, -0.5, 1.0, 1.5), {(1, 0): 0, (1, 3): 1, (2, 0): 2}),  # the middle two of four rows show it
        ("squash", (0.0, 0.0, 1.0, 1.0), {(0, 0): 0, (0, 3): 1, (3, 0): 2}),
        ("center", (0.25, 0.0, 0.75, 1.0), {(0, 0): 0, (0, 3): 1}),
    ],
)
def test_a_map_says_what_it_covers(tmp_path, resize, area, cells):
    quadrants(tmp_path / "photos/red/wide.png", (128, 64))
    annotator = function(blocks, ("red", "green", "blue"))
    data = open_dataset(tmp_path / "photos", class_list=annotator.classes.names)
    fill_store(data, tmp_path / "maps", annotator, AnnotateOptions(workers=0, resize=resize))
    store = Maps(tmp_path / "maps")
    found = store["red/wide.png"]
    assert found.area == pytest.approx(area)
    assert found.area == pytest.approx(map_area(resize, (128, 64)))
    assert {place: found.classes[(*place, 0)] for place in cells} == cells
    assert store.meta.resize_mode == resize


def test_a_photo_that_lies_on_its_side_is_set_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: the stored image must be turned clockwise
    quadrants(tmp_path / "photos/red/phone.jpg", (64, 32), exif=exif, quality=95)
    annotator = function(blocks, ("red", "green", "blue"))
    data = open_dataset(tmp_path / "photos", class_list=annotator.classes.names)
    fill_store(data, tmp_path / "maps", annotator, QUICK)
    found = Maps(tmp_path / "maps")["red/phone.jpg"]
    assert found.size == (32, 64)
    corners = found.classes[[0, 0, 3], [0, 3, 3], 0].tolist()
    assert corners == [2, 0, 1]  # top left blue, top right red, bottom right green


def test_an_unreadable_image_is_named_and_does_not_touch_its_neighbours(photos, network, tmp_path):
    fill_store(open_dataset(photos), tmp_path / "good", network, QUICK)
    (photos / "green/1.green.png").write_bytes(b"no image")
    (photos / "red/2.red.png").write_bytes((photos / "red/2.red.png").read_bytes()[:200])
    fill_store(open_dataset(photos), tmp_path / "maps", network, QUICK)
    good, store = Maps(tmp_path / "good"), Maps(tmp_path / "maps")
    assert set(store.skipped) == {"green/1.green.png", "red/2.red.png"}
    assert str(photos) not in str(store.skipped.values())
    assert all(store[key] == good[key] for key in store)


def test_a_mended_image_is_tried_again_on_request(photos, network, tmp_path, content):
    path = photos / "green/1.green.png"
    whole = path.read_bytes()
    fill_store(open_dataset(photos), tmp_path / "good", network, QUICK)
    path.write_bytes(b"no image")
    fill_store(open_dataset(photos), tmp_path / "maps", network, QUICK)
    path.write_bytes(whole)
    assert fill_store(open_dataset(photos), tmp_path / "maps", network, QUICK).done == 0
    again = AnnotateOptions(batch_size=3, workers=0, shard_size=5, class_map="order", retry_skipped=True)
    assert fill_store(open_dataset(photos), tmp_path / "maps", network, again).done == 5  # one shard
    assert content(tmp_path / "maps") == content(tmp_path / "good")


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "nan"), (float("inf"), "inf"), (7e4, "70000")])
def test_scores_that_cannot_be_stored_stop_the_job_and_name_the_image(photos, tmp_path, value, said):
    image = np.array(Image.open(photos / "green/2.green.png"))
    Image.fromarray(np.full_like(image, 255)).save(photos / "green/2.green.png")

    def score(images):
        made = blocks(images)
        made[images.mean((1, 2, 3)) == 1, 1, 1, 2] = value
        return made

    with pytest.raises(AnnotatorError, match=rf"'green/2\.green\.png'.*{said}"):
        fill_store(open_dataset(photos), tmp_path / "maps", function(score), QUICK)


@pytest.mark.parametrize(("classes", "kept"), [(3, 3), (20, 20), (21, 5)])
def test_all_of_a_few_classes_are_kept_and_five_of_many(photos, tmp_path, classes, kept):
    names = tuple(f"c{i}" for i in range(classes))
    many = function(lambda images: blocks(images)[..., :1] * torch.linspace(-1, 1, classes), names)
    fill_store(open_dataset(photos), tmp_path / "maps", many, AnnotateOptions(workers=0, foreign_classes=True))
    assert Maps(tmp_path / "maps").meta.top_k == kept


def test_scores_of_mapped_classes_land_on_the_data_sets_numbers(data, tmp_path):
    (tmp_path / "map.csv").write_text("blue,sky\ngreen,\nred,2\n")
    annotator = function(blocks, ("sun", "grass", "sky"))  # the channels, in the order of the image: red, green, blue
    options = AnnotateOptions(workers=0, class_map=str(tmp_path / "map.csv"))
    with pytest.raises(EverytokenError, match="2 classes that get scores"):
        fill_store(data, tmp_path / "maps", annotator, AnnotateOptions(workers=0, class_map=options.class_map, top_k=3))
    (tmp_path / "map.csv").write_text("blue,sky\ngreen,\nred,sun\n")
    outcome = fill_store(data, tmp_path / "maps", annotator, options)
    store = Maps(tmp_path / "maps")
    assert (store["blue/0.blue.png"].classes[..., 0] == 0).mean() > 0.9
    assert (store["red/0.red.png"].classes[..., 0] == 2).mean() > 0.9
    assert not any((store[key].classes == 1).any() for key in store)
    assert any("no scores" in note for note in outcome.notes)


def _interrupt(data, annotator, out, after: int) -> None:
    def stop(done: int, total: int) -> None:
        if done > after:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fill_store(data, out, annotator, QUICK, progress=stop)


def test_an_image_is_always_in_the_same_batch(data, tmp_path, content):
    annotator = function(lambda images: blocks(images) + images.mean() * 100)  # an answer that depends on the batch
    fill_store(data, tmp_path / "calm", annotator, QUICK)
    for after in (1, 6):
        _interrupt(data, annotator, tmp_path / "maps", after)
    assert 0 < fill_store(data, tmp_path / "maps", annotator, QUICK).done < len(data)
    assert content(tmp_path / "maps") == content(tmp_path / "calm")
    for rank in (1, 0):
        fill_store(data, tmp_path / "two", annotator, QUICK, OneOf(rank, 2, CPU))
    assert content(tmp_path / "two") == content(tmp_path / "calm")


def test_decoding_in_other_processes_changes_nothing(data, network, tmp_path, content):
    fill_store(data, tmp_path / "alone", network, QUICK)
    together = AnnotateOptions(batch_size=3, workers=2, shard_size=5, class_map="order")
    fill_store(data, tmp_path / "together", network, together)
    assert content(tmp_path / "together") == content(tmp_path / "alone")


def test_mixed_precision_gives_nearly_the_same_maps_and_is_written_down(data, network, tmp_path):
    fill_store(data, tmp_path / "full", network, QUICK)
    mixed = AnnotateOptions(batch_size=3, workers=0, shard_size=5, class_map="order", amp=True, amp_dtype="bfloat16")
    fill_store(data, tmp_path / "mixed", network, mixed)
    full, half = Maps(tmp_path / "full"), Maps(tmp_path / "mixed")
    assert half.meta.annotator["amp"] == "bfloat16"
    key = data.key(0)
    assert not np.array_equal(full[key].scores, half[key].scores)
    np.testing.assert_allclose(full[key].scores, half[key].scores, rtol=0.1, atol=0.1 * np.abs(full[key].scores).max())


def test_a_store_is_not_continued_by_other_weights(data, weights, tmp_path):
    first = build_annotator("timm:test_resnet", (64, 64), str(weights("test_resnet")))
    _interrupt(data, first, tmp_path / "maps", after=6)
    other = build_annotator("timm:test_efficientnet", (64, 64), str(weights("test_efficientnet")))
    with pytest.raises(EverytokenError, match="annotator: timm:test_resnet in the store, timm:test_efficientnet now"):
        fill_store(data, tmp_path / "maps", other, QUICK)
    retrained = build_annotator("timm:test_resnet", (64, 64), str(weights("test_resnet")))
    with torch.no_grad():
        next(iter(retrained.network.parameters())).add_(0.1)
    retrained.settings["weights_sha256"] = weights_hash(retrained.network)
    with pytest.raises(EverytokenError, match=r"weights_sha256: .* in the store"):
        fill_store(data, tmp_path / "maps", retrained, QUICK)


def test_kills_at_any_moment_end_in_the_same_store(photos_of, tmp_path, content):
    photos = photos_of(per_class=16)
    script = Path(__file__).with_name("kill_job.py")
    words = [str(script), str(photos), str(tmp_path / "killed"), str(tmp_path / "calm"), "6", "1"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1
    assert content(tmp_path / "killed") == content(tmp_path / "calm")
    assert verify(tmp_path / "killed").ok


def test_the_summary_counts_agreement_by_image_and_by_cell(photos, tmp_path):
    wrong = photos / "red/0.red.png"
    wrong.write_bytes((photos / "blue/0.blue.png").read_bytes())
    (photos / "red/1.red.png").write_bytes(b"broken")
    data = open_dataset(photos)
    annotator = function(lambda images: blocks(images).flip(-1))  # channels red, green, blue -> blue, green, red
    outcome = fill_store(data, tmp_path / "maps", annotator, QUICK)
    made = summarise(tmp_path / "maps", data, outcome.plan.label_to_class)
    assert (made.looked_at, list(Maps(tmp_path / "maps").skipped)) == (11, ["red/1.red.png"])
    assert made.images_agree == pytest.approx(10 / 11)
    assert 0.8 < made.cells_agree <= 10 / 11
    assert made.vocabulary == 3
    foreign = summarise(tmp_path / "maps", data, (-1, -1, -1))
    assert foreign.images_agree is None


def test_an_annotator_tells_the_tag_of_its_weights(monkeypatch):
    network = timm.create_model("test_resnet", num_classes=3)
    monkeypatch.setattr(opening, "create_pretrained", lambda name, arguments: (network, {}))
    tagged = build_annotator("timm:test_resnet", (64, 64))
    assert tagged.name == "timm:test_resnet.r160_in1k"
    assert tagged.settings["model"] == "test_resnet.r160_in1k"

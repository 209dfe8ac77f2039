"""What tokens say, annotator_map what an annotator says, in one geometry and one set of classes."""

import numpy as np
import pytest
import timm
import torch

from everytoken.maps import Maps, MapWriter, ScoreMap, StoreMeta
from everytoken.models import TokenModel
from everytoken_lab.classes import ClassList
from everytoken_lab.explanation.tokens import (
    FOREIGN,
    compare_with_map,
    find_key,
    relative,
    summarize_cells,
    token_probabilities,
    translation,
)

from .conftest import tiny_vit


def write_store(path, top, names, area=(0.0, 0.0, 1.0, 1.0), key="train/cat/one.png"):
    """A store of one map, whose cells are sure of the classes `top` [h, w]."""
    top = np.asarray(top)
    classes = np.stack((top, (top + 1) % len(names)), axis=-1).astype(np.uint16)
    scores = np.broadcast_to(np.array([9.0, 1.0], np.float16), classes.shape).copy()
    meta = StoreMeta(top.shape, 2, list(names), num_classes=len(names), annotator={"name": "test"})
    with MapWriter(path, [key], meta) as writer:
        writer.write({key: ScoreMap(scores, classes, (40, 36), area)})
        writer.finalize()
    return Maps(path)


def sure_of(top, classes=3):
    return summarize_cells(torch.nn.functional.one_hot(torch.tensor(top), classes) * 0.9 + 0.1 / classes)


def test_a_model_with_a_token_head_is_asked_there_and_another_by_its_classifier():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    headed, plain = TokenModel(tiny_vit(), 5).eval(), TokenModel(tiny_vit()).eval()
    said, from_head = token_probabilities(headed, x)
    assert from_head
    assert said.shape == (2, 8, 8, 5)
    with torch.no_grad():
        torch.testing.assert_close(said, headed(x).token_logits.softmax(-1))
        said, from_head = token_probabilities(plain, x)
        assert not from_head
        torch.testing.assert_close(said, plain.cell_logits(x).softmax(-1))


def test_the_summary_of_cells_counts_classes_and_confidence():
    summary = sure_of([[0, 0], [0, 2]])
    assert summary.shares == [(0, 0.75), (2, 0.25)]
    assert summary.image_class == 0
    np.testing.assert_allclose(summary.confidence, 0.9 + 0.1 / 3, rtol=1e-6)


def test_agreement_is_counted_where_the_map_lies_in_the_view(tmp_path):
    # the map covers the whole image: 4 columns 0 1 2 0; the view shows the right half of it: 2 0
    store = write_store(tmp_path / "maps", [[0, 1, 2, 0]] * 4, ["cat", "dog", "cow"])
    table = translation(store, ClassList(3, ("cat", "dog", "cow")))
    tokens = sure_of([[2, 2, 0, 1], [2, 0, 0, 0]])  # each map column is two tokens wide
    annotator_map = compare_with_map(store, "train/cat/one.png", tokens, (0.5, 0.0, 1.0, 1.0), table)
    np.testing.assert_array_equal(annotator_map.same, [[1, 1, 1, 0], [1, 0, 1, 1]])
    assert annotator_map.agreement == 6 / 8
    assert annotator_map.area == (-1.0, 0.0, 1.0, 1.0)
    assert sorted(annotator_map.summary.shares) == [(0, 0.5), (2, 0.5)]  # only what the view shows


def test_tokens_outside_of_the_map_do_not_count(tmp_path):
    store = write_store(tmp_path / "maps", [[1]], ["cat", "dog"], area=(0.0, 0.0, 0.5, 1.0))
    annotator_map = compare_with_map(
        store, "train/cat/one.png", sure_of([[1, 0]], 2), (0.0, 0.0, 1.0, 1.0), np.arange(2)
    )
    np.testing.assert_array_equal(annotator_map.inside, [[True, False]])
    assert annotator_map.agreement == 1.0


def test_classes_are_matched_by_name_and_unknown_ones_are_foreign(tmp_path):
    store = write_store(tmp_path / "maps", [[0, 1]], ["dog", "unicorn"])
    table = translation(store, ClassList(2, ("cat", "dog")))
    assert table.tolist() == [1, -1]
    annotator_map = compare_with_map(store, "train/cat/one.png", sure_of([[1, 1]], 2), (0.0, 0.0, 1.0, 1.0), table)
    np.testing.assert_array_equal(annotator_map.summary.top, [[1, FOREIGN + 1]])
    assert annotator_map.names == {FOREIGN + 1: "unicorn"}
    assert annotator_map.agreement == 0.5


def test_without_a_common_class_there_is_no_agreement_to_tell(tmp_path):
    store = write_store(tmp_path / "maps", [[0, 1]], ["a", "b"])
    table = translation(store, ClassList(2, ("cat", "dog")))
    annotator_map = compare_with_map(store, "train/cat/one.png", sure_of([[1, 1]], 2), (0.0, 0.0, 1.0, 1.0), table)
    assert annotator_map.agreement is None


@pytest.mark.parametrize(("path", "found"), [
    ("/data/photos/train/cat/one.png", "train/cat/one.png"),
    ("train/cat/one.png", "train/cat/one.png"),
    ("/data/photos/val/cat/one.png", None),
])  # fmt: skip
def test_an_image_file_is_found_in_a_store_by_the_end_of_its_path(tmp_path, path, found):
    store = write_store(tmp_path / "maps", [[0, 1]], ["a", "b"])
    assert find_key(store, path) == found


def test_an_area_of_the_image_is_expressed_in_the_view():
    assert relative((0.0, 0.0, 1.0, 1.0), (0.25, 0.0, 0.75, 1.0)) == (-0.5, 0.0, 1.5, 1.0)


def test_lvvit_brings_its_token_head():
    model = TokenModel(timm.create_model("lvvit_t", img_size=64, depth=1, num_classes=4), 4).eval()
    assert token_probabilities(model, torch.randn(1, 3, 64, 64))[1]

import numpy as np
import pytest

from everytoken.errors import EverytokenError
from everytoken.functional import collate_maps, spread, vocabulary
from tests.functional import make


def test_a_vocabulary_lists_each_class_once_and_gives_the_classes_back():
    classes = np.random.default_rng(0).integers(0, 50, size=(7, 5, 3)).astype(np.uint16)
    words, local = vocabulary(classes, 50)
    assert (words == np.unique(classes)).all()
    assert local.dtype == np.uint8
    assert (words[local] == classes).all()


def test_a_vocabulary_above_256_classes_needs_two_bytes():
    classes = np.arange(300).reshape(10, 30, 1)
    words, local = vocabulary(classes)
    assert local.dtype == np.int16
    assert (words[local] == classes).all()


def test_classes_above_2048_are_exact():
    classes = np.array([[[2049, 21840]]], dtype=np.uint32)
    assert vocabulary(classes, 21841)[0].tolist() == [2049, 21840]


def test_a_class_beyond_the_annotators_is_refused_by_number():
    with pytest.raises(EverytokenError, match=r"names class 1000, but there are only 1000 classes"):
        vocabulary(np.array([[[1000]]]), 1000)
    with pytest.raises(EverytokenError, match=r"names class -1, but"):
        vocabulary(np.array([[[0, -1]]]), 1000)


def test_collating_fills_short_vocabularies_and_keeps_every_score():
    rng = np.random.default_rng(1)
    records = [make.record(rng, words=4), make.record(rng, words=11)]
    maps = collate_maps(records, 20)
    assert maps.classes.shape == (2, 16)
    assert (maps.classes[0] >= 0).sum() == 4
    assert len(maps) == 2
    assert maps.size == (6, 5)
    dense = spread(maps)
    for i, record in enumerate(records):
        for cell in np.ndindex(6, 5):
            expected = dict(zip(record.classes[cell].tolist(), record.scores[cell].tolist(), strict=True))
            found = {c: s for c, s in zip(maps.classes[i].tolist(), dense[(i, *cell)].tolist(), strict=True) if s != 0}
            assert found == pytest.approx(expected)


def test_maps_of_two_shapes_are_refused():
    rng = np.random.default_rng(2)
    with pytest.raises(EverytokenError, match="different shapes"):
        collate_maps([make.record(rng, h=4), make.record(rng, h=5)], 20)


def test_a_batch_without_any_map_is_a_batch_without_labels():
    maps = collate_maps([None, None], 10)
    assert (maps.classes == -1).all()
    assert len(maps) == 2

"""Whose classes a store has, and how an annotator's scores get there."""

from __future__ import annotations

import json

import pytest
import torch
import yaml

from everytoken.classes import ClassError, ClassList, imagenet_classes, plan_classes, read_class_map

ANIMALS = ClassList(4, ("cat", "dog", "eel", "fox"))


def plan(names, known=ANIMALS, **more):
    return plan_classes("timm:x", known, "photos", names, **more)


def test_equal_names_in_equal_order_need_nothing():
    made = plan(["cat", "dog", "eel", "fox"])
    assert (made.how, made.groups, made.count) == ("same", None, 4)
    logits = torch.randn(2, 3, 3, 4)
    assert made.apply(logits) is logits


def test_another_order_is_put_right_by_name():
    made = plan(["dog", "cat", "fox", "eel"])
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert made.how == "by name"
    assert made.apply(logits).tolist() == [2.0, 1.0, 4.0, 3.0]
    assert made.names == ("dog", "cat", "fox", "eel")


def test_a_data_set_may_have_some_of_the_annotators_classes():
    made = plan(["Fox", "cat"])
    assert made.count == 2
    assert made.apply(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [4.0, 1.0]
    assert made.class_ids(torch.tensor([1, 0])).tolist() == [1, 0]


def test_unknown_classes_stop_with_the_ways_out():
    with pytest.raises(ClassError) as caught:
        plan(["cat", "dgo"])
    text = str(caught.value)
    for part in ("'dgo'", "Did you mean 'dog'", "--class-map", "--foreign-classes", "--annotator fit", "photos"):
        assert part in text


def test_an_annotator_without_names_is_not_trusted_even_if_the_count_fits():
    with pytest.raises(ClassError, match="--class-map order"):
        plan(["a", "b", "c", "d"], ClassList(4))
    made = plan(["a", "b", "c", "d"], ClassList(4), class_map="order")
    assert (made.how, made.names, made.groups) == ("by order", ("a", "b", "c", "d"), None)
    with pytest.raises(ClassError, match="as many classes"):
        plan(["a", "b", "c"], ClassList(4), class_map="order")


def test_foreign_classes_stay_and_labels_find_theirs_where_they_can():
    made = plan(["fox", "house"], foreign=True)
    assert made.names == ANIMALS.names
    assert made.label_to_class == (3, -1)


def test_images_without_labels_get_the_annotators_classes():
    assert plan([]).how == "foreign"


def test_a_class_map_and_foreign_classes_exclude_each_other():
    with pytest.raises(ClassError, match="exclude"):
        plan(["fox"], class_map="order", foreign=True)


@pytest.mark.parametrize("kind", ["csv", "json", "yaml"])
def test_a_class_map_can_be_written_in_three_formats(tmp_path, kind):
    path = tmp_path / f"map.{kind}"
    content = {"pet": ["cat", "dog"], "fish": "eel", "other": None}
    text = {
        "csv": "pet,cat\npet,1\nfish,eel\nother,\n",
        "json": json.dumps(content),
        "yaml": yaml.safe_dump(content),
    }[kind]
    path.write_text(text)
    made = plan(["fish", "other", "pet"], class_map=str(path))
    assert made.groups == ((2,), (0, 1))
    assert made.targets == (0, 2)
    assert (made.count, made.scored) == (3, 2)
    scores = made.apply(torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4])))
    assert scores.exp().tolist() == pytest.approx([0.3, 0.3])  # probabilities of a group add up
    assert made.class_ids(torch.tensor([0, 1])).tolist() == [0, 2]


def test_class_maps_that_are_wrong_are_refused_with_the_name(tmp_path):
    path = tmp_path / "map.csv"
    for text, said in (
        ("cat,cat\n", "says nothing about 1"),
        ("cat,cat\ndgo,dog\n", "Did you mean 'dog'"),
        ("cat,cat\ndog,wolf\n", "no class 'wolf'"),
        ("cat,cat\ndog,4\n", "0 to 3"),
        ("cat,cat\ndog\n", "two cells"),
        ("cat,\ndog,\n", "gives no class"),
    ):
        path.write_text(text)
        with pytest.raises(ClassError, match=said):
            read_class_map(path, ANIMALS, ["cat", "dog"])
    with pytest.raises(ClassError, match="no file"):
        read_class_map(tmp_path / "none.csv", ANIMALS, ["cat"])
    (tmp_path / "map.txt").write_text("x")
    with pytest.raises(ClassError, match=r"\.csv, \.json or \.yaml"):
        read_class_map(tmp_path / "map.txt", ANIMALS, ["cat"])


def test_imagenet_classes_are_known_by_wordnet_id_name_and_synonym():
    known = imagenet_classes()
    assert (known.count, len(set(known.names))) == (1000, 1000)
    assert known.find("n01440764") == known.find("tench") == known.find("Tinca tinca") == 0
    assert known.find("n03445777-golf_ball") == known.find("Golf_Ball") == 574
    assert known.find("spoonbread") is None


def test_a_name_of_two_imagenet_classes_is_not_guessed():
    known = imagenet_classes()
    assert known.find("crane") == -1
    assert {known.find("n02012849"), known.find("n03126707")} == {134, 517}
    with pytest.raises(ClassError, match="several"):
        plan(["crane", "tench"], known)


def test_two_folders_of_one_class_are_not_merged_silently():
    with pytest.raises(ClassError, match="same name"):
        plan(["tench", "n01440764"], imagenet_classes())

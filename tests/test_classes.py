"""Which class is which: a dataset's folders among a model's outputs, an annotator's scores in a store."""

import numpy as np
import pytest
import torch

from everytoken.errors import EverytokenError
from everytoken_lab.classes import (
    ClassList,
    class_finder,
    imagenet_classes,
    match_classes,
    plan_classes,
    read_class_map,
    wnids,
)

NUMBERS = sorted(map(str, range(1000)))  # as a file system lists them: 0, 1, 10, 100, ...


def test_numbered_folders_are_numbers_for_models_without_names_and_for_imagenets():
    for classes in (ClassList(1000), imagenet_classes(), ClassList(1000, wnids())):
        assert match_classes(classes, NUMBERS, "v2").labels.tolist() == [int(name) for name in NUMBERS]
    assert match_classes(ClassList(12), sorted(map(str, range(12))), "x").labels.tolist()[:4] == [0, 1, 10, 11]
    assert match_classes(ClassList(12), ["10", "3"], "x").labels.tolist() == [10, 3]  # a part of them
    assert match_classes(ClassList(11), sorted(map(str, range(1, 12))), "x").labels.tolist()[:3] == [0, 9, 10]
    named = ClassList(4, ("0", "1", "10", "2"))  # numbers that are names
    assert match_classes(named, ["10", "2"], "x").labels.tolist() == [2, 3]


def test_folders_are_found_by_id_name_and_synonym():
    assert match_classes(ClassList(1000), ["n01443537", "tench", "golf ball"], "x").labels.tolist() == [1, 0, 574]
    own = ClassList(3, ("n01440764_tench", "n01443537", "cat"))
    assert match_classes(own, ["cat", "n01440764"], "x").labels.tolist() == [2, 0]


def test_a_part_of_imagenets_folders_is_enough():
    found = match_classes(ClassList(1000), ["n01440764", "goldfish"], "x")
    assert found.columns is None
    assert found.labels.tolist() == [0, 1]
    restricted = match_classes(ClassList(1000), ["n02012849", "n01440764"], "x", restrict=True)
    assert restricted.columns is not None
    assert (restricted.columns.tolist(), restricted.labels.tolist()) == ([0, 134], [1, 0])


def test_folders_that_are_no_class_are_named():
    for classes in (ClassList(1000), ClassList(3, ("cat", "dog", "eel")), ClassList(3)):
        with pytest.raises(EverytokenError, match="unicorn"):
            match_classes(classes, ["cat", "unicorn"], "x")
    with pytest.raises(EverytokenError, match="n01440764"):
        match_classes(ClassList(1000), ["n01440764"], "r", subset="r")
    with pytest.raises(EverytokenError, match="lacks"):
        match_classes(ClassList(1, ("n01498041",)), ["n01498041"], "a", subset="a")
    with pytest.raises(EverytokenError, match="same class"):
        match_classes(ClassList(1000), ["n01440764", "tench"], "x")
    assert np.array_equal(match_classes(ClassList(2), ["left", "right"], "x").labels, [0, 1])


def test_class_lists_are_in_imagenets_order_and_have_the_right_sizes():
    every = wnids()
    assert len(every) == len(set(every)) == 1000
    assert list(every) == sorted(every)
    for name in "ar":
        some = wnids(name)
        assert len(set(some)) == 200
        assert list(some) == [w for w in every if w in set(some)]
    # classes that are known to be in one of them, in both, in none
    assert every.index("n01498041") == 6  # stingray: in both
    assert {"n01498041"} <= set(wnids("a")) & set(wnids("r"))
    assert "n01443537" in set(wnids("r")) - set(wnids("a"))  # goldfish
    assert "n01558993" in set(wnids("a")) - set(wnids("r"))  # American robin
    assert "n01440764" not in {*wnids("a"), *wnids("r")}  # tench


def test_answers_of_a_subset_are_the_best_of_its_200_logits():
    folders = [wnids("a")[i] for i in (5, 17, 199)]
    found = match_classes(ClassList(1000), folders, "a", subset="a")
    assert found.columns.tolist() == [wnids().index(w) for w in wnids("a")]
    assert found.labels.tolist() == [5, 17, 199]
    logits = np.random.default_rng(0).normal(size=(1, 1000))
    logits[0, 0] = 50  # tench, which is not in the subset
    logits[0, wnids().index(folders[1])] = 20
    assert logits[:, found.columns].argmax() == 17


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


def test_a_dataset_may_have_some_of_the_annotators_classes():
    made = plan(["Fox", "cat"])
    assert made.count == 2
    assert made.apply(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [4.0, 1.0]
    assert made.class_ids(torch.tensor([1, 0])).tolist() == [1, 0]


def test_unknown_classes_stop_with_the_ways_out():
    with pytest.raises(EverytokenError) as caught:
        plan(["cat", "dgo"])
    text = str(caught.value)
    for part in ("'dgo'", "Did you mean 'dog'", "class_map", "foreign_classes", "annotator fit", "photos"):
        assert part in text


def test_an_annotator_without_names_is_not_trusted_even_if_the_count_fits():
    with pytest.raises(EverytokenError, match="class map 'order'"):
        plan(["a", "b", "c", "d"], ClassList(4))
    made = plan(["a", "b", "c", "d"], ClassList(4), class_map="order")
    assert (made.how, made.names, made.groups) == ("by order", ("a", "b", "c", "d"), None)
    folders = sorted(map(str, range(12)))
    made = plan(folders, ClassList(12), class_map="order")
    assert made.groups == tuple((int(name),) for name in folders)
    with pytest.raises(EverytokenError, match="as many classes"):
        plan(["a", "b", "c"], ClassList(4), class_map="order")


def test_foreign_classes_stay_and_labels_find_theirs_where_they_can():
    made = plan(["fox", "house"], foreign=True)
    assert made.names == ANIMALS.names
    assert made.label_to_class == (3, -1)
    assert plan([]).how == "foreign"  # images without labels
    with pytest.raises(EverytokenError, match="exclude"):
        plan(["fox"], class_map="order", foreign=True)


def test_a_class_map_joins_classes_and_may_give_a_class_none(tmp_path):
    path = tmp_path / "map.csv"
    path.write_text("pet,cat\npet,1\n\nfish,eel\nother,\n")
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
    ):
        path.write_text(text)
        with pytest.raises(EverytokenError, match=said):
            read_class_map(path, ANIMALS, ["cat", "dog"])
    with pytest.raises(EverytokenError, match="cannot be read"):
        read_class_map(tmp_path / "none.csv", ANIMALS, ["cat"])


def test_a_name_of_two_imagenet_classes_is_not_guessed_and_two_names_of_one_are_not_merged():
    known = imagenet_classes()
    assert known.find("crane") is None
    assert {known.find("n02012849"), known.find("n03126707")} == {134, 517}
    with pytest.raises(EverytokenError, match="several"):
        plan(["crane", "tench"], known)
    with pytest.raises(EverytokenError, match="same name"):
        plan(["tench", "n01440764"], known)


def test_folders_are_compared_with_classes_as_when_annotating():
    find = class_finder(["tench", "golf ball", "crane (n02012849)", "crane (n03126707)", "my own"])
    assert [find(name) for name in ("n01440764", "Tinca tinca", "Golf_Ball", "n03126707")] == [0, 0, 1, 3]
    assert [find(name) for name in ("my_own", "crane", "n02102040", "photos")] == [4, None, None, None]

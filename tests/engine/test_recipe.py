"""Recipes and overrides: every shipped recipe is valid, wrong keys are named."""

import pytest
import timm

import everytoken  # noqa: F401
from everytoken_lab.engine.options import TrainOptions
from everytoken_lab.engine.recipe import (
    apply,
    flat,
    header,
    overrides,
    parse_recipe,
    read_recipe,
    recipe_names,
)
from everytoken_lab.schema import SchemaError
from everytoken_lab.training.build import check_options
from everytoken_lab.training.inputs import FINETUNE

CLASSIFIERS = [n for n in recipe_names() if not n.startswith(("segment_", "detect_"))]  # others: tests/transfer


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_shipped_recipe_fits_the_options_and_says_what_it_is(name):
    options = apply(TrainOptions(), read_recipe(name), name)
    assert timm.is_model(options.model.model.partition(".")[0]) or name in FINETUNE
    text = header(name)
    assert "Run by us:" in text
    assert "Source:" in text
    assert options.objectives or "plain" in name or name in FINETUNE
    if {"token_labeling", "relabel"} & set(options.objectives):
        assert "Needs: score maps" in text or "--maps MAPS" in text


def test_a_recipe_survives_the_way_to_a_run_folder_and_back():
    options = apply(TrainOptions(), read_recipe("lvvit_s_token"), "x")
    assert apply(TrainOptions(), flat(options), "config.yaml") == options
    assert options.optim.lr_base_size == 640
    assert options.objectives == {"token_labeling": {"beta": 0.5}}


def test_an_unknown_key_is_an_error_with_a_suggestion():
    with pytest.raises(SchemaError, match=r"'batch_sise'.*'batch_size'"):
        apply(TrainOptions(), {"batch_sise": 3}, "mine.yaml")
    with pytest.raises(SchemaError, match="lvvit_s_token"):
        read_recipe("lvvit_s_tokens")
    with pytest.raises(SchemaError, match=r"no recipe file nowhere\.yaml"):
        read_recipe("nowhere.yaml")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"epochs": "many"}, "epochs is 'many'"),
        ({"epochs": 2.5}, "epochs is 2.5"),
        ({"amp": 1}, "amp is 1"),
        ({"scale": [0.1]}, "scale"),
        ({"objectives": ["token"]}, "objectives"),
        ({"objectives": {"hard": 3}}, "objectives.hard is 3"),
        ({"batch_size": True}, "batch_size is True"),
        ({"model": None}, "model is None"),
    ],
)
def test_values_of_the_wrong_kind_are_named(values, what):
    with pytest.raises(SchemaError, match=what):
        apply(TrainOptions(), values, "mine.yaml")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"mixing": {"cutmix": {"alpha": "much"}}}, "cutmix: alpha is 'much'"),
        ({"mixing": {"cutmix": {"alpha": True}}}, "alpha is True"),
        ({"objectives": {"drloc": {"pairs": 2.5}}}, r"drloc: pairs.* is 2.5"),
        ({"objectives": {"hard": {"smoothing": "0.1"}}}, "hard: smoothing is '0.1'"),
    ],
)
def test_values_inside_objectives_and_mixing_are_checked_before_anything_is_read(values, what):
    options = apply(TrainOptions(), {"data": "photos", "model": "lvvit_t", **values}, "mine.yaml")
    with pytest.raises(SchemaError, match=what):
        check_options(options)


def test_yaml_numbers_without_a_dot_are_still_numbers():
    values = parse_recipe("lr: 1e-3\nweight_decay: 0\nobjectives: {hard: }\nmixing:", "x")
    options = apply(TrainOptions(), values, "x")
    assert options.optim.lr == 1e-3
    assert options.optim.weight_decay == 0.0
    assert options.objectives == {"hard": {}}
    assert options.mixing == {}


def test_broken_yaml_is_named():
    with pytest.raises(SchemaError, match=r"mine\.yaml"):
        parse_recipe("a: [1", "mine.yaml")
    with pytest.raises(SchemaError, match=r"mine\.yaml.*object"):
        parse_recipe("- 1", "mine.yaml")


def test_overrides_reach_inner_values_and_remove_entries():
    base = {"objectives": {"drloc": {"weight": 0.5}, "hard": {}}}
    assert overrides(["objectives.drloc.weight=0.1"], base) == {"objectives": {"drloc": {"weight": 0.1}, "hard": {}}}
    assert overrides(["objectives.drloc=null"], base) == {"objectives": {"hard": {}}}
    assert overrides(["mixing.cutmix={alpha: 0.5}"], base) == {"mixing": {"cutmix": {"alpha": 0.5}}}
    assert base["objectives"]["drloc"] == {"weight": 0.5}
    with pytest.raises(SchemaError, match="NAME=VALUE"):
        overrides(["objectives.drloc"], base)
    with pytest.raises(SchemaError, match=r"weight is 0\.5"):
        overrides(["objectives.drloc.weight.x=1"], base)
    with pytest.raises(SchemaError, match="'objectives'"):
        overrides(["objective.drloc.weight=1"], base)

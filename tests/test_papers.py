"""docs/papers.md is true: what it names exists, its recipes resolve, its flags are flags, its scripts run."""

import contextlib
import importlib
import importlib.util
import inspect
import io
import re
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import get_pretrained_cfg, is_model

import everytoken  # noqa: F401
from everytoken.maps import MapWriter, StoreMeta
from everytoken.mixing import MIXERS, build_mixer
from everytoken.models import TokenModel
from everytoken.models.lvvit import LVViT
from everytoken.objectives.registry import OBJECTIVES, build_objectives
from everytoken_lab.cli import main
from everytoken_lab.cli.train import Train
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.dense.detect import DetectOptions
from everytoken_lab.dense.segment import SegmentOptions
from everytoken_lab.engine.options import TrainOptions, apply, overrides, read_recipe, recipe_names

from .conftest import make_photos

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
CODE = re.findall(r"`([^`\n]+)`", PAGE)
COMMANDS = [code for code in CODE if code.startswith("everytoken ")]


def in_a_shell(code, folder):
    """The words that a shell makes of a code. A pattern that fits no file is an error, as in zsh."""
    done = subprocess.run(
        ["bash", "-O", "failglob", "-c", f"printf '%s\\0' {code}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")[:-1]


@cache
def flags_of(command):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", text.getvalue()))


def test_every_recipe_in_the_papers_tables_resolves_to_a_model_that_exists():
    named = {word for code in CODE for word in code.split() if word in recipe_names()}
    left = {n for n in recipe_names() if not n.startswith("small_") and n not in named}
    assert left <= {"finetune", "finetune_resolution", "detect_small", "deit_small_self"}  # those of no paper
    for name in named:
        kind = {"segment": SegmentOptions, "detect": DetectOptions}.get(name.split("_")[0], TrainOptions)
        options = apply(kind(), read_recipe(name), name)
        model, _, tag = options.model.model.partition(".")
        assert is_model(model), name
        assert not tag or get_pretrained_cfg(options.model.model, allow_unregistered=False), name
        for objective in getattr(options, "objectives", {}):
            assert objective in OBJECTIVES, name


def test_words_with_underscores_are_recipes_models_or_settings():
    keywords = {"mlp_ratio", "stem_kernels", "stem_strides", "norm_groups", "norm_position"}  # of LV-ViT
    names = {*recipe_names(), *MIXERS, *OBJECTIVES, *keywords}
    unknown = []
    for code in CODE:
        word, _, tag = code.partition(".")
        if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+(\.[a-z0-9_]+)?", code) or tag in ("py", "txt"):
            continue
        is_known_model = is_model(word) and (not tag or code in timm.list_pretrained(f"{word}.*"))
        unknown += [] if code in names or is_known_model else [code]
    assert not unknown
    assert keywords < set(inspect.signature(LVViT).parameters)


def test_tests_and_scripts_that_it_names_exist():
    for code in CODE:
        if re.fullmatch(r"[\w/]*test_\w+\.py(::\w+)?", code):
            path, _, name = code.partition("::")
            text = (ROOT / "tests" / path).read_text(encoding="utf-8")
            assert not name or f"def {name}(" in text, code
        elif code.startswith("benchmarks/"):
            assert (ROOT / code.split()[0]).is_file(), code
        elif re.fullmatch(r"everytoken\.[\w.]+", code):
            module, _, name = code.rpartition(".")
            assert hasattr(importlib.import_module(module), name), code


def test_flags_that_it_names_are_flags():
    for code in COMMANDS:
        words = code.split()[1:]
        command = " ".join(words[:2] if words[0] in ("segment", "detect", "maps") else words[:1])
        for flag in re.findall(r"--[a-z][a-z-]*", code):
            assert flag in flags_of(command), code
    for code in CODE:
        if re.match("--[a-z]", code):
            flag = code.split()[0]
            assert flag in flags_of("train") | flags_of("explain") | flags_of("segment train"), code


@pytest.mark.parametrize("code", sorted({c for c in CODE if c.startswith("--set ")}))
def test_settings_that_it_names_are_settings(code, tmp_path):
    words = in_a_shell(code, tmp_path)
    assert set(words[::2]) == {"--set"}
    base = {"objectives": {"token_labeling": {}, "drloc": {}, "tl_align": {}}, "mixing": {"mixtoken": {}, "cutmix": {}}}
    values = overrides(words[1::2], base)
    options = apply(TrainOptions(), values, code)
    build_mixer(options.mixing)
    model = TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=10, depth=12), token_classes=10)
    build_objectives(options.objectives, model)  # wrong names and values are refused
    kwargs = values.get("model_kwargs")
    if kwargs:
        timm.create_model("lvvit_t", **kwargs)


@pytest.mark.parametrize("code", sorted({c for c in COMMANDS if c.startswith("everytoken train ") and "NAME" not in c}))
def test_commands_that_it_names_train_as_they_stand_in_a_shell(code, tmp_path):
    _, _, *words = in_a_shell(code, tmp_path)
    options = Train.read(words, "everytoken train")
    build_mixer(options.mixing)


def test_the_five_rows_of_table_2_are_five_commands(tmp_path):
    rows = PAGE[PAGE.index("| ATM Table 2,") :].splitlines()[:5]
    found = []
    for row in rows:
        code = next(c for c in re.findall("`([^`]+)`", row) if c.startswith("everytoken train "))
        options = Train.read(in_a_shell(code, tmp_path)[2:], "everytoken train")
        found.append((*options.objectives, set(options.mixing)))
    assert found == [
        ("token_labeling", {"mixtoken"}),
        ("relabel", {"mixtoken"}),
        ("relabel", {"cutmix"}),
        ("hard", {"mixup", "mixtoken"}),
        ("hard", {"mixup", "cutmix"}),
    ]


def script(name):
    path = ROOT / "benchmarks" / "papers" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"papers_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def photos_in_classes(tmp_path_factory):
    return str(make_photos(tmp_path_factory.mktemp("photos"), classes=2, train=4, val=0, size=(40, 40)) / "train")


@pytest.mark.parametrize("figure", ["rmse", "layers", "labels", "presence"])
def test_the_figures_of_tl_align_are_drawn_for_any_model(figure, photos_in_classes, tmp_path, capsys):
    models = ["timm:vit_nano_patch4_32"] + ([] if figure == "presence" else ["timm:swin_nano_patch2_window4_32"])
    out = tmp_path / "a.png"
    script("tl_align_figures").main(
        [figure, photos_in_classes, *models, "--untrained", "--images", "4", "--out", str(out)]
    )
    assert Image.open(out).size[0] > 100
    text = capsys.readouterr().out
    assert all(model in text for model in models)


def test_token_labeling_in_figure_4_comes_from_the_score_maps(photos_in_classes, tmp_path, capsys):
    data = open_dataset(photos_in_classes, "all")
    keys, scores = list(data.keys()), np.zeros((8, 2, 2, 2), np.float32)
    ids = np.broadcast_to(np.arange(2), scores.shape)
    scores[..., 0] = np.log([[3.0, 1.0], [1.0, 1.0]])  # ant : bee is 3 : 1 at the top left, else 1 : 1
    with MapWriter(tmp_path / "maps", keys, StoreMeta((2, 2), 2, data.class_names, 2)) as writer:
        writer.put(range(8), scores, ids, [[40, 40]] * 8, [[0.0, 0.0, 1.0, 1.0]] * 8)
        writer.finalize()
    module = script("tl_align_figures")
    opened = module.untrained("timm:vit_nano_patch4_32")
    batch = next(module.batches(opened, photos_in_classes, 8, str(tmp_path / "maps")))
    mix, _ = module.draw(batch.images, 0)
    ratios = module.label_ratios(batch, mix, (2, 2))
    of_ant = torch.where(batch.labels == 0, 0.75, 0.25)  # both images have the same map, so the box does not matter
    differ = batch.labels != batch.labels[mix.partner]
    torch.testing.assert_close(ratios[differ, 0], of_ant[differ], atol=2e-3, rtol=0)
    torch.testing.assert_close(ratios[differ, 3], torch.full_like(of_ant[differ], 0.5), atol=2e-3, rtol=0)
    lines = module.layer_ratios(opened, photos_in_classes, 8, str(tmp_path / "maps"))
    assert "token labeling" in lines
    assert "token labeling" not in " ".join(module.layer_ratios(opened, photos_in_classes, 8))


def test_methods_that_give_the_same_number_are_one_line_with_their_names(photos_in_classes):
    module = script("tl_align_figures")
    opened = module.untrained("timm:swin_nano_patch2_window4_32")
    lines = module.layer_ratios(opened, photos_in_classes, 8)
    assert set(lines) == {"TL-Align", "likeness", "CutMix = TransMix = places"}


def test_labels_start_on_the_grid_of_the_patch_embedding_and_the_rmse_is_that_of_the_shares(photos_in_classes):
    module = script("tl_align_figures")
    opened = module.untrained("timm:swin_nano_patch2_window4_32")
    batch = next(module.batches(opened, photos_in_classes, 8))
    images, labels = batch.images, batch.labels
    _, mix, start, aligned = module.label_maps(opened, images)
    assert start.shape[1:] == (16, 16)
    assert aligned.shape[1] < 16
    assert start.mean((1, 2)) == pytest.approx(mix.ratio, abs=1e-4)
    mix, mixed = module.draw(images, 0)
    shares = module.follow(opened, mixed, mix).image
    differ = (labels != labels[mix.partner]).float()
    wanted = float((differ * (shares - mix.ratio) ** 2).mean().sqrt())
    assert module.rmse(opened, photos_in_classes, 8)[0] == pytest.approx(wanted, rel=1e-4)


def test_seconds_per_batch_are_measured_with_and_without_drloc(capsys):
    times = script("drloc_table14").seconds("vit_nano_patch4_32", batch=2, steps=2, size=32)
    assert times.shape == (2, 2)
    assert (times > 0).all()


def test_multiply_adds_of_a_segmenter_are_those_of_the_table():
    module = script("flops")
    parameters, flops, products = module.count("segment_swin_tiny_upernet")
    assert parameters == pytest.approx(60, abs=0.5)
    assert flops == pytest.approx(module.PAPER["segment_swin_tiny_upernet"], rel=0.002)
    assert products < 5
    assert torch.get_default_device().type == "cpu"


def test_the_speed_of_every_way_of_mixing_is_printed_in_one_run(capsys):
    tiny = ["--model", "vit_nano_patch4_32", "--teacher", "resnet10t", "--img-size", "32"]
    script("tl_align_table2").main([*tiny, "--batch-size", "4", "--steps", "1", "--device", "cpu"])
    rows = {line[:20].strip(): line[20:].split() for line in capsys.readouterr().out.splitlines()[1:]}
    names = {"Vanilla", "CutMix", "Puzzle-Mix", "SaliencyMix", "Attentive-CutMix", "TransMix", "CutMix + TL-Align"}
    assert set(rows) == names
    assert all(float(speed) > 0 for _, speed, _, _ in rows.values())
    assert float(rows["Attentive-CutMix"][0]) > float(rows["Vanilla"][0]) == float(rows["TransMix"][0])

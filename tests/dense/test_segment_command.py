"""`everytoken segment train | eval | predict` on drawn shapes, through the command line; kills do not change a run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from everytoken_lab.cli import main
from everytoken_lab.data.tree import result_stems
from everytoken_lab.dense.backbone import build_features
from everytoken_lab.dense.segment import EvalOptions, MaskOptions, SegmentEval
from everytoken_lab.dense.segment.data import open_masks
from everytoken_lab.dense.segment.model import Segmenter, load_segmenter
from everytoken_lab.dense.segment.task import Inference, SegmentTask, open_inference
from everytoken_lab.draw import colour_of, palette_image, rgb
from everytoken_lab.engine.options import BackboneOptions

from .conftest import make_shapes

TINY = [
    *("--model", "vit_tiny_patch16_224", "--channels", "24", "--pyramid-channels", "32", "--aux-channels", "16"),
    *("--set", "model_kwargs={patch_size: 8, embed_dim: 48, depth: 4, num_heads: 3}", "--crop-size", "48"),
    *("--batch-size", "4", "--workers", "0", "--threads", "1", "--device", "cpu", "--drop-path", "0.1"),
]


CPU = ["--device", "cpu", "-j", "0"]
QUICK = [*CPU, "--mode", "whole", "--scales", "1", "--no-flip"]  # not as the run was validated


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    return make_shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def run(shapes, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "r"
    length = ["--iters", "100", "--val-iters", "100", "--warmup-iters", "10", "--lr", "0.003"]
    length += ["--scale", "0.75", "1.25", "--test-scales", "1.0", "1.5"]
    length += ["--mode", "slide", "--stride", "20", "--scales", "0.75", "1.0", "--flip"]
    assert main(["segment", "train", str(shapes), *TINY, *length, "--out", str(out)]) == 0
    return out


def test_a_segmenter_learns_and_leaves_everything_in_its_folder(run, shapes, capsys):
    names = {p.name for p in run.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "best.safetensors", "classes.json", "batch.jpg", "summary.json"} <= names
    assert [row["class"] for row in json.loads((run / "classes.json").read_text())] == ["ground", "disc", "square"]
    best = json.loads((run / "summary.json").read_text())["best"]["score"]
    assert best > 70  # of images it has not seen; 33 would be all ground
    assert main(["segment", "eval", str(run), str(shapes), *CPU, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["mIoU"] == pytest.approx(best, abs=1e-3)  # in the mode, stride, scales that the run measured with
    assert numbers["images"] == 4


def test_a_segmenter_is_used_as_it_was_validated_unless_told_otherwise(run):
    model, info = load_segmenter(run)
    assert Inference(model, info).options == EvalOptions("slide", 20, (0.75, 1.0), True, (1.0, 1.5))
    other = Inference(model, info, EvalOptions(mode="whole", scales=(1.0,), flip=False))
    assert other.options == EvalOptions("whole", 20, (1.0,), False, (1.0, 1.5))
    several = open_inference(SegmentEval(str(run), "", multi_scale=True, device="cpu"))  # those of the recipe
    assert several.options == EvalOptions("slide", 20, (1.0, 1.5), True, (1.0, 1.5))


def test_a_segmenter_is_evaluated_in_the_precision_that_it_was_validated_in(shapes, tmp_path, monkeypatch):
    flags = ["--iters", "1", "--warmup-iters", "0", "--out", str(tmp_path / "run"), "--amp"]
    assert main(["segment", "train", str(shapes), *TINY, *flags]) == 0
    seen, forward = [], Segmenter.forward

    def watched(self, images):
        seen.append(torch.is_autocast_enabled("cpu"))
        return forward(self, images)

    monkeypatch.setattr(Segmenter, "forward", watched)
    for words, wanted in (([], True), (["--no-amp"], False)):
        seen.clear()
        assert main(["segment", "eval", str(tmp_path / "run"), str(shapes), *QUICK, *words]) == 0
        assert set(seen) == {wanted}


def test_predictions_are_masks_that_programs_can_read(run, shapes, tmp_path, capsys):
    image = shapes / "images" / "val" / "0.png"
    assert main(["segment", "predict", str(run), str(image), "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert "0.png: ground" in capsys.readouterr().out
    mask = Image.open(tmp_path / "0.png")
    truth = np.asarray(Image.open(shapes / "masks" / "val" / "0.png"))
    assert mask.mode == "P"
    assert (np.asarray(mask)[1:] == truth[1:]).mean() > 0.9
    assert json.loads((tmp_path / "classes.json").read_text())["2"] == "square"
    assert (tmp_path / "0.overlay.jpg").is_file()


def test_predictions_never_overwrite_images_and_never_each_other(run, shapes, tmp_path, capsys):
    image = Image.open(shapes / "images" / "val" / "0.png")
    image.save(tmp_path / "a.png")
    before = (tmp_path / "a.png").read_bytes()
    words = ["segment", "predict", str(run), str(tmp_path), "--device", "cpu", "--out"]
    assert main([*words, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "would overwrite one of the images" in said
    assert "output" in said
    assert (tmp_path / "a.png").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.png"]
    image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "a.jpg")
    (tmp_path / "sub").mkdir()
    image.save(tmp_path / "sub" / "a.png")
    out = tmp_path.with_name(tmp_path.name + "-masks")
    assert main([*words, str(out)]) == 0
    made = {p.relative_to(out).as_posix() for p in out.rglob("*.*")}
    both = {f"{name}{end}" for name in ("a.png", "a.jpg", "sub/a") for end in (".png", ".overlay.jpg")}
    assert made == both | {"classes.json"}
    assert np.asarray(Image.open(out / "a.png.png")).tolist() == np.asarray(Image.open(out / "sub/a.png")).tolist()


def test_names_of_results_differ_whatever_the_images_are_called(tmp_path):
    names = ["a.jpg", "a.png", "a.png.png", "A.webp", "b.x.jpg", "c/a.jpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    stems = result_stems(tmp_path, names, Path("out"), (".png",))
    assert len({str(stem).lower() for stem in stems.values()}) == len(names)
    assert stems["b.x.jpg"] == Path("out/b.x")
    assert stems["c/a.jpg"] == Path("out/c/a")
    assert stems["a.jpg"] == Path("out/a.jpg")


def test_of_its_own_undivided_images_a_run_is_judged_by_those_it_held_out(run, shapes, tmp_path, monkeypatch, capsys):
    data, own = tmp_path / "here" / "shapes", tmp_path / "elsewhere" / "run"
    for kind in ("images", "masks"):
        shutil.copytree(shapes / kind / "train", data / kind)
    shutil.copy(shapes / "classes.txt", data)
    own.mkdir(parents=True)
    shutil.copy(run / "best.safetensors", own)
    monkeypatch.chdir(shapes)

    def images(*more: str) -> tuple[int, str]:
        assert main(["segment", "eval", str(own), str(data), *QUICK, "--json", *more]) == 0
        said = capsys.readouterr()
        return json.loads(said.out)["images"], said.err

    everything, note = images()
    assert everything == 8
    assert "training images may be among them" in note
    (own / "config.yaml").write_text("data: shapes\nval_split: 0.4\n")
    (own / "environment.json").write_text(json.dumps([{"folder": "/nowhere"}, {"folder": str(tmp_path / "here")}]))
    held, note = images()
    assert held == len(open_masks(str(data), "val", MaskOptions(val_split=0.4))) < 8
    assert "held out (40%)" in note
    assert images("--split", "all") == (8, "")
    (own / "config.yaml").write_text(f"data: {shapes}\n")
    assert images() == (8, "")
    assert images("--val-split", "0.4")[0] == held


def test_a_segmenter_gives_its_backbone(run):
    features, about = build_features(BackboneOptions(weights=str(run)), 32)
    assert about.architecture == "vit_tiny_patch16_224"
    assert features.backbone.pos_embed.shape[1:] == (17, 48)
    ours, theirs = (f.backbone.blocks[3].mlp.fc1.weight for f in (features, load_segmenter(run)[0].features))
    assert torch.equal(ours, theirs)


def test_a_killed_run_ends_with_the_very_same_weights(shapes, tmp_path, run_with_kills):
    words = ["segment", "train", str(shapes), *TINY, "--iters", "9", "--val-iters", "3", "--warmup-iters", "2"]
    words += ["--checkpoint-steps", "1", "--model-ema", "--grad-accum-steps", "2", "--batch-size", "3"]
    words += ["--head", "fcn", "--keep", "1"]
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    # in the midst of an update, and at the end of a pass
    run_with_kills(SegmentTask, (3, 6, 4), [*words, "--out", str(tmp_path / "cut")])
    a, b = (sorted((tmp_path / n / "checkpoints").iterdir())[-1] for n in ("whole", "cut"))
    assert a.name == b.name == "step-00000009"
    for name in ("model.safetensors", "ema.safetensors"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
    rows = [
        [json.loads(x).get("val_mIoU") for x in (tmp_path / n / "metrics.jsonl").read_text().splitlines()]
        for n in ("whole", "cut")
    ]
    assert rows[0] == rows[1]


@pytest.mark.timeout(600)
def test_two_processes_share_the_validation_and_the_weights_give_its_numbers(tmp_path, capsys, start_ranks):
    shapes, out = make_shapes(tmp_path / "shapes", train=8, val=3, size=(80, 64)), tmp_path / "run"
    words = [
        *("segment", "train", str(shapes), "--model", "mobilenetv3_small_050", "--channels", "8"),
        *("--aux-channels", "8"),
        *("--crop-size", "32", "--iters", "3", "--val-iters", "3", "--warmup-iters", "1", "--batch-size", "2"),
        *("--workers", "0", "--threads", "1", "--device", "cpu", "--out", str(out)),
    ]
    assert [program.wait(500) for program in start_ranks(2, *words)] == [0, 0]
    assert "2 processes x 1 accumulated = 4" in (out / "log.txt").read_text()
    best = json.loads((out / "summary.json").read_text())["best"]["score"]
    assert main(["segment", "eval", str(out), str(shapes), "--device", "cpu", "-j", "0", "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["images"] == 3
    assert numbers["mIoU"] == pytest.approx(best, abs=1e-3)  # batch norm's running means are the file's on both


def test_mistakes_are_named(run, shapes, tmp_path, capsys):
    train = ["segment", "train", str(shapes), *TINY, "--out", str(tmp_path / "r")]
    broken = make_shapes(tmp_path / "broken", train=4, val=1)
    Image.fromarray(np.full((48, 56), 77, np.uint8)).save(broken / "masks/train/2.png")
    damaged = [str(broken) if w == str(shapes) else w for w in train]
    other = make_shapes(tmp_path / "other", train=1, val=1)
    (other / "classes.txt").write_text("square\nground\ndisc\n")
    for words, sentence in (
        ([*train, "--batch-size", "1"], "batch_size 1 is too small"),
        (["segment", "train", "--model", "resnet18"], "data is empty"),
        ([*train, "--batch-size", "64"], "do not fill one batch of 64"),
        ([*train, "--lr-base", "0.001234"], "lr_base is 0.001234"),  # it would do nothing beside lr
        (["segment", "trian"], "no command 'everytoken segment trian'"),
        ([*damaged, "--iters", "2", "--val-iters", "2"], "2.png: value 77"),
        (["segment", "eval", str(run), str(other), *CPU], "has other classes (square, ground, disc, ...)"),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err


def test_masks_are_palette_images_in_the_colours_of_their_classes():
    mask = np.array([[0, 1], [1, 0]])
    palette = palette_image(mask, 2)
    assert (np.asarray(palette) == mask).all()
    assert (np.asarray(palette.convert("RGB")) == np.array([rgb(colour_of(i)) for i in range(2)])[mask]).all()
    assert palette_image(np.array([[300]]), 400).mode.startswith("I;16")

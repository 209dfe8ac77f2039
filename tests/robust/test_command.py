"""`everytoken robust` and `everytoken transfer` on small images: tables, caches, logs, kills, comparisons, errors."""

import json
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from everytoken.data.batch import normalise
from everytoken_lab.cli import main
from everytoken_lab.models.description import Description
from everytoken_lab.robust import RobustOptions, attacks
from everytoken_lab.robust import run as robust_run
from everytoken_lab.robust.attacks import cross_entropy, value_and_gradient
from everytoken_lab.robust.run import SuiteRunner, from_pixels
from everytoken_lab.robust.suites import Suite
from everytoken_lab.robust.transfer import parse_targets

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 3}
NAMES = ("class-0", "class-1", "class-2")
SEEN = {"img_size": (32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
ATTACK = ("--attack", "apgd-ce", "--attack-steps", "2")


@pytest.fixture(scope="module")
def weights(tmp_path_factory, photos):
    """Two small models, trained for a moment on the discs' colours."""
    place, paths = tmp_path_factory.mktemp("weights"), []
    files = sorted((photos / "train").rglob("*.*"))
    images = np.stack([np.asarray(Image.open(path).resize((32, 32)), np.float32) for path in files])
    x, y = torch.from_numpy(images).movedim(-1, 1) / 127.5 - 1, torch.tensor([int(f.parent.name[-1]) for f in files])
    about = Description("vit_tiny_patch16_224", TINY, NAMES, **SEEN)
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = timm.create_model("vit_tiny_patch16_224", **TINY)
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
        for _ in range(40):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        paths.append(place / f"model{seed}.safetensors")
        save_file(model.state_dict(), paths[-1], metadata=about.to_metadata())
    return paths


def robust(source, out, *words):
    return main(["robust", str(source), "--device", "cpu", "--workers", "0", "--out", str(out), *map(str, words)])


def rows_of(out):
    return {row["test set"]: row for row in json.loads((out / "table.json").read_text())["rows"]}


def test_one_table_of_clean_corrupted_and_attacked_images(photos, weights, tmp_path, capsys):
    small = ("--suite", f"val={photos / 'val'}", "corrupt", "attack", "--corruptions", "contrast", "fog")
    small += ("--severities", "1", "5", *ATTACK, "--eps", "1/255", "32/255")
    assert robust(weights[0], tmp_path, *small) == 0
    assert "M parameters" in capsys.readouterr().out
    rows = rows_of(tmp_path)
    corrupted = {f"corrupt {name}" for name in ("contrast", "fog", "mean", "mCE")}
    assert set(rows) == {"val", *corrupted, "attack 1/255", "attack 32/255"}
    value = {name: row["top-1"] for name, row in rows.items()}
    assert value["corrupt mean"] == pytest.approx((value["corrupt contrast"] + value["corrupt fog"]) / 2)
    assert value["val"] >= value["attack 1/255"] >= value["attack 32/255"]
    assert rows["val"]["low"] <= value["val"] <= rows["val"]["high"]
    assert "corrupt mCE" in (tmp_path / "table.txt").read_text()


def test_real_labels_judge_answers_among_some_of_the_classes_by_imagenets_numbers(photos, weights, tmp_path):
    ids = ("n01514668", "n01443537", "n01440764")  # ImageNet's 7, 1 and 0, in another order than ours
    about = Description("vit_tiny_patch16_224", TINY, ids, **SEEN)
    save_file(load_file(weights[0]), tmp_path / "ids.safetensors", metadata=about.to_metadata())
    sets = []
    for name, wordnet, number in zip(NAMES[1:], ids[1:], (1, 0), strict=True):  # the first class has no images
        for path in sorted((photos / "val" / name).iterdir()):
            sets.append([number])
            file = tmp_path / "val" / wordnet / f"ILSVRC2012_val_{len(sets):08d}{path.suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, file)
    (tmp_path / "real.json").write_text(json.dumps(sets))
    suites = ("--suite", f"val={tmp_path / 'val'}", "real", "--restrict", "--real", tmp_path / "real.json")
    assert robust(tmp_path / "ids.safetensors", tmp_path / "out", *suites) == 0
    rows = rows_of(tmp_path / "out")
    assert float(rows["real"]["top-1"]) == float(rows["val"]["top-1"]) > 50


def test_the_second_time_predictions_come_from_the_folder(photos, weights, tmp_path, monkeypatch, capsys):
    words = ("--suite", f"val={photos / 'val'}", "corrupt", "--corruptions", "fog", "--severities", "2")
    robust(weights[0], tmp_path, *words)
    first = json.loads((tmp_path / "table.json").read_text())["rows"]
    calls = []
    whole = SuiteRunner._predict
    monkeypatch.setattr(SuiteRunner, "_predict", lambda *a: calls.append(a[2].name) or whole(*a))
    robust(weights[0], tmp_path, *words)
    assert not calls
    assert json.loads((tmp_path / "table.json").read_text())["rows"] == first
    robust(weights[0], tmp_path, *words, "--severities", "2", "3")  # only what is new is made
    assert calls == ["fog 3"]
    capsys.readouterr()


def test_generated_corruptions_equal_the_same_corruptions_from_folders(photos, weights, tmp_path, capsys):
    """ImageNet-C's layout, written here from our own corruptions, gives the numbers of corrupt=FOLDER."""
    options = RobustOptions(workers=0, device="cpu")
    runner = SuiteRunner(str(weights[0]), options, tmp_path / "out")
    suite = Suite("fog 3", "corrupt", str(photos / "val"), corruption="fog", severity=3)
    data = robust_run.CorruptedSet(robust_run.open_images(suite)[0], runner.view, suite)
    for i in range(len(data)):
        path = tmp_path / "c" / "weather" / "fog" / "3" / data.key(i)
        path.parent.mkdir(parents=True, exist_ok=True)
        data.picture(i).image.convert("RGB").save(path)
    generated = runner.evaluate(suite)
    stored = Suite("fog 3", "c", str(tmp_path / "c" / "weather" / "fog" / "3"), corruption="fog", severity=3)
    read = runner.evaluate(stored)
    assert generated.keys == read.keys
    assert np.array_equal(generated.correct, read.correct)
    assert generated.ece == pytest.approx(read.ece)


def test_two_models_are_compared_image_by_image(photos, weights, tmp_path, capsys):
    words = ("--suite", f"val={photos / 'val'}", "corrupt", "--corruptions", "contrast", "--severities", "3", "5")
    assert robust(weights[0], tmp_path, "--compare", str(weights[1]), *words, "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["rows"][0]) >= {"test set", "images", "A", "B", "B - A"}
    for row in rows_of(tmp_path).values():
        assert row["B - A"] == pytest.approx(row["B"] - row["A"], abs=1e-3)
        assert row["low"] is None or row["low"] <= row["B - A"] <= row["high"]
    robust(weights[0], tmp_path / "same", "--compare", str(weights[0]), *words)
    same = rows_of(tmp_path / "same")
    assert all(row["B - A"] == 0 for row in same.values())
    assert same["val"]["low"] < 0 < same["val"]["high"]
    assert same["corrupt contrast"]["low"] is None  # all images agree


def attack(weights, photos, out, monkeypatch):
    monkeypatch.setattr(robust_run, "ATTACK_BATCH", 4)
    words = ("--suite", f"attack={photos / 'val'}", "--attack", "autoattack", "--eps", "2/255", "6/255")
    words += ("--attack-steps", "5", "--queries", "10", "--targets", "2")
    robust(weights[0], out, *words)
    return sorted(out.glob("*/attacks/*.jsonl"))


def test_a_killed_attack_leaves_the_logs_of_those_before_it(photos, weights, tmp_path, monkeypatch):
    wanted = [path.read_bytes() for path in attack(weights, photos, tmp_path / "whole", monkeypatch)]
    assert len(wanted) == 2
    whole, calls = attacks.run, []

    def killed(*arguments, **options):
        calls.append(1)
        if len(calls) == 4:  # the first of the second eps
            raise KeyboardInterrupt
        return whole(*arguments, **options)

    monkeypatch.setattr(attacks, "run", killed)
    (log,) = attack(weights, photos, tmp_path / "killed", monkeypatch)
    assert log.read_bytes() in wanted
    calls[3:] = []
    calls.insert(0, 0)  # of three batches, none is attacked again: the next call is the fifth
    assert sorted(p.read_bytes() for p in attack(weights, photos, tmp_path / "killed", monkeypatch)) == sorted(wanted)
    small, large = ([json.loads(line) for line in text.splitlines()[1:]] for text in wanted)
    fallen = [{r["key"] for r in records if r["by"]} for records in (small, large)]
    assert fallen[0] <= fallen[1]
    assert all(r["label"] == NAMES.index(r["key"].split("/")[0]) for r in small)


def test_an_attack_with_other_settings_has_a_log_of_its_own(photos, weights, tmp_path):
    words = ("--suite", f"val={photos / 'val'}", "attack", *ATTACK, "--eps", "1/255")
    for limit in ("2", "3", "2"):
        assert robust(weights[0], tmp_path, *words, "--attack-limit", limit) == 0
    assert len(list(tmp_path.rglob("attacks/*.jsonl"))) == 2


def test_attacks_see_what_evaluation_sees_and_fused_attention_hides_no_gradient(photos, weights, tmp_path):
    tested = SuiteRunner(str(weights[0]), RobustOptions(device="cpu"), tmp_path)
    data, _ = robust_run.open_images(Suite("v", "val", str(photos / "val")))
    view, net = tested.view, tested.net
    images = torch.from_numpy(np.stack([view(data.picture(i))[0] for i in range(3)])).movedim(-1, 1)
    seen = from_pixels(net, view)(images / 255)
    assert torch.allclose(seen, net(normalise(images, view.mean, view.std)), atol=1e-5)
    x, y, net = images.double() / 255, torch.tensor([0, 1, 2]), net.double()
    mean, std = (torch.tensor(v).double().view(1, 3, 1, 1) for v in (view.mean, view.std))

    def double(t):  # without the cast to float32
        return net((t - mean) / std)

    _, _, gradient = value_and_gradient(double, x, cross_entropy, y)
    for at in ((0, 0, 3, 5), (1, 2, 17, 30), (2, 1, 31, 0)):
        step = torch.zeros_like(x)
        step[at] = 1e-5
        up, down = (torch.nn.functional.cross_entropy(double(x + s * step), y, reduction="sum") for s in (1, -1))
        assert float(gradient[at]) == pytest.approx(float(up - down) / 2e-5, rel=1e-3, abs=1e-9)
    fused = [m for m in net.modules() if hasattr(m, "fused_attn")]
    assert fused
    assert all(m.fused_attn for m in fused)
    for module in fused:
        module.fused_attn = False
    assert torch.allclose(gradient, value_and_gradient(double, x, cross_entropy, y)[2], atol=1e-10)


def test_bad_folders_and_other_classes_get_clear_errors(photos, weights, tmp_path, capsys):
    other = tmp_path / "other" / "zebra"
    other.mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(other / "a.png")
    (tmp_path / "empty").mkdir()
    val = photos / "val"
    for words, text in (
        ((f"val={tmp_path / 'other'}",), "zebra"),
        ((f"val={tmp_path / 'empty'}",), "holds no images"),
        ((f"a={val}",), "200 classes"),
        ((f"real={val}",), "ReaL"),
        ((f"attack={val}", "--attack", "apdg-ce"), "apgd-ce"),
        ((f"attack={val}", "--eps", "4/0"), "eps"),
        ((f"attack={val}", "--eps", "inf"), "eps"),
        ((f"attack={val}", "--attack-steps", "0"), "attack_steps is 0"),
        ((f"corrupt={val}", "--severities", "6"), "severities is 6"),
        ((f"corrupt={val}", "--corruptions", "frog"), "fog"),
        ((f"val={val}", "--weights", "x.pth"), "timm:NAME"),
    ):
        assert robust(weights[0], tmp_path / "out", "--suite", *words) == 2
        assert text in capsys.readouterr().err


def transfer(source, out, *suite):
    words = ["--suite", *suite, "--device", "cpu", "--workers", "0", "--out", str(out)]
    flags = ["--epochs", "1", "--batch-size", "12", "--img-size", "32", "--warmup-epochs", "0", "--no-amp"]
    return main(["transfer", str(source), *words, "--", *flags, "--repeat-augment", "1"])


def test_transfer_finetunes_evaluates_and_tabulates(photos, weights, tmp_path, capsys):
    mine = (f"mine={photos}", "--recipe", "transfer_cifar10")
    assert transfer(weights[0], tmp_path, *mine) == 0
    rows = rows_of(tmp_path)
    assert rows["mine"]["images"] == 12
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert rows["mine"]["top-1"] == pytest.approx(summary["last"]["score"], abs=0.01)
    model = timm.create_model("vit_tiny_patch16_224", **TINY)
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "model_args": TINY, "pretrained_cfg": {}}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), tmp_path / "hub/model.safetensors")
    assert transfer(f"local-dir:{tmp_path / 'hub'}", tmp_path / "other", *mine) == 0  # whatever `robust` takes
    assert rows_of(tmp_path / "other")["mine"]["images"] == 12
    for suite, text in (("flowers", "2,040"), (f"mine={photos}", "recipe")):
        assert transfer(weights[0], tmp_path / "none", suite) == 2
        assert text in capsys.readouterr().err
    assert [target.name for target in parse_targets(())] == ["cifar10", "cifar100", "cars"]  # which need no folder


def test_another_token_vote_gives_other_numbers_and_needs_a_token_head(photos, weights, tmp_path, capsys):
    words = ("--suite", f"val={photos / 'val'}", "attack", *ATTACK, "--eps", "1/255")
    assert robust(weights[0], tmp_path / "none", *words, "--token-vote", "0.5") == 2
    assert "no token head" in capsys.readouterr().err
    head = torch.nn.Linear(32, 3)
    torch.nn.init.zeros_(head.weight)
    head.bias.data = torch.tensor([0.0, 0.0, 1000.0])  # its tokens say class-2, always
    about = Description("vit_tiny_patch16_224", TINY, NAMES, NAMES, **SEEN).to_metadata()
    save_file(load_file(weights[0]), tmp_path / "m.safetensors", metadata=about)
    save_file(head.state_dict(), tmp_path / "m.token_head.safetensors", metadata=about)
    tops = []
    for vote in ("0", "10", "0"):
        assert robust(tmp_path / "m.safetensors", tmp_path / "out", *words, "--token-vote", vote) == 0
        tops.append({name: row["top-1"] for name, row in rows_of(tmp_path / "out").items()})
    assert tops[0] == tops[2]
    assert float(tops[1]["val"]) == pytest.approx(100 / 3, abs=0.01)
    assert float(tops[1]["attack 1/255"]) == pytest.approx(100 / 3, abs=0.01)
    assert tops[0]["val"] != tops[1]["val"]


def test_unreadable_images_can_be_left_out_of_everything(photos, weights, tmp_path, monkeypatch, capsys):
    data = tmp_path / "photos"
    shutil.copytree(photos / "val", data)
    (data / "class-1" / "photo.0.png").write_bytes(b"no image")
    words = ["--suite", f"mine={data}", f"attack={data}", *ATTACK, "--eps", "1/255"]
    monkeypatch.setattr(robust_run, "ATTACK_BATCH", 1)  # the unreadable one is a batch of its own
    assert robust(weights[0], tmp_path / "out", *words) == 2
    assert "photo.0.png" in capsys.readouterr().err
    words += ["--on-bad-image", "skip"]
    for _ in range(2):  # the second time from what was kept
        assert robust(weights[0], tmp_path / "out", *words) == 0
        rows = rows_of(tmp_path / "out")
        assert {rows["mine"]["images"], rows["attack 1/255"]["images"]} == {11}
        said = capsys.readouterr().out
        assert "mine: left out 1 unreadable image" in said
        assert "attack 1/255: left out 1 unreadable image" in said
    monkeypatch.setattr(robust_run, "ATTACK_BATCH", 4)
    assert robust(weights[0], tmp_path / "other", *words) == 0
    assert rows_of(tmp_path / "other")["attack 1/255"] == rows["attack 1/255"]


def test_transfer_is_judged_by_the_images_that_were_held_out(photos, weights, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos / "train", tmp_path / "mine")
    assert transfer(weights[0], "out", "mine=mine", "--recipe", "transfer_cifar10") == 0
    (row,) = rows_of(tmp_path / "out").values()
    assert f"{row['images']} validation" in (tmp_path / "out/mine/log.txt").read_text()
    assert row["images"] < 36
    assert "that it held out (10%)" in (tmp_path / "out/table.txt").read_text()
    words = ("--suite", "mine=mine", "corrupt=mine", "--corruptions", "fog", "--severities", "1", "2")
    capsys.readouterr()
    assert robust("out/mine/best.safetensors", "robust", *words) == 0
    assert {r["images"] for r in rows_of(tmp_path / "robust").values()} == {row["images"]}
    assert capsys.readouterr().out.count("held out") == 1
    assert robust(weights[0], "robust", *words) == 0
    assert "training images may be among them" in capsys.readouterr().out

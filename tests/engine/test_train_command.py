"""`everytoken train` on real small images, through the real command line."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import timm
import torch

from everytoken_lab.cli import main
from everytoken_lab.engine.options import ModelOptions, TrainOptions
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.models.open import open_model
from everytoken_lab.training.classify import default_output

TINY = [
    *("--model", "vit_tiny_patch16_224", "--img-size", "32", "--workers", "0", "--batch-size", "8", "--epochs", "2"),
    *("--warmup-epochs", "0", "--lr", "0.001", "--aa", "", "--log-interval", "1", "--threads", "1", "--device", "cpu"),
    *("--set", "model_kwargs={patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}", "--drop-path", "0.2"),
]


def test_a_run_leaves_everything_in_its_folder_and_the_weights_load_in_timm(photos, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", str(photos), *TINY, "--out", str(out), "--model-ema", "--model-ema-decay", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "best top-1" in text
    expected = {"config.yaml", "environment.json", "metrics.jsonl", "log.txt", "summary.json"}
    assert expected | {"best.safetensors", "classes.json", "checkpoints"} <= {p.name for p in out.iterdir()}
    assert [row["epoch"] for row in read_run(out).epochs] == [1, 2]
    newest = sorted((out / "checkpoints").iterdir())[-1]
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3,
        checkpoint_path=newest / "model.safetensors",
    )  # fmt: skip
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
    loaded = open_model(out)
    assert loaded.info.class_names == ("class-0", "class-1", "class-2")
    assert loaded.info.img_size == (32, 32)


@pytest.mark.parametrize(("given", "weight"), [("{}", 0.1), ("{weight: paper}", 0.01)])
def test_the_log_states_lambda_of_drloc(photos, tmp_path, capsys, given, weight):
    words = ["train", str(photos), *TINY, "--epochs", "1", "--set", f"objectives.drloc={given}"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert f"drloc: weight={weight}, variant='l1', distances divided by the grid's size" in capsys.readouterr().out


def test_json_is_all_that_is_printed_on_stdout(photos, tmp_path, capsys):
    assert main(["train", str(photos), *TINY, "--epochs", "1", "--out", str(tmp_path / "run"), "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["run"], result["epochs"]) == (str(tmp_path / "run"), 1)
    assert "best top-1" in printed.err


def test_the_help_begins_with_the_flags_of_its_first_example(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    minutes = text.index("--minutes FLOAT")
    assert minutes < text.index("--model STR")
    assert "(default: 20)" in text[minutes : text.index("--model STR")]


@pytest.mark.timeout(900)  # four starts of the whole program
def test_kills_at_random_moments_do_not_change_the_result(photos, tmp_path, start):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    words = ["train", str(photos), *TINY, "--epochs", "3", "--checkpoint-steps", "1", "--set", "mixing.mixtoken={}"]
    assert main([*words, "--out", str(whole)]) == 0
    rng = random.Random(1)
    kills = 0
    for attempt in range(2):
        program = start(*words, "--out", cut, "--workers", attempt % 2)
        wanted = sum(1 for _ in rows_or_none(cut)) + rng.randint(1, 3)
        deadline = time.monotonic() + 120
        while program.poll() is None and sum(1 for _ in rows_or_none(cut)) < wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        kills += program.kill() == -signal.SIGKILL
    assert kills >= 2
    program = start(*words, "--out", cut, "--workers", "2")
    assert program.wait() == 0, program.err
    assert "continuing from" in program.out
    newest = [sorted((f / "checkpoints").iterdir())[-1] for f in (whole, cut)]
    assert newest[0].name == newest[1].name
    assert (newest[0] / "model.safetensors").read_bytes() == (newest[1] / "model.safetensors").read_bytes()
    assert [r["loss"] for r in read_run(whole).steps] == [r["loss"] for r in read_run(cut).steps]


def rows_or_none(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def test_sigterm_to_the_whole_group_saves_and_exits_with_143(photos, tmp_path):
    """As it is typed: a process that nothing else was done in."""
    words = [str(photos), *TINY, "--epochs", "200", "--workers", "1", "--out", str(tmp_path / "r")]
    process = subprocess.Popen(
        [sys.executable, "-m", "everytoken_lab", "train", *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not rows_or_none(tmp_path / "r"):
        time.sleep(0.05)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "continues from here" in text
    assert list((tmp_path / "r/checkpoints").glob("step-*"))


def test_a_finished_run_without_its_checkpoints_is_not_trained_over(photos, tmp_path, capsys):
    out = tmp_path / "r"
    words = ["train", str(photos), *TINY, "--epochs", "1", "--out", str(out)]
    assert main(words) == 0
    assert main(words) == 0  # as long as they are there, the command may be repeated
    assert "there is nothing to do" in capsys.readouterr().out
    shutil.rmtree(out / "checkpoints")
    best = (out / "best.safetensors").read_bytes()
    for more in ([], ["--seed", "7"]):
        assert main([*words, *more]) == 2
        assert "Choose another output, or delete the folder" in capsys.readouterr().err
    assert (out / "best.safetensors").read_bytes() == best


def test_finetuning_changes_resolution_and_classes(photos, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", str(photos), *TINY, "--epochs", "1", "--out", str(out)]) == 0
    small = ["--workers", "0", "--batch-size", "8", "--threads", "1", "--epochs", "1", "--device", "cpu"]
    larger = ["train", str(photos), "--weights", str(out), "--img-size", "48", *small]
    assert main([*larger, "--out", str(tmp_path / "large")]) == 0
    assert "resized to fit: pos_embed" in capsys.readouterr().out
    assert open_model(tmp_path / "large").info.img_size == (48, 48)
    config = (tmp_path / "large/config.yaml").read_text()
    assert "weight_decay: 1.0e-08" in config
    (tmp_path / "other/train").mkdir(parents=True)
    (tmp_path / "other/val").mkdir()
    for split in ("train", "val"):
        for c in (0, 1):
            (tmp_path / f"other/{split}/own-{c}").symlink_to(photos / split / f"class-{c}")
    assert main(["train", str(tmp_path / "other"), "--weights", str(out), *small, "--out", str(tmp_path / "t")]) == 0
    assert "left out" in capsys.readouterr().out
    assert open_model(tmp_path / "t").info.class_names == ("own-0", "own-1")
    assert "weight_decay: 0.05" in (tmp_path / "t/config.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--set", "objectives.token_labeling={}"], "needs score maps"),
        (["--set", "objectives.tl_align={}"], "nothing is mixed"),
        (["--set", "objectives.distillation={}"], "needs a teacher"),
        (["--set", "objectives.tokens={}"], "no objective 'tokens'"),
        (["--set", "objectives.hard.smoothin=0.1"], "'smoothing'"),
        (["--set", "mixing.cutmix.alpa=1"], "'alpha'"),
        (["--model", "resnet18", "--set", "mixing.mixtoken={}"], "CutMix"),
        (["--model", "vit_tinny"], "Did you mean"),
        (["--maps", "nowhere"], "no store of score maps at nowhere"),
        (["--recipe", "lvvit_s_tokn"], "lvvit_s_token"),
        (["--epochs", "0"], "epochs is 0"),
        (["--batch-size", "100"], "--batch-size"),
        (["--lr", "nan"], "lr is nan"),
        (["--model-ema-decay", "1.5"], "model_ema_decay is 1.5"),
        (["--opt", "bnbadam"], "opt bnbadam cannot be used here"),
    ],
)
def test_contradictions_are_explained_before_training(photos, tmp_path, capsys, words, what):
    assert main(["train", str(photos), *TINY, "--out", str(tmp_path / "r"), *words]) == 2
    assert what in capsys.readouterr().err
    assert not list(tmp_path.glob("r/checkpoints/*"))


def test_two_processes_do_not_train_in_one_folder(photos, tmp_path, capsys, start):
    """Nor does a killed one leave anything that keeps the next from going on."""
    out = tmp_path / "r"
    words = [str(photos), *TINY, "--epochs", "400", "--out", str(out)]
    program = start("train", *words)
    while not list(out.glob("checkpoints/step-*")):
        time.sleep(0.05)
        assert program.poll() is None
    assert main(["train", *words]) == 2
    text = capsys.readouterr().err
    assert f"another process is training in {out}" in text
    assert program.poll() is None
    program.kill()
    epochs = str(len(read_run(out).epochs) + 1)
    assert main(["train", *words, "--epochs", epochs]) == 0
    assert "continuing from" in capsys.readouterr().out


def test_missing_data_is_explained(tmp_path, capsys):
    assert main(["train"]) == 2
    assert "everytoken train DATA" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "nowhere"), *TINY]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told_before_torch_is_imported(tmp_path):
    (tmp_path / "photos").mkdir()
    code = "import sys; from everytoken_lab.cli import main; sys.exit(main(sys.argv[1:]) + ('torch' in sys.modules))"
    words = [sys.executable, "-c", code, "train", "phtos"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "There is no file or folder phtos. Did you mean 'photos'?" in done.stderr


def test_a_folder_of_another_run_is_named_before_anything_is_loaded(photos, tmp_path, capsys):
    words = ["train", str(photos), *TINY, "--epochs", "1", "--out", str(tmp_path / "run")]
    assert main(words) == 0
    assert "epoch 1/1: validation top-1" in capsys.readouterr().out
    kept = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    for more, what in (
        (["--img-size", "48"], r"img_size 32 and not 48"),
        (["--seed", "5"], r"seed 42 and not 5"),
        (["--set", "model_kwargs.depth=3"], "model_kwargs"),
    ):
        assert main([*words, "--epochs", "2", *more]) == 2
        assert re.search(what, capsys.readouterr().err)
    assert main([*words, "--lr", "0.5"]) == 0  # finished: its record stays as it was
    assert "nothing to do" in capsys.readouterr().out
    now = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    assert {n for n in now if now[n] != kept.get(n)} <= {"log.txt"}
    moved = photos.parent / "moved"
    moved.symlink_to(photos)
    assert main([*words[:1], str(moved), *words[2:], "--epochs", "2"]) == 0  # the same place by another name


def test_fine_tuning_has_a_folder_of_its_own_for_each_size():
    plain = TrainOptions(data="photos", model=ModelOptions(model="test_vit", img_size=64))
    assert default_output(plain) == "runs/train-test_vit-photos-seed42"
    tuned = TrainOptions(data="photos", model=ModelOptions("test_vit", img_size=64, weights="runs/a"))
    assert default_output(tuned) == "runs/finetune-test_vit-64px-photos-seed42"


def test_one_class_is_nothing_to_learn(photos, tmp_path, capsys):
    for part in ("train/class-0", "val/class-0"):
        shutil.copytree(photos / part, tmp_path / "one" / part)
    assert main(["train", str(tmp_path / "one"), *TINY, "--out", str(tmp_path / "r")]) == 2
    assert "one class only (class-0)" in capsys.readouterr().err

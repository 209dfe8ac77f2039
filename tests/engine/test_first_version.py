"""Run folders of the first version open, and their runs continue to the same weights."""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from everytoken.cli import main
from everytoken.engine.run_folder import read_run

KEPT = Path(__file__).parent / "data" / "first-version-run.tar.gz"  # killed after the first of two epochs


@pytest.fixture
def run(tmp_path):
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_a_run_of_the_first_version_is_read(run):
    kept = read_run(run)
    assert kept.troubles == []
    assert kept.config["maps"] == ""  # it was called labels
    assert [row["epoch"] for row in kept.history] == [1, 2]
    assert kept.load().class_names == ("class-0", "class-1", "class-2")


def test_a_run_of_the_first_version_continues_to_the_same_weights(run, photos, capsys):
    architecture = "patch_size: 8, embed_dim: 4, depth: 1, num_heads: 1, pos_embed: none, class_token: false"
    words = [
        *("--model", "vit_tiny_patch16_224", "--img-size", "32", "--workers", "0", "-b", "12", "--epochs", "2"),
        *("--warmup-epochs", "0", "--lr", "0.001", "--aa", "", "--threads", "1", "--device", "cpu"),
        *("--log-interval", "1", "--set", f"model_kwargs={{{architecture}, global_pool: avg}}", "--output", str(run)),
    ]
    assert main(["train", str(photos), *words]) == 0
    assert "continuing from step-00000003: epoch 2, 0 of its 3 updates done" in capsys.readouterr().out
    expected, weights = (
        load_file(run / "expected.safetensors"),
        load_file(run / "checkpoints/step-00000006/model.safetensors"),
    )
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)

"""Runs for reports: two seeds of a plain and of an every-token model, really trained, on small photos."""

import json
import re
from pathlib import Path

import pytest

from everytoken_lab.cli import main

COMMON = [
    "--model", "vit_nano_patch4_32", "--set", "model_kwargs={embed_dim: 32, depth: 1, num_heads: 2}",
    "--img-size", "32", "--epochs", "2", "--warmup-epochs", "0", "--batch-size", "12", "--workers", "0",
    "--log-interval", "1", "--aa", "", "--reprob", "0", "--device", "cpu", "--threads", "1",
]  # fmt: skip


def facts_of(page: Path) -> dict:
    """What a page holds."""
    return json.loads(re.search(r'<script type="application/json" id="facts">(.*?)</script>', page.read_text())[1])


@pytest.fixture(scope="session")
def trained(photos, backbone, tmp_path_factory) -> Path:
    """A folder with runs plain-seed1, plain-seed2, token-seed1 and token-seed2, and the maps that were used."""
    root = tmp_path_factory.mktemp("trained")
    annotate = ["annotate", str(photos), "--out", str(root / "maps"), "--annotator", "fit", "--fit-model", backbone]
    assert main([*annotate, "--workers", "0", "--device", "cpu"]) == 0
    kinds = {
        "plain": [],
        "token": ["--maps", str(root / "maps"), "--set", "objectives.token_labeling={class_target: both}"],
    }
    for seed in ("1", "2"):
        for kind, words in kinds.items():
            place = root / "runs" / f"{kind}-seed{seed}"
            assert main(["train", str(photos), *COMMON, *words, "--seed", seed, "--out", str(place)]) == 0
    return root

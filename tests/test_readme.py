"""The code of README.md and of three pages, run as it stands but for its sizes."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import everytoken
import everytoken_lab
from everytoken import keyed
from everytoken.maps import MapWriter, ScoreMap, StoreMeta
from everytoken_lab.cli import main
from everytoken_lab.data.datasets import open_dataset

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"
SMALLER = {
    "deit_small_patch16_224": "test_vit",
    "num_classes=10": "num_classes=2",
    "RandomResizedCrop(224)": "RandomResizedCrop(160)",
    "DataLoader(data, 64,": "DataLoader(data, 4,",
}
TWINS = {
    'recipe="small_96_token", epochs=30': (
        'recipe="small_96_token", epochs=1, model="test_vit", img_size=160, batch_size=4, workers=0, device="cpu", '
        'objectives={"token_labeling": {"class_target": "truth"}}, warmup_epochs=0'
    ),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Photos of two classes and their maps, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = keyed.generator(0, name, number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    data = open_dataset("photos", "all")
    one = ScoreMap(
        np.full((3, 3, 2), 1, np.float16),
        np.array([0, 1], np.uint32) * np.ones((3, 3, 1), np.uint32),
        (32, 24),
        (0.0, 0.0, 1.0, 1.0),
    )
    with MapWriter("maps", data.keys(), StoreMeta((3, 3), 2, data.class_names)) as writer:
        writer.write(dict.fromkeys(data.keys(), one))
        writer.finalize()
    return tmp_path


def snippet(page: Path, smaller: dict[str, str]) -> str:
    code = page.read_text().split("```python\n")[1].split("```")[0]
    for large, small in smaller.items():
        assert large in code
        code = code.replace(large, small)
    return code


def test_the_script_of_the_page_runs_and_leaves_a_plain_timm_model(here):
    names: dict = {}
    exec(compile(snippet(DOCS / "own-pipeline.md", SMALLER), "own-pipeline.md", "exec"), names)
    config = timm.create_model("deit_small_patch16_224").pretrained_cfg
    normalize = names["pipeline"].transforms[-1]
    assert (tuple(normalize.mean), tuple(normalize.std)) == (config["mean"], config["std"])
    plain = timm.create_model("test_vit", num_classes=2)
    plain.load_state_dict(torch.load("plain_timm_model.pt", weights_only=True))


def test_the_loop_of_the_readme_trains(here):
    smaller = {large: small for large, small in SMALLER.items() if "Crop" not in large}
    setup, loop = snippet(README, smaller).split("for batch in")
    names: dict = {"et": everytoken, "timm": timm, "ImageFolder": ImageFolder, "DataLoader": DataLoader}
    names["pipeline"] = v2.Compose([v2.RandomResizedCrop(160), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    exec(setup, names)
    before = [weight.clone() for weight in names["model"].parameters()]
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), 5e-4)
    exec(f"for batch in{loop}", names)
    assert any(not torch.equal(a, b) for a, b in zip(before, names["model"].parameters(), strict=True))


def test_the_commands_are_functions(here, capsys):
    (here / "new-photos").symlink_to(here / "photos")
    names: dict = {}
    exec(compile(snippet(DOCS / "train.md", TWINS), "train.md", "exec"), names)
    assert (here / "report.html").stat().st_size > 10_000
    assert "cat" in capsys.readouterr().out
    assert names["run"].summary["epochs"] == 1
    plain = timm.create_model(f"local-dir:{names['run'].path}", pretrained=True)  # a run is a model of plain timm
    trained = everytoken_lab.load(names["run"].path).model.backbone.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in plain.state_dict().items())
    assert tuple(plain.pretrained_cfg["input_size"]) == (3, 160, 160)
    assert list(plain.pretrained_cfg["label_names"]) == ["cat", "dog"]


def test_the_objective_of_the_page_trains_by_its_import_path(here, monkeypatch):
    text = (DOCS / "own-objective.md").read_text(encoding="utf-8")
    (here / "smooth_tokens.py").write_text(text.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(str(here))
    command = next(line for line in text.splitlines() if line.startswith("PYTHONPATH"))
    small = "--model test_vit --img-size 160 --epochs 1 --warmup-epochs 0 --batch-size 4 --workers 0 --device cpu"
    assert main([*shlex.split(command)[2:], *small.split(), "--out", "run"]) == 0
    sys.modules.pop("smooth_tokens")
    rows = (json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines())
    assert any(0 < value < 2 for row in rows for name, value in row.items() if name.endswith("jumps"))

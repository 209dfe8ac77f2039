"""The snippets of docs/models.md and docs/alignment.md run as they stand."""

import importlib.util
import re
from pathlib import Path

import timm
import torch

DOCS = Path(__file__).parents[2] / "docs" / "alignment.md"
MODELS = DOCS.with_name("models.md")


def test_the_snippet_for_ones_own_loop_trains_a_plain_timm_model():
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S).group(1)
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", depth=2, num_classes=5).train()
    images, labels = torch.randn(4, 3, 224, 224), torch.tensor([0, 1, 2, 3])
    given = {"model": model, "images": images, "labels": labels}
    exec(code, given)
    given["loss"].backward()
    assert 0.05 < given["mix"].ratio[0] < 0.95
    assert (given["shares"].shares.image - given["mix"].ratio).abs().max() > 0
    assert model.blocks[0].attn.qkv.weight.grad.abs().sum() > 0
    assert list(model.state_dict()) == list(timm.create_model("deit_tiny_patch16_224", depth=2).state_dict())


def test_the_token_model_of_the_page_has_the_shapes_that_are_written_there():
    code = re.search(r"```python\n(.*?)```", MODELS.read_text(encoding="utf-8"), re.S).group(1)
    given = {}
    exec(code, given)
    for name, shape in re.findall(r"^(view\.\w+) *# (\[[\d, ]+\])", code, re.M):
        assert str(list(eval(name, given).shape)) == shape


def test_every_model_that_the_page_names_is_registered():
    names = re.findall(r"`((?:lvvit|t2t_vit|cvt)_\w+)`", MODELS.read_text(encoding="utf-8"))
    assert {"lvvit_t", "t2t_vit_t_14", "cvt_21"} <= set(names)
    assert all(timm.is_model(name) for name in names)


def test_the_table_of_timms_modules_is_what_the_script_prints():
    page, path = MODELS.read_text(encoding="utf-8"), MODELS.with_name("make_models_table.py")
    spec = importlib.util.spec_from_file_location("make_models_table", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = page.partition(script.HEADER)[2].split("\n\n")[0].strip().splitlines()
    wanted = [script.known(module, names) for module, names in script.modules().items()]
    assert len(rows) == len(wanted)
    for row, start in zip(rows, wanted, strict=True):
        assert row.startswith(start)
    for name in ("volo", "cait"):
        (row,) = (row for row in rows if row.startswith(f"| `{name}` "))
        assert row.endswith(f"| {script.aligned(script.modules()[name])} |")


def test_the_picture_of_the_page_is_there():
    for name in re.findall(r"\]\((img/[^)]+)\)", DOCS.read_text(encoding="utf-8")):
        assert (DOCS.parent / name).stat().st_size > 10_000

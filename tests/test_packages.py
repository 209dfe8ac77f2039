"""Two packages: the library needs neither the lab nor what the lab needs, and the lab says what is missing. Importing
the library is quick, quiet, and leaves no trace in global state."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
LIBRARY = {"torch", "timm", "torchvision", "numpy", "PIL", "safetensors", "filelock", "everytoken"}
# torch and timm themselves import yaml and typing_extensions, which the lab needs too
LAB = ["pydantic", "tyro", "rich", "jinja2", "sklearn", "simplejpeg", "matplotlib", "fsspec", "scipy", "everytoken_lab"]
HIDE = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in NAMES else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""


def imports(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, in functions and for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            names.add(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return {name.partition(".")[0] for name in names}


def test_the_library_imports_neither_the_lab_nor_what_the_lab_needs():
    for path in sorted((SOURCE / "everytoken").rglob("*.py")):
        foreign = imports(path) - LIBRARY - sys.stdlib_module_names
        assert not foreign, f"{path.relative_to(SOURCE)} imports {', '.join(sorted(foreign))}"


def run(hidden: list[str], code: str) -> subprocess.CompletedProcess:
    script = f"NAMES = {hidden!r}\n{HIDE}\n{code}"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=200)


def printed(code: str) -> str:
    """What a program prints that runs without trouble."""
    done = run([], code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STEP = """
import numpy as np, timm, torch, everytoken as et
from everytoken.functional import collate_maps

model = et.TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=5), token_classes=7)
objectives = {"tokens": et.TokenLabeling(), "drloc": et.Drloc(model), "align": et.TLAlign(model)}
step = et.TokenStep(model, objectives, et.CutMix())
rng = np.random.default_rng(0)
score_map = et.ScoreMap.from_logits(rng.normal(2, 3, (6, 6, 7)), 3, (32, 32))
batch = et.Batch(
    torch.randn(4, 3, 32, 32),
    torch.tensor([0, 1, 2, 3]),
    placement=torch.eye(2, 3).expand(4, 2, 3),
    maps=collate_maps([score_map] * 4, 7),
)
terms = step(batch)
terms["loss"].backward()
assert terms["loss"].isfinite() and {"tokens/token", "drloc/l1", "align/class"} <= terms.keys()
assert all(p.grad is not None for p in step.parameters() if p.requires_grad)
maps = et.Maps(STORE)
assert maps[next(iter(maps))].scores.ndim == 3
import everytoken.data.adapter, everytoken.timm_task
print("done")
"""


def test_the_library_trains_and_reads_score_maps_without_the_labs_packages(photo_maps):
    done = run(LAB, f"STORE = {str(photo_maps)!r}\n{STEP}")
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.parametrize(
    "start",
    [
        "import runpy; runpy.run_module('everytoken_lab', run_name='__main__')",
        "from everytoken_lab.cli import main; sys.exit(main())",
    ],
    ids=["module", "console script"],
)
def test_the_command_line_says_in_one_line_what_to_install(start):
    done = run(
        [name for name in LAB if name != "everytoken_lab"], f"sys.argv = ['everytoken', 'train', 'photos']\n{start}"
    )
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"everytoken: \w+ is not installed\. Install: pip install .*lab.*\n", done.stderr)


def test_importing_the_package_imports_neither_torch_nor_timm():
    loaded = printed(
        "import everytoken, sys; print([m for m in ('torch', 'timm', 'numpy', 'rich', 'yaml') if m in sys.modules])"
    )
    assert loaded == "[]"


def test_models_are_known_to_timm_that_is_imported_later():
    first = "import everytoken; from timm.models import is_model; import timm"
    shown = "loader.__class__.__name__, loader.exec_module.__name__"  # other modules may share the loader
    assert printed(f"{first}; loader = timm.__spec__.loader; print(is_model('lvvit_s'), {shown})") == (
        "True SourceFileLoader exec_module"
    )


def test_importing_after_timm_registers_models_too_and_touches_no_global_random_state():
    code = (
        "import random, numpy, torch, timm\n"
        "random.seed(1); numpy.random.seed(1); torch.manual_seed(1)\n"
        "before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "import everytoken, everytoken.models, everytoken.functional, everytoken.data, everytoken.mixing\n"
        "import everytoken.objectives, everytoken.maps\n"
        "after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "print(before == after, timm.is_model('lvvit_s'))"
    )
    assert printed(code) == "True True"

"""Importing the package: quick, quiet, and without a trace in global state."""

import subprocess
import sys


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_imports_neither_torch_nor_timm():
    loaded = run(
        "import everytoken, sys; print([m for m in ('torch', 'timm', 'numpy', 'rich', 'yaml') if m in sys.modules])"
    )
    assert loaded == "[]"


def test_models_are_known_to_timm_whichever_is_imported_first():
    first = "import everytoken; from timm.models import is_model; import timm"
    assert run(f"{first}; print(is_model('lvvit_s'), timm.__spec__.loader.__class__.__name__)") == (
        "True SourceFileLoader"
    )
    assert run("import timm, everytoken; print(timm.is_model('lvvit_s'))") == "True"


def test_importing_touches_no_global_random_state():
    code = (
        "import random, numpy, torch, timm\n"
        "random.seed(1); numpy.random.seed(1); torch.manual_seed(1)\n"
        "before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "import everytoken, everytoken.models, everytoken.functional, everytoken.data, everytoken.mixing\n"
        "import everytoken.objectives, everytoken.maps\n"
        "after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()\n"
        "print(before == after)"
    )
    assert run(code) == "True"

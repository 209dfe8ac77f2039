"""A part of `benchmarks/faults.py`: damaged and hostile input, and a tenth of the classes of attack."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost_and_nothing_ends_in_a_traceback(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    tallies = list(importlib.import_module("fuzz").attacks(tmp_path, share=0.08, seed=1))
    assert len(tallies) >= 13
    assert sum(tally.tried for tally in tallies) > 200
    assert [note for tally in tallies for note in tally.notes] == []
    assert sum(tally.bad for tally in tallies) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="pipes, devices, forks")
def test_a_tenth_of_each_class_of_attack_holds(tmp_path):
    """In processes of its own: what has trained cannot be forked."""
    table = tmp_path / "table.json"
    words = [sys.executable, str(BENCHMARKS / "faults.py"), "--only", "attacks", "--share", "0.1", "--json", str(table)]
    words += ["--seed", "46"]  # with which all classes have two tries or more
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *classes, total = json.loads(table.read_text())
    assert len(classes) == 14
    assert min(row["tried"] for row in classes) > 0
    assert total["tried"] == total["held"]

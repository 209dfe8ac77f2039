"""A part of `benchmarks/faults.py`: damaged and hostile input, without processes of its own."""

import importlib
from pathlib import Path

import pytest


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost_and_nothing_ends_in_a_traceback(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    tallies = list(importlib.import_module("fuzz").attacks(tmp_path, share=0.08, seed=1))
    assert len(tallies) >= 13
    assert sum(tally.tried for tally in tallies) > 200
    assert [note for tally in tallies for note in tally.notes] == []
    assert sum(tally.lost + tally.tracebacks for tally in tallies) == 0

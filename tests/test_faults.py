"""A part of `benchmarks/faults.py`: damaged and hostile input, without processes of its own."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost_and_nothing_ends_in_a_traceback(tmp_path):
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    fuzz = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    tallies = list(fuzz.attacks(tmp_path, share=0.08, seed=1))
    assert len(tallies) >= 14
    assert sum(tally.tried for tally in tallies) > 200
    assert [note for tally in tallies for note in tally.notes] == []
    assert sum(tally.lost + tally.tracebacks for tally in tallies) == 0

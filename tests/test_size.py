"""Budgets: a change that needs more room deletes something of equal size. Lines count as they stand, docstrings too."""

from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
LINES = {"everytoken": 10_840, "everytoken_lab": 21_221}  # to be lowered with every cut
FILES = 155


def test_the_packages_stay_within_their_budgets():
    over = []
    files = {name: sorted((SOURCE / name).rglob("*.py")) for name in LINES}
    for name, most in LINES.items():
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files[name])
        if lines > most:
            over.append(f"{name} has {lines:,} lines of Python, {lines - most:,} more than its budget of {most:,}")
    count = sum(map(len, files.values()))
    if count > FILES:
        over.append(f"src has {count} Python files, {count - FILES} more than {FILES}")
    assert not over, "; ".join(over)

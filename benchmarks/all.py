"""Every benchmark, one after the other, and the page that keeps what they said.

    make bench                                   # or: python benchmarks/all.py [--photos FOLDER] [--only store align]

Each script measures ratios in one process, runs in turns, in CPU time where it can; this one runs them with one thread,
watches how busy the machine is, prints their tables and writes docs/benchmarks.md with machine, date and versions. The
page begins with every goal and whether it is held. Half an hour on two cores; `--only` measures some sections again and
leaves the others as they are. A section that was measured on a busy machine says so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
SCRIPTS = {
    "store": "Reading and opening stores of score maps",
    "targets": "Token targets and the token-label loss, against the released algorithm",
    "inference": "Networks on the CPU, against PyTorch's eager mode",
    "annotate": "Annotating, against the bare network",
    "step": "A training step with token labeling, and the loop's own work",
    "drloc": "Dense relative localization in a training step",
    "align": "TL-Align in a training step, against the paper's algorithm",
    "corrupt": "Corruptions, images per second",
    "loader": "The loader, against timm's",
}
NEEDS_PHOTOS = {"loader"}
BUSY = 1.1


def busy() -> float:
    """Wall time over CPU time of a second of work: 1 on an idle machine, 2 when another program wants the same core."""
    cpu, wall = time.process_time(), time.perf_counter()
    while time.process_time() - cpu < 1.0:
        sum(range(10_000))
    return (time.perf_counter() - wall) / (time.process_time() - cpu)


def run(name: str, words: list[str]) -> tuple[str, int, float, float]:
    """(what it printed, exit code, minutes, how busy the machine was: the larger of before and after)."""
    before, begun = busy(), time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *words], capture_output=True, text=True, env=environment, check=False
    )
    minutes = (time.perf_counter() - begun) / 60
    said = done.stdout if done.returncode in (0, 1) else done.stdout + done.stderr[-2000:]
    said = "\n".join(line for line in said.splitlines() if not re.match(r"(USDT|ERROR):\d|epoch \d+/", line))
    return said.strip(), done.returncode, minutes, max(before, busy())


def machine() -> str:
    """One line about the processor, and the versions that matter."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        model = found[1] if found else model
    names = ("everytoken", "torch", "timm", "numpy", "pillow")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}"


def kept() -> dict[str, str]:
    """The sections of the page as it is, by script."""
    text = PAGE.read_text() if PAGE.exists() else ""
    sections = [f"## {part}".rstrip() + "\n" for part in text.split("\n## ")[1:]]
    return {name: part for part in sections for name, title in SCRIPTS.items() if part.startswith(f"## {title}\n")}


def write(parts: dict[str, str]) -> None:
    about = (
        "Made by `make bench`. Ratios come from one run each, in which the things compared take turns (corruptions are "
        "rates). What each number means is in the head of its script."
    )
    body = "\n".join(parts[name] for name in SCRIPTS if name in parts)
    goals = re.findall(r"^goal: (.*\|.*)$", body, re.MULTILINE)
    if goals:
        table = "\n".join(f"| {line} |" for line in goals)
        about += (
            "\n\nMedians with 95 % intervals. A goal is held or broken when the whole interval is on one side.\n\n"
            f"| what | goal | reached | |\n|---|---|---|---|\n{table}"
        )
    PAGE.write_text(f"# Benchmarks\n\n{about}\n\n{machine()}. One thread.\n\n{body}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", default="", help="folder of photos, for the loader")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, help="these; the page keeps what it says about others")
    given = parser.parse_args()
    parts, code = kept(), 0
    for name in given.only or SCRIPTS:
        if name in NEEDS_PHOTOS and not given.photos:
            print(f"{name}: left out, it needs --photos FOLDER")
            continue
        print(f"== {SCRIPTS[name]} (benchmarks/{name}.py)", flush=True)
        said, failed, minutes, load = run(name, [given.photos] if name in NEEDS_PHOTOS else [])
        trust = "quiet" if load < BUSY else f"busy (x{load:.2f}): trust CPU times only"
        note = f"{datetime.date.today():%d %B %Y}, {minutes:.1f} min; the machine was {trust}"
        print(f"{said}\n{note}\n", flush=True)
        code = max(code, failed)
        limits = {0: "", 1: " A goal is broken."}.get(failed, f" It failed with exit code {failed}.")
        parts[name] = f"## {SCRIPTS[name]}\n\n`python benchmarks/{name}.py`; {note}.{limits}\n\n```\n{said}\n```\n"
        write(parts)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

"""Run the commands of the stories through a shell, with a few images and one epoch: `make stories`, or

    python docs/stories/run.py [tl-align ...] [--work FOLDER]

Every ```sh block of a page is run in its order; the first command that fails ends it. Training is shortened by flags
that are added to the commands; all else is what the pages say. Photos come from the demo, masks and boxes are drawn.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHORT = """
set -eu
everytoken() {
    case "$1 $2" in
        "train "*) set -- "$@" --epochs 1 --batch-size 10 --workers 0 ;;
        "segment train" | "detect train") set -- "$@" --iters 2 --val-iters 2 --warmup-iters 1 --workers 0 ;;
        "robust "*) set -- "$@" --limit 10 --attack-steps 2 --corruptions blur --severities 1 ;;
    esac
    printf '\\n$ everytoken %s\\n' "$*"
    command everytoken "$@"
}
"""


def commands(story: str) -> str:
    """The page's commands with few images."""
    blocks = re.findall(r"```sh\n(.*?)```", (HERE / f"{story}.md").read_text(encoding="utf-8"), re.S)
    return "".join(blocks).replace("photos 1000 500", "photos 40 20")


def draw(folder: Path) -> None:
    """scenes/ with masks and objects/ with boxes, as the tests draw them, and other-photos/."""
    place = HERE.parents[1] / "tests" / "dense" / "conftest.py"
    spec = importlib.util.spec_from_file_location("drawn", place)
    assert spec is not None
    assert spec.loader is not None
    drawn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawn)
    drawn.make_shapes(folder / "scenes", size=(80, 72))
    drawn.make_objects(folder / "objects", {"train": 8, "val": 4})
    words = [sys.executable, "-m", "everytoken_lab.demo.images", "other-photos", "60", "20"]
    subprocess.run(words, cwd=folder, check=True)


def main() -> None:
    """Run all stories, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted(page.stem for page in HERE.glob("*.md"))
    parser.add_argument("stories", nargs="*", metavar="STORY", help=", ".join(known))
    parser.add_argument("--work", type=Path, help="a new folder to keep what is made")
    options = parser.parse_args()
    if unknown := set(options.stories) - set(known):
        parser.error(f"no story is called {' or '.join(sorted(unknown))}; there are {', '.join(known)}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as scratch:
        for story in options.stories or known:
            folder = (options.work or Path(scratch)) / story
            folder.mkdir(parents=True)
            draw(folder)
            print(f"\n=== {story} ===", flush=True)
            subprocess.run(
                ["bash", "-c", SHORT + commands(story)], cwd=folder, env={**os.environ, "PATH": path}, check=True
            )


if __name__ == "__main__":
    main()

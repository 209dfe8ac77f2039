"""`everytoken detect ...`: objects, their boxes and masks."""

from __future__ import annotations

import importlib

from everytoken.cli import dispatch

COMMANDS: dict[str, str] = {
    "train": "train Mask R-CNN or Cascade Mask R-CNN on a backbone",
    "eval": "COCO's average precision of boxes and masks",
    "predict": "write pictures of the objects in images, and their boxes and masks",
}


def main(argv: list[str], prog: str) -> int | None:
    """Call the command named by the first word."""
    if not argv or argv[0] not in COMMANDS:
        return dispatch(prog, COMMANDS, argv, "")  # the list of commands, or an error with a suggestion
    module = importlib.import_module(f"everytoken.cli.detect_{argv[0]}")
    code: int | None = module.main(argv[1:], f"{prog} {argv[0]}")
    return code

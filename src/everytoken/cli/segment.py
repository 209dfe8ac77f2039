"""`everytoken segment ...`: a class for every pixel."""

from __future__ import annotations

import importlib

from everytoken.cli import dispatch

COMMANDS: dict[str, str] = {
    "train": "train a segmenter on a backbone",
    "eval": "mIoU, mAcc and pixel accuracy of a segmenter, or of a classifier's token head",
    "predict": "write masks and pictures of images",
}


def main(argv: list[str], prog: str) -> int | None:
    """Call the command named by the first word."""
    if not argv or argv[0] not in COMMANDS:
        return dispatch(prog, COMMANDS, argv, "")  # the list of commands, or an error with a suggestion
    module = importlib.import_module(f"everytoken.cli.segment_{argv[0]}")
    code: int | None = module.main(argv[1:], f"{prog} {argv[0]}")
    return code

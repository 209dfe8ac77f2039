"""`everytoken labels ...`: look at, check and convert stores of score maps."""

from __future__ import annotations

import importlib

from everytoken.cli import dispatch

COMMANDS: dict[str, str] = {
    "info": "what is in a store, as a table",
    "sheet": "a picture of many maps on their images: wrong and interesting ones first",
    "show": "a picture of the maps of the images you name",
    "verify": "check every byte; names the images whose maps are damaged",
    "import": "make a store of released .pt maps (token labeling, ReLabel)",
    "export": "write a store as released .pt maps",
}
_HOME = {"info": "labels_show", "sheet": "labels_show", "show": "labels_show"}


def main(argv: list[str], prog: str) -> int | None:
    """Call the command named by the first word."""
    if not argv or argv[0] not in COMMANDS:
        return dispatch(prog, COMMANDS, argv, "")  # the list of commands, or an error with a suggestion
    module = importlib.import_module(f"everytoken.cli.{_HOME.get(argv[0], 'labels_files')}")
    code: int | None = getattr(module, f"{argv[0]}_main")(argv[1:], f"{prog} {argv[0]}")
    return code

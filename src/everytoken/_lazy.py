"""Names of a package that are imported when they are first used, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(package: str, modules: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """(`__getattr__`, `__dir__`) for a package's `__init__`.

    Args:
        package: `__name__` of the package.
        modules: absolute module name -> public names that live there.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return find, lambda: sorted(home)

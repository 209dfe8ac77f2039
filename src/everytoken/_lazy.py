"""Imports that wait: names of a package until they are used, and our models until somebody imports timm.

timm and torch take seconds to import, and much of this package (the command line's help, reading a store) needs
neither. So our models are registered now if timm is there already, or else right after it has been imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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


def register_with_timm() -> None:
    """Register everytoken's models with timm now or as soon as somebody imports it."""
    if "timm" in sys.modules:
        importlib.import_module("everytoken.models")
    elif not any(isinstance(finder, _AfterTimm) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTimm())


class _AfterTimm(MetaPathFinder):
    """Finds timm as usual, once, and adds a last step to its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("timm")
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                loader.exec_module = run  # type: ignore[method-assign]  # an archive has one loader for all modules
                run(module)
                importlib.import_module("everytoken.models")

            loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec

"""Shared by the store's tests: a module that fills stores, and the content of a store as bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def filling() -> ModuleType:
    """tests/labels/fill_store.py"""
    return _load("fill_store")


@pytest.fixture(scope="session")
def content():
    """All files of a store by name, locks left out."""

    def read(folder: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if not p.name.startswith(".lock-")}

    return read


@pytest.fixture(scope="session")
def reference(filling, content, tmp_path_factory) -> dict[str, bytes]:
    """The content of the store that ``filling.fill`` makes when nobody disturbs it."""
    folder = tmp_path_factory.mktemp("reference") / "store"
    filling.fill(folder)
    return content(folder)

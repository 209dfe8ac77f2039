"""Shared by the store's tests: a store, and the content of a store as bytes."""

from pathlib import Path

import pytest

from tests.maps import fill_store as filling


@pytest.fixture
def folder(tmp_path) -> Path:
    """A finished store."""
    filling.fill(tmp_path / "s")
    return tmp_path / "s"


@pytest.fixture(scope="session")
def content():
    """All files of a store by name, locks left out."""

    def read(folder: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if not p.name.startswith(".lock-")}

    return read


@pytest.fixture(scope="session")
def reference(content, tmp_path_factory) -> dict[str, bytes]:
    """The content of the store that ``filling.fill`` makes when nobody disturbs it."""
    folder = tmp_path_factory.mktemp("reference") / "store"
    filling.fill(folder)
    return content(folder)

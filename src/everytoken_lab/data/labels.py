"""Labels from a CSV file: `path` and `label`, several labels with ";" between them, and optionally `split`.

    path,label,split
    a/1.jpg,cat,train
    a/2.jpg,cat;dog,train
    b/3.jpg,;,val          (none of the classes)

Paths are relative to the file's own folder. As soon as one cell has a ";", the dataset is multi-label. Columns may be
in any order, others are ignored; they are divided by commas, semicolons (then cells with several labels are quoted, as
spreadsheets do) or tabs.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from everytoken.errors import DataError, did_you_mean
from everytoken.files import read_bytes

NAME = "labels.csv"
_COLUMNS = ("path", "label")
_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLITS |= dict.fromkeys(("val", "valid", "validation"), "val")


@dataclass(frozen=True)
class Row:
    """One image: its path with "/", its labels (sorted, each once; `several`: written with ";"), its split or ""."""

    line: int
    path: str
    labels: tuple[str, ...]
    several: bool = False
    split: str = ""


def find_labels(path: Path) -> Path | None:
    """The labels file that a path means: a .csv file, or `labels.csv` in a folder."""
    file = path if path.suffix.lower() == ".csv" else path / NAME
    return file if file.is_file() else None


def read_labels(file: Path) -> tuple[Row, ...]:
    """The rows of a labels file, sorted by path; every image that it names must be there."""
    status = file.stat()
    return _read(file, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4)
def _read(file: Path, changed: int, size: int) -> tuple[Row, ...]:
    """Once, although several questions are asked about it; anew when the file has changed."""
    rows = list(parse_labels(file))
    if not rows:
        raise DataError(f"{file} lists no images.")
    if missing := [row for row in rows if not os.path.isfile(file.parent / row.path)]:
        more = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        what = f"{file}, line {missing[0].line}: there is no file {missing[0].path}{more}."
        raise DataError(f"{what} Paths are relative to the folder of {file.name}.")
    return tuple(sorted(rows, key=lambda row: row.path))


def parse_labels(file: Path, corrections: bool = False) -> Iterator[Row]:
    """The rows of a file, in its order, checked but for whether the images are there.

    Args:
        corrections: of images that are known: cells may be empty, and paths are relative to the folder of their split.
    """
    lines = _rows(file)
    columns = _columns(file, next(lines, None))
    places = {name: columns.index(name) for name in (*_COLUMNS, "split") if name in columns}
    seen: dict[tuple[str, str], int] = {}
    for line, cells in lines:
        where = f"{file}, line {line}"
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) <= max(places.values()):
            raise DataError(f"{where} has {len(cells)} cells, and the first line {len(columns)}.")
        path = check_relative(_unquoted(cells[places["path"]]), where)
        text = _unquoted(cells[places["label"]])
        labels = tuple(sorted({label.strip() for label in text.split(";")} - {""}))
        if not text and not corrections:
            raise DataError(f"{where}: {path} has no label. Leave the line out, or write ; for an image without any.")
        split = cells[places["split"]].strip().lower() if "split" in places else ""
        again = (path, split if corrections else "")
        if again in seen:
            raise DataError(f"{where}: {path} was in line {seen[again]} already. Several labels go into one cell: a;b.")
        seen[again] = line
        if "split" in places and split not in _SPLITS:
            raise DataError(f"{where}: the split is {split!r}; it can be train, val or test.")
        yield Row(line, path, labels, ";" in text, _SPLITS.get(split, ""))


def _unquoted(cell: str) -> str:
    """A cell without the quote that keeps spreadsheets from taking it for a formula."""
    cell = cell.strip()
    return cell[1:] if cell.startswith("'") and cell[1:2] in ("=", "+", "-", "@") else cell


def check_relative(name: str, where: str) -> str:
    """A path that the file `where` names, with "/"; refused where it would lead out of the folder."""
    path = name.replace("\\", "/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise DataError(f"{where} has no path.")
    if path.startswith("/") or re.match(r"[A-Za-z]:", path) or ".." in parts or "\0" in path:
        raise DataError(f"{where} names the file {name!r}, which leaves the folder; paths are relative to the folder.")
    return "/".join(parts)


def _columns(file: Path, header: tuple[int, list[str]] | None) -> list[str]:
    columns = [] if header is None else [name.strip().lower() for name in header[1]]
    if not any(columns):
        raise DataError(f"{file} is empty.")
    if missing := [name for name in _COLUMNS if name not in columns]:
        raise DataError(
            f"{file}, line 1: there is no column {' and no column '.join(missing)}; there is {', '.join(columns)}."
            f"{did_you_mean(missing[0], columns)} It needs path and label, and may have split. Rename the "
            "file if it is something else."
        )
    return columns


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of a file, the header first."""
    text = read_text(file)
    first = text.split("\n", 1)[0].lower()
    fits = (d for d in ",;\t" if set(_COLUMNS) <= {name.strip().strip('"') for name in first.split(d)})
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=next(fits, ","))
    line = 1  # where the row begins; cells may have line breaks
    try:
        for cells in reader:
            yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{file}, line {line} cannot be read as CSV ({error}).") from error


def read_text(file: Path) -> str:
    """A text file that a person wrote or a spreadsheet saved: UTF-8, or UTF-16 with a byte order mark."""
    try:
        content = read_bytes(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}).") from error
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return content.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{file}, line {line} is not UTF-8 text: save the file as UTF-8.") from error

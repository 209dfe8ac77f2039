"""WebDataset shards: tar files in which the files of one sample share a name: 000123.jpg, 000123.cls.

The label is read from `.cls` (a number or a class name) or from the field "label", "cls" or "class" of `.json`. The
shards are indexed and read at random like other archives (see `archives`); nothing is streamed, so shuffling is
complete and resuming exact. Keys are the images' paths inside the shards and must be unique over all of them.
"""

from __future__ import annotations

import json

from everytoken.data.archives import ArchiveReader
from everytoken.data.places import Place
from everytoken.data.sources import DataError, ReaderSet, is_image
from everytoken.errors import did_you_mean

_LABELS = (".cls", ".json")
_FIELDS = ("label", "cls", "class")


def _stem(path: str) -> str:
    """WebDataset's sample name: up to the first dot of the file's name."""
    folder, slash, name = path.rpartition("/")
    return folder + slash + name.split(".", 1)[0]


def open_shards(place: Place, names: list[str] | None = None) -> ReaderSet | None:
    """The data set of some shards, or None if the place is not made of shards.

    Args:
        names: the classes (of the training shards, or given); None: taken from the labels.
    """
    reader = place.reader
    if reader is None:
        return None
    members = [(p, i) for i, p in enumerate(reader.paths) if p.startswith(place.prefix)]
    label_files = {_stem(p): i for p, i in members if p.endswith(_LABELS)}
    images = sorted((p, i) for p, i in members if is_image(p))
    if not label_files or not any(_stem(p) in label_files for p, _ in images):
        return None
    given = []
    for number, (path, i) in enumerate(images):
        if number and images[number - 1][0] == path:
            raise DataError(
                f"{place.name}: two samples have the name {path!r} ({reader.where(images[number - 1][1])} and "
                f"{reader.where(i)}). Names must be unique over all shards, because maps and logs go by them."
            )
        if _stem(path) not in label_files:
            raise DataError(f"{reader.where(i)} has no label: neither .cls nor .json of the same name is there.")
        given.append(_label(reader, label_files[_stem(path)]))
    labels, names = _numbers(place, given, names)
    cut = len(place.prefix)
    return ReaderSet(place.name, reader, [i for _, i in images], (p[cut:] for p, _ in images), labels, names)


def _label(reader: ArchiveReader, i: int) -> int | str:
    raw = reader.read(i).decode("utf-8", "replace").strip()
    if reader.paths[i].endswith(".json"):
        try:
            fields = json.loads(raw)
            value = next(fields[name] for name in _FIELDS if name in fields)
        except (ValueError, TypeError, StopIteration) as error:
            raise DataError(f"{reader.where(i)} has no field {' or '.join(map(repr, _FIELDS))}.") from error
        return value if isinstance(value, int) else str(value)
    return int(raw) if raw.isdecimal() else raw


def _numbers(place: Place, given: list[int | str], names: list[str] | None) -> tuple[list[int], list[str]]:
    """Labels as numbers, and the names of the classes."""
    kinds = {type(value) for value in given}
    if len(kinds) > 1:
        raise DataError(f"{place.name}: some labels are numbers and some are names; make them all alike.")
    if kinds == {int}:
        numbers = [int(value) for value in given]
        names = names or [str(k) for k in range(max(numbers) + 1)]
        if max(numbers) >= len(names) or min(numbers) < 0:
            raise DataError(
                f"{place.name}: the label {max(numbers) if min(numbers) >= 0 else min(numbers)} is not one of "
                f"{len(names)} classes (0 to {len(names) - 1}), which are those of the training shards or the list."
            )
        return numbers, names
    words = [str(value) for value in given]
    names = names or sorted(set(words))
    number = {name: k for k, name in enumerate(names)}
    unknown = sorted(set(words) - set(names))
    if unknown:
        raise DataError(f"{place.name}: the label {unknown[0]!r} is not one of the {len(names)} classes of the "
                        f"training shards or the list.{did_you_mean(unknown[0], names)}")  # fmt: skip
    return [number[word] for word in words], names

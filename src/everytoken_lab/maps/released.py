"""Import of released maps, `everytoken maps import` (the files: `everytoken.maps.released`).

Two images whose paths come to the same ``.pt`` name ("cat.1.jpg", "cat.2.jpg") cannot both own it: neither gets a map.
The released annotators saw images as they are stored, whatever their EXIF orientation says; here images are turned
upright, and their maps with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from everytoken.maps import Maps, MapWriter, ScoreMap, Skipped, StoreMeta, map_area
from everytoken.maps.format import StoreError
from everytoken.maps.released import read_released, released_path

Progress = Callable[[int, int], None]


def import_released(
    source: Path,
    out: Path,
    images: Path | None = None,
    num_classes: int = 1000,
    class_names: Path | None = None,
    resize_mode: str | None = None,
    progress: Progress | None = None,
) -> tuple[Maps, list[str]]:
    """Make a store of a tree of released ``.pt`` maps. Killed, the same call continues it.

    Args: see `everytoken maps import`.

    Returns:
        The store, whose `skipped` says why images have no map, and notes for the user.
    """
    from everytoken_lab.data.labels import read_text
    from everytoken_lab.data.tree import list_files

    if not source.is_dir():
        raise StoreError(f"there is no folder {source} with released maps.")
    label_files = sorted(list_files(source, lambda name: name.lower().endswith(".pt")))
    if not label_files:
        raise StoreError(f"{source} has no .pt files; give the folder that holds the class folders of released maps.")
    names = [] if class_names is None else read_text(class_names).splitlines()
    num_classes = len(names) or num_classes
    grid, top_k = _grid_and_k(source, label_files, num_classes)
    mode = resize_mode or ("squash" if grid == (15, 15) else "center")
    if mode != "squash" and images is None:
        raise StoreError(
            f"maps of {grid[0]}x{grid[1]} cells lie on the middle square of images of unknown size: give the "
            "image folder (images), or resize_mode 'squash' if they cover whole images, as ReLabel's do."
        )
    annotator, notes = {"name": "released maps"}, []
    if resize_mode is None:
        annotator["resize_mode"] = "assumed"
        notes.append(f"resize mode '{mode}' is assumed, because the files do not tell; resize_mode chooses another one")
    by_key = _match(label_files, images)
    folders = sorted({key.split("/")[0] for key in by_key if "/" in key})
    if not names and images is not None and len(folders) == num_classes:
        names = folders
        notes.append("class names are the names of the image folder's class folders, in sorted order")
    meta = StoreMeta(grid, top_k, names, num_classes, mode, annotator)
    with MapWriter(out, by_key, meta) as writer:
        pending = writer.pending_shards()
        done = len(by_key) - sum(len(writer.shard_range(shard)) for shard in pending)
        for shard in pending:
            for key in writer.shard_keys(shard):
                writer.write({key: _record(source, by_key[key], images, key, meta)})
                done += 1
                if progress is not None:
                    progress(done, len(by_key))
        store = writer.finalize()
    if unused := sorted(set(label_files) - {released_path(key) for key in by_key}):
        notes.append(f"{len(unused):,} label files have no image (for example {unused[0]})")
    return store, notes


def _record(root: Path, file: str, images: Path | None, key: str, meta: StoreMeta) -> ScoreMap | Skipped:
    """The map in a label file, turned as its image is, or why it cannot be used."""
    from everytoken_lab.data.decode import ImageError, read_header, turn_upright

    if not file.endswith(".pt"):  # why there is none
        return Skipped(file)
    try:
        scores, classes = read_released(root / file, meta.num_classes)
        if scores.shape != (*meta.grid, meta.top_k):
            raise StoreError(f"has {scores.shape} cells and classes, the others {(*meta.grid, meta.top_k)}")
    except StoreError as error:
        return Skipped(f"{file} {error}")
    try:
        size, orientation = ((0, 0), 1) if images is None else read_header(images / key, key)
    except ImageError as error:
        return Skipped(f"the image cannot be read ({str(error).removeprefix(f'{key}: ').rstrip('.')})")
    scores, classes = turn_upright(scores, orientation), turn_upright(classes, orientation)
    h, w = meta.grid
    if scores.shape[:2] != (h, w):
        return Skipped(f"the image lies on its side (EXIF), and a map of {h}x{w} cells cannot be turned")
    size = size if orientation < 5 else size[::-1]
    return ScoreMap(scores, classes.astype(np.uint32), size, map_area(meta.resize_mode, size, w / h))


def _match(label_files: list[str], images: Path | None) -> dict[str, str]:
    """The label file of each key, or the reason why it has none."""
    from everytoken_lab.data.tree import list_files

    if images is None:
        return {file[: -len(".pt")]: file for file in label_files}
    if not images.is_dir():
        raise StoreError(f"there is no image folder {images}.")
    paths = {key: released_path(key) for key in sorted(list_files(images))}
    there, claims = set(label_files), Counter(paths.values())
    if not there & claims.keys():
        example = next((f"{key} would need {file}" for key, file in paths.items()), "it has no images")
        what = f"for example, {example}; the label files look like {label_files[0]}"
        raise StoreError(
            f"no image of {images} has a label file ({what}). Give the folders that hold the class folders."
        )
    found = dict(paths)
    for key, file in paths.items():
        if file not in there:
            found[key] = f"there is no label file {file.removesuffix('.pt')}"
        elif claims[file] > 1:
            found[key] = f"shares its label file {file.removesuffix('.pt')} with others"
    return found


def _grid_and_k(root: Path, label_files: list[str], num_classes: int) -> tuple[tuple[int, int], int]:
    """Grid and k of most of the first readable files."""
    shapes: Counter[tuple[int, ...]] = Counter()
    reason = ""
    for file in label_files[:200]:
        try:
            shapes[read_released(root / file, num_classes)[0].shape] += 1
        except StoreError as error:
            reason = reason or f"{file} {error}"
        if shapes.total() == 16:
            break
    if not shapes:
        raise StoreError(f"no file of {root} can be read as a released map; the first one, {reason}.")
    h, w, k = shapes.most_common(1)[0][0]
    return (h, w), k

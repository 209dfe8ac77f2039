"""The released maps: one ``.pt`` file per image, as token labeling and ReLabel gave them out.

Format: a tensor [2, k, H, W] (k = 5; 18x18 for the NFNet-F6 maps of token labeling, 15x15 for ReLabel), float16,
at ``<class folder>/<file name up to its first dot>.pt``. Plane 0 holds the top-k logits, plane 1 the class
ids **as float16**, which are exact below 2048 only.

What we do differently: files are loaded with ``weights_only`` (nothing in them is ever executed), every value is
checked, and what does not pass is refused by name and listed, not trained on. Two images whose paths come to the
same ``.pt`` name ("cat.1.jpg", "cat.2.jpg") cannot both own it: neither gets a map. The released annotators saw images
as they are stored, whatever their EXIF orientation says; here images are turned upright, and their maps with them.

Cost: about 1.5 times torch.load per file; nothing grows with the number of files but the list of their names.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from everytoken import files
from everytoken.maps.errors import StoreError
from everytoken.maps.format import StoreMeta
from everytoken.maps.score_map import ScoreMap, map_area
from everytoken.maps.store import Maps
from everytoken.maps.writer import MapWriter, Skipped

EXACT_IDS = 2048  # float16 has every integer below this, and only the even ones above
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ImportOptions:
    """Released maps, and the store that they become."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder of the released maps, with one folder per class."""
    out: Path
    """Folder of the new store."""
    images: Path | None = None
    """Image folder; keys become its images' paths. Without it, keys are the maps' paths without .pt."""
    num_classes: int = 1000
    """Classes of the annotator."""
    class_names: Path | None = None
    """Text file with one class name per line, in order. Default: the class folders, if they are as many."""
    resize_mode: Literal["squash", "center", "letterbox"] | None = None
    """How images went into the annotator. Default: squash for 15x15 (ReLabel), else center (token labeling)."""
    annotator: str = "released maps"
    """What to note as the maps' origin."""


@dataclass(frozen=True)
class Imported:
    """What an import did.

    Attributes:
        store: the folder; maps: how many it has.
        refused: label files by name, with the reason.
        without_label: images without a label file.
        ambiguous: label files that several images claim.
        without_image: label files without an image.
        notes: what to know about the maps.
    """

    store: Path
    maps: int
    refused: dict[str, str]
    without_label: list[str]
    ambiguous: dict[str, list[str]]
    without_image: list[str]
    notes: list[str]


@dataclass(frozen=True)
class ExportOptions:
    """A store, and the released .pt maps that it becomes."""

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    out: Path
    """Folder for the files; new or empty."""
    overwrite: bool = False
    """Replace files in a folder that is not empty."""


def released_path(key: str) -> str:
    """Where the released code keeps the map of an image: last folder, file name up to the first dot."""
    *folders, name = key.split("/")
    return "/".join([*folders[-1:], f"{name.split('.')[0]}.pt"])


def read_released(path: Path, num_classes: int) -> tuple[NDArray[np.float16], NDArray[np.int64]]:
    """Scores and class ids [h, w, k] of a released map; a StoreError says in a few words what is wrong with it."""
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of foreign pickles; our refusal says enough
            tensor = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StoreError(f"cannot be opened ({error.strerror or error})") from error
    except Exception as error:  # whatever a foreign file provokes in the unpickler
        words = " ".join(str(error).split()) or type(error).__name__
        if "GLOBAL" in words:
            thing = words.split("GLOBAL", 1)[1].split()[0]
            raise StoreError(f"holds a Python object or code ({thing}), which is never loaded") from error
        if "eights only" in words or "WeightsUnpickler" in words:
            raise StoreError("holds something else than plain tensors, which is never loaded") from error
        raise StoreError(f"is no whole file of torch.save ({words[:80]})") from error
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise StoreError(f"holds no plain tensor but {type(tensor).__name__}")
    if tensor.dtype not in (torch.float16, torch.float32):
        raise StoreError(f"has type {tensor.dtype}, not float16")
    shape = tuple(tensor.shape)
    if len(shape) != 4 or shape[0] != 2 or min(shape) < 1 or max(shape[2:]) > 1024 or shape[1] > min(num_classes, 256):
        raise StoreError(f"has shape {list(shape)}, not [2, k, height, width]")
    half = tensor.dtype == torch.float16
    scores, ids = tensor.detach().float().permute(0, 2, 3, 1).contiguous().numpy()  # two of [h, w, k]
    if not np.isfinite(scores).all() or not np.isfinite(ids).all():
        raise StoreError("has values that are not finite")
    if np.abs(scores).max() > np.finfo(np.float16).max:
        raise StoreError("has scores beyond the range of float16")
    if (ids != np.floor(ids)).any() or ids.min() < 0 or ids.max() >= num_classes:
        wrong = ids[(ids != np.floor(ids)) | (ids < 0) | (ids >= num_classes)][0]
        raise StoreError(f"has the class id {wrong:g}, which is no integer in 0..{num_classes - 1}")
    if half and num_classes > EXACT_IDS and ids.max() >= EXACT_IDS:
        raise StoreError(f"has class ids of {EXACT_IDS} or more, which float16 has rounded")
    classes = ids.astype(np.int64)
    if (np.diff(np.sort(classes, axis=-1), axis=-1) == 0).any():
        raise StoreError("names a class twice in one cell")
    if (scores[..., 1:] > scores[..., :-1]).any():  # never so in the released maps
        order = np.argsort(-scores, axis=-1, kind="stable")
        scores, classes = np.take_along_axis(scores, order, -1), np.take_along_axis(classes, order, -1)
    return scores.astype(np.float16), classes


def import_released(options: ImportOptions, progress: Progress | None = None) -> Imported:
    """Make a store of a tree of released ``.pt`` maps. Killed, the same call continues it.

    Args:
        options: what to import, see `ImportOptions`.
        progress: called with (maps done, maps in all).
    """
    from everytoken_lab.classes import read_class_names
    from everytoken_lab.data.datasets import list_files

    root, images = options.source, options.images
    if not root.is_dir():
        raise StoreError(f"there is no folder {root} with released maps.")
    label_files = sorted(list_files(root, lambda name: name.lower().endswith(".pt")))
    if not label_files:
        raise StoreError(f"{root} has no .pt files; give the folder that holds the class folders of released maps.")
    class_names = read_class_names(options.class_names)
    num_classes = len(class_names) or options.num_classes
    grid, top_k = _grid_and_k(root, label_files, num_classes)
    notes = [f"maps of {grid[0]}x{grid[1]} cells with {top_k} classes each"]
    if num_classes > EXACT_IDS:
        notes.append(
            f"with {num_classes} classes the float16 ids of released files cannot be trusted from {EXACT_IDS} on; "
            "files that use such ids are refused"
        )
    mode = options.resize_mode or ("squash" if grid == (15, 15) else "center")
    if mode != "squash" and images is None:
        raise StoreError(
            f"maps of {grid[0]}x{grid[1]} cells lie on the middle square of their image (token labeling), so the "
            "images are needed to place them: give the image folder (images), or resize_mode 'squash' if these "
            "maps cover whole images, as ReLabel's do."
        )
    if options.resize_mode is None:
        script = "ReLabel's authors say" if mode == "squash" else "the released script that makes such maps does"
        notes.append(
            f"resize mode '{mode}' is assumed: it is what {script}; how an archive was made, its files do not tell. "
            "resize_mode chooses another one"
        )
    by_key, ambiguous, without_label = _match(label_files, images)
    if not class_names and images is not None:
        folders = sorted({key.split("/")[0] for key in by_key if "/" in key})
        if len(folders) == num_classes:
            class_names = folders
            notes.append("class names are the names of the image folder's class folders, in sorted order")
    annotator = {"name": options.annotator}
    if options.resize_mode is None:
        annotator["resize_mode"] = "assumed"
    meta = StoreMeta(grid, top_k, class_names, num_classes, mode, annotator)

    def record(key: str) -> ScoreMap | Skipped:
        file = by_key[key]
        if file is None:
            name = released_path(key)
            return Skipped(f"shares label file {name} with others" if name in ambiguous else f"no label file {name}")
        return _record(root, file, images, key, meta)

    with MapWriter(options.out, by_key, meta) as writer:
        pending = writer.pending_shards()
        done = len(by_key) - sum(len(writer.shard_range(shard)) for shard in pending)
        for shard in pending:
            keys = writer.shard_keys(shard)
            for start in range(0, len(keys), 64):
                writer.write({key: record(key) for key in keys[start : start + 64]})
            done += len(keys)
            if progress is not None:
                progress(done, len(by_key))
        manifest = writer.finalize()
    # From the store, not from this run alone: an import may have been continued.
    reasons = ((by_key[key], reason) for key, reason in Maps(options.out).skipped.items())
    refused = {file: why.removeprefix(f"{file} ") for file, why in reasons if file and why.startswith(f"{file} ")}
    used = {file for file in by_key.values() if file is not None} | set(ambiguous)
    without_image = [file for file in label_files if file not in used]
    maps = manifest.total - manifest.skipped
    return Imported(options.out, maps, refused, without_label, ambiguous, without_image, notes)


def _record(root: Path, file: str, images: Path | None, key: str, meta: StoreMeta) -> ScoreMap | Skipped:
    """The map in a label file, turned as its image is, or why it cannot be used."""
    from everytoken_lab.data.decode import ImageError, read_header, turn_upright

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


def export_released(options: ExportOptions, progress: Progress | None = None) -> list[str]:
    """Write a store's maps as released ``.pt`` files; returns notes on what other code will make of them.

    Args:
        options: what to export, see `ExportOptions`.
        progress: called with (maps done, maps in all).
    """
    import torch

    maps = Maps(options.maps)
    if maps.num_classes > EXACT_IDS:
        raise StoreError(
            f"{maps.path} has {maps.num_classes} classes; the released format keeps ids as float16, which is "
            f"exact up to {EXACT_IDS} classes only. Use the store itself."
        )
    owners: dict[str, str] = {}
    for key in maps:
        other = owners.setdefault(released_path(key), key)
        if other != key:
            raise StoreError(
                f"{other!r} and {key!r} would both be written to {released_path(key)}; the released format tells "
                "images apart only by their last folder and their name up to the first dot. Rename one of them."
            )
    if options.out.is_dir() and any(options.out.iterdir()) and not options.overwrite:
        raise StoreError(f"{options.out} is not empty; give a new folder, or replace the files in it with overwrite.")
    for done, (name, key) in enumerate(owners.items(), 1):
        score_map, path = maps[key], options.out / name
        planes = np.stack([score_map.scores, score_map.classes.astype(np.float16)]).transpose(0, 3, 1, 2)
        with files.disk_errors(options.out, "exporting maps"):
            files.make_inside(options.out, PurePosixPath(name).parent)
            buffer = BytesIO()
            torch.save(torch.from_numpy(np.ascontiguousarray(planes)), buffer)
            files.write_atomically(path, buffer.getbuffer(), sync=False)
        if progress is not None and (done % 256 == 0 or done == len(owners)):
            progress(done, len(owners))
    return list(_export_notes(maps))


def _export_notes(maps: Maps) -> Iterator[str]:
    h, w = maps.grid
    if h != w or w < 6:
        yield f"the released training code needs square maps at least 6 wide; these are {h}x{w}"
    if maps.top_k != 5:
        yield f"released maps have 5 classes per cell, these have {maps.top_k}"
    if maps.manifest.resize_mode != "squash":
        mode = maps.manifest.resize_mode
        yield f"the released training code takes maps as covering the whole image; these are '{mode}'"


def _match(
    label_files: list[str], images: Path | None
) -> tuple[dict[str, str | None], dict[str, list[str]], list[str]]:
    """Label file by key (None: no map for this image), images by disputed label file, images without label file."""
    from everytoken_lab.data.datasets import list_files

    if images is None:
        return {file[: -len(".pt")]: file for file in label_files}, {}, []
    if not images.is_dir():
        raise StoreError(f"there is no image folder {images}.")
    keys = sorted(list_files(images))
    claims = Counter(map(released_path, keys))
    there = set(label_files)
    ambiguous: dict[str, list[str]] = {}
    by_key: dict[str, str | None] = {}
    missing = []
    for key in keys:
        file = released_path(key)
        by_key[key] = file if file in there and claims[file] == 1 else None
        if file not in there:
            missing.append(key)
        elif claims[file] > 1:
            ambiguous.setdefault(file, []).append(key)
    if all(file is None for file in by_key.values()):
        example = f"{keys[0]} would need {released_path(keys[0])}" if keys else "it has no images"
        raise StoreError(
            f"no image of {images} has a label file (for example, {example}; the label files look like "
            f"{label_files[0]}). Give the folders that hold the class folders."
        )
    return by_key, ambiguous, missing


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

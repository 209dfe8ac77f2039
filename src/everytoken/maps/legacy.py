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

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everytoken.maps.errors import StoreError
from everytoken.maps.manifest import StoreMeta
from everytoken.maps.scoremap import ScoreMap, map_area
from everytoken.maps.store import Maps
from everytoken.maps.writer import MapWriter, Skipped

EXACT_IDS = 2048  # float16 has every integer below this, and only the even ones above
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Imported:
    """What an import did. ``refused``: label files by name with the reason; ``notes``: what to know about the maps."""

    store: Path
    maps: int
    refused: dict[str, str]
    without_label: list[str]
    ambiguous: dict[str, list[str]]
    without_image: list[str]
    notes: list[str]


def legacy_path(key: str) -> str:
    """Where the released code keeps the map of an image: last folder, file name up to the first dot."""
    *folders, name = key.split("/")
    return "/".join([*folders[-1:], f"{name.split('.')[0]}.pt"])


def read_legacy(path: Path, num_classes: int) -> tuple[NDArray[np.float16], NDArray[np.int64]]:
    """Scores and class ids [h, w, k] of a released map; a StoreError says in a few words what is wrong with it."""
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # torch muses on foreign pickles; our refusal says enough
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


def import_legacy(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    images: str | os.PathLike[str] | None = None,
    num_classes: int = 1000,
    class_names: Sequence[str] = (),
    resize_mode: str | None = None,
    annotator: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Imported:
    """Make a store of a tree of released ``.pt`` maps. Killed, it goes on where it stopped.

    Args:
        source: folder of the maps.
        out: folder of the new store.
        images: the image folder. Keys are then the images' paths, and the images' sizes are stored; without it,
            keys are the maps' paths without ``.pt``.
        num_classes: K; taken from ``class_names`` if they are given.
        class_names: in the order of the class ids. By default the image folder's class folders, if there are K.
        resize_mode: how images went into the annotator. By default "squash" for 15x15 maps (ReLabel) and "center"
            for others (token labeling cuts out the middle square; needs ``images``).
        annotator: what to note in the manifest.
        progress: called with (done, total).
    """
    from everytoken.data.decode import ImageError, read_header, turn_upright
    from everytoken.data.places import walk

    root, notes = Path(source), []
    if not root.is_dir():
        raise StoreError(f"there is no folder {root} with released maps.")
    label_files = sorted(walk(root, lambda name: name.lower().endswith(".pt")))
    if not label_files:
        raise StoreError(f"{root} has no .pt files; give the folder that holds the class folders of released maps.")
    num_classes = len(class_names) or num_classes
    grid, top_k = _look_ahead(root, label_files, num_classes)
    notes.append(f"maps of {grid[0]}x{grid[1]} cells with {top_k} classes each")
    if num_classes > EXACT_IDS:
        notes.append(
            f"with {num_classes} classes the float16 ids of released files cannot be trusted from {EXACT_IDS} on; "
            "files that use such ids are refused"
        )
    mode = resize_mode or ("squash" if grid == (15, 15) else "center")
    if mode != "squash" and images is None:
        raise StoreError(
            f"maps of {grid[0]}x{grid[1]} cells lie on the middle square of their image (token labeling), so the "
            "images are needed to place them: give the image folder (--images), or say --resize-mode squash if these "
            "maps cover whole images, as ReLabel's do."
        )
    if resize_mode is None:
        notes.append(f"resize mode '{mode}', as these released maps were made")
    by_key, ambiguous, without_label = _match(label_files, None if images is None else Path(images))
    if not class_names and images is not None:
        folders = sorted({key.split("/")[0] for key in by_key if "/" in key})
        if len(folders) == num_classes:
            class_names = folders
            notes.append("class names are the names of the image folder's class folders, in sorted order")
    meta = StoreMeta(grid, top_k, class_names, num_classes, mode, annotator or {"name": "released maps"})

    def record(key: str) -> ScoreMap | Skipped:
        file = by_key[key]
        if file is None:
            name = legacy_path(key)
            return Skipped(f"shares label file {name} with others" if name in ambiguous else f"no label file {name}")
        try:
            scores, classes = read_legacy(root / file, num_classes)
            if scores.shape != (*grid, top_k):
                raise StoreError(f"has {scores.shape} cells and classes, the others {(*grid, top_k)}")
        except StoreError as error:
            return Skipped(f"{file} {error}")
        try:
            size, orientation = ((0, 0), 1) if images is None else read_header(Path(images) / key, key)
        except ImageError as error:
            return Skipped(f"the image cannot be read ({str(error).removeprefix(f'{key}: ').rstrip('.')})")
        scores, classes = turn_upright(scores, orientation), turn_upright(classes, orientation)
        if scores.shape[:2] != grid:
            return Skipped(
                f"the image lies on its side (EXIF), and a map of {grid[0]}x{grid[1]} cells cannot be turned"
            )
        size = size if orientation < 5 else size[::-1]
        return ScoreMap(scores, classes.astype(np.uint32), size, map_area(mode, size, grid[1] / grid[0]))

    with MapWriter.create_or_resume(out, by_key, meta) as writer:
        pending = writer.pending_shards()
        done = len(by_key) - sum(len(writer.shard_range(shard)) for shard in pending)
        for shard in pending:
            writer.write_shard(shard, map(record, writer.shard_keys(shard)))
            done += len(writer.shard_range(shard))
            if progress is not None:
                progress(done, len(by_key))
        manifest = writer.finalize()
    # From the store, not from this run alone: an import may have been continued.
    reasons = ((by_key[key], reason) for key, reason in Maps(out).skipped.items())
    refused = {file: why.removeprefix(f"{file} ") for file, why in reasons if file and why.startswith(f"{file} ")}
    if images is not None:
        used = {file for file in by_key.values() if file is not None} | set(ambiguous)
        without_image = [file for file in label_files if file not in used]
    else:
        without_image = []
    maps = manifest.total - manifest.skipped
    return Imported(Path(out), maps, refused, without_label, ambiguous, without_image, notes)


def export_legacy(
    store: str | os.PathLike[str] | Maps,
    out: str | os.PathLike[str],
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write a store's maps as released ``.pt`` files; returns notes on what other code will make of them.

    Args:
        store: a store or its folder.
        out: an empty or new folder; with ``overwrite``, files in it are replaced.
        overwrite: see ``out``.
        progress: called with (done, total).
    """
    import torch

    store = store if isinstance(store, Maps) else Maps(store)
    manifest, folder = store.manifest, Path(out)
    if manifest.num_classes > EXACT_IDS:
        raise StoreError(
            f"{store.path} has {manifest.num_classes} classes; the released format keeps ids as float16, which is "
            f"exact up to {EXACT_IDS} classes only. Use the store itself."
        )
    owners: dict[str, str] = {}
    for key in store:
        other = owners.setdefault(legacy_path(key), key)
        if other != key:
            raise StoreError(
                f"{other!r} and {key!r} would both be written to {legacy_path(key)}; the released format tells images "
                "apart only by their last folder and their name up to the first dot. Rename one of them."
            )
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise StoreError(f"{folder} is not empty; give a new folder, or --overwrite to replace files in it.")
    for done, (name, key) in enumerate(owners.items(), 1):
        one = store[key]
        planes = np.stack([one.scores.transpose(2, 0, 1), one.classes.transpose(2, 0, 1).astype(np.float16)])
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".tmp-{path.name}")
        torch.save(torch.from_numpy(planes), temporary)
        os.replace(temporary, path)
        if progress is not None and (done % 256 == 0 or done == len(owners)):
            progress(done, len(owners))
    return list(_export_notes(store))


def _export_notes(store: Maps) -> Iterator[str]:
    manifest = store.manifest
    h, w = manifest.grid
    if h != w or w < 6:
        yield f"the released training code needs square maps at least 6 wide; these are {h}x{w}"
    if manifest.top_k != 5:
        yield f"released maps have 5 classes per cell, these have {manifest.top_k}"
    if manifest.resize_mode != "squash":
        yield f"the released training code takes maps as covering the whole image; these are '{manifest.resize_mode}'"


def _match(
    label_files: list[str], images: Path | None
) -> tuple[dict[str, str | None], dict[str, list[str]], list[str]]:
    """Label file by key (None: no map for this image), images by disputed label file, images without label file."""
    from everytoken.data.places import walk

    if images is None:
        return {file[: -len(".pt")]: file for file in label_files}, {}, []
    if not images.is_dir():
        raise StoreError(f"there is no image folder {images}.")
    keys = sorted(walk(images))
    claims = Counter(map(legacy_path, keys))
    there = set(label_files)
    ambiguous: dict[str, list[str]] = {}
    by_key: dict[str, str | None] = {}
    missing = []
    for key in keys:
        file = legacy_path(key)
        by_key[key] = file if file in there and claims[file] == 1 else None
        if file not in there:
            missing.append(key)
        elif claims[file] > 1:
            ambiguous.setdefault(file, []).append(key)
    if all(file is None for file in by_key.values()):
        example = f"{keys[0]} would need {legacy_path(keys[0])}" if keys else "it has no images"
        raise StoreError(
            f"no image of {images} has a label file (for example, {example}; the label files look like "
            f"{label_files[0]}). Give the folders that hold the class folders."
        )
    return by_key, ambiguous, missing


def _look_ahead(root: Path, label_files: list[str], num_classes: int) -> tuple[tuple[int, int], int]:
    """Grid and k of most of the first readable files."""
    shapes: Counter[tuple[int, ...]] = Counter()
    reason = ""
    for file in label_files[:200]:
        try:
            shapes[read_legacy(root / file, num_classes)[0].shape] += 1
        except StoreError as error:
            reason = reason or f"{file} {error}"
        if shapes.total() == 16:
            break
    if not shapes:
        raise StoreError(f"no file of {root} can be read as a released map; the first one, {reason}.")
    h, w, k = shapes.most_common(1)[0][0]
    return (h, w), k

"""The released maps: one ``.pt`` file per image, as token labeling and ReLabel gave them out.

Format: a tensor [2, k, H, W] (k = 5; 18x18 for the NFNet-F6 maps of token labeling, 15x15 for ReLabel), float16, at
``<class folder>/<file name up to its first dot>.pt``. Plane 0 holds the top-k logits, plane 1 the class ids **as
float16**, which are exact up to 2048 only. Nothing in a file is ever executed, and every value is checked.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everytoken.maps.format import StoreError

EXACT_IDS = 2048  # float16 has every integer below this, and only the even ones above


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
        raise StoreError(f"cannot be loaded as plain tensors ({words[:80]})") from error
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise StoreError(f"holds no plain tensor but {type(tensor).__name__}")
    shape = tuple(tensor.shape)
    if tensor.dtype not in (torch.float16, torch.float32):
        raise StoreError(f"has type {tensor.dtype}, not float16")
    if len(shape) != 4 or shape[0] != 2 or min(shape) < 1 or max(shape[2:]) > 1024 or shape[1] > min(num_classes, 256):
        raise StoreError(f"has shape {list(shape)}, not [2, k, height, width]")
    scores, ids = tensor.detach().float().permute(0, 2, 3, 1).contiguous().numpy()  # two of [h, w, k]
    if not np.isfinite(scores).all() or not np.isfinite(ids).all():
        raise StoreError("has values that are not finite")
    if np.abs(scores).max() > np.finfo(np.float16).max:
        raise StoreError("has scores beyond the range of float16")
    wrong = ids[(ids != np.floor(ids)) | (ids < 0) | (ids >= num_classes)]
    if wrong.size:
        raise StoreError(f"has the class id {wrong[0]:g}, which is no integer in 0..{num_classes - 1}")
    if tensor.dtype == torch.float16 and num_classes > EXACT_IDS and ids.max() >= EXACT_IDS:
        raise StoreError(f"has class ids of {EXACT_IDS} or more, which float16 has rounded")
    classes = ids.astype(np.int64)
    if (np.diff(np.sort(classes, axis=-1), axis=-1) == 0).any():
        raise StoreError("names a class twice in one cell")
    order = np.argsort(-scores, axis=-1, kind="stable")  # the released maps are sorted already
    return np.take_along_axis(scores, order, -1).astype(np.float16), np.take_along_axis(classes, order, -1)

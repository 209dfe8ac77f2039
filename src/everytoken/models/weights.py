"""Load weights from a file into a model, and say what was left out.

Safetensors are read as they are. Foreign `.pt`, `.pth` and `.tar` files are read with `weights_only=True`, so that a
pickle that wants to run code is refused; the one class that is allowed besides torch's own is `argparse.Namespace`, in
which training scripts keep their options. Released checkpoints come bare, under `state_dict` or `state_dict_ema`, with
or without a `module.` prefix; position embeddings and relative-position tables are resized by the model family's own
rule (timm's `checkpoint_filter_fn`).

Files written here carry a SHA-256 of their content in their own header (metadata `sha256`), so that it travels with
copies; a file that does not match it is refused. Files from elsewhere have none and are read as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.files import open_regular

CHECKSUM = "sha256"  # the key in the metadata
_LONGEST_HEADER = 100_000_000  # bytes, as in safetensors itself
_WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")


class WeightsError(EverytokenError):
    """A checkpoint cannot be read or does not fit."""


@dataclass(frozen=True)
class LoadReport:
    """Names of the tensors that were not simply loaded, with their shapes where these changed or do not fit."""

    resized: list[str]  # position embeddings
    left_out: list[str]  # another number of classes
    missing: list[str]
    unknown: list[str]

    def __str__(self) -> str:
        found = {
            "resized to fit": self.resized,
            "left out, because they do not fit": self.left_out,
            "not in the file, fresh values kept": self.missing,
            "in the file, but not in the model": self.unknown,
        }
        more = {title: f" and {len(names) - 6} more" if len(names) > 6 else "" for title, names in found.items()}
        return "\n".join(f"{title}: {', '.join(names[:6])}{more[title]}" for title, names in found.items() if names)


def encode_weights(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file with a checksum. Equal content gives equal bytes, which `safetensors` alone does
    not promise if there are several entries of metadata."""
    from safetensors.torch import save

    plain = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    size = 8 + int.from_bytes(plain[:8], "little")
    header, data = json.loads(plain[8:size]), memoryview(plain)[size:]
    header["__metadata__"] = dict(metadata)
    header["__metadata__"][CHECKSUM] = _checksum(header, data)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)  # the data are aligned
    return b"".join((len(text).to_bytes(8, "little"), text, data))


def _checksum(header: Mapping[str, Any], data: bytes | memoryview) -> str:
    """Of all tensors, their names and the metadata, but for the checksum itself."""
    metadata = {name: value for name, value in header["__metadata__"].items() if name != CHECKSUM}
    digest = hashlib.sha256(json.dumps({**header, "__metadata__": metadata}, sort_keys=True).encode())
    digest.update(data)
    return digest.hexdigest()


def check_weights(path: Path) -> None:
    """Raise a WeightsError if a safetensors file has a checksum and does not match it."""
    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")
        text = file.read(size) if size <= _LONGEST_HEADER else b""
        try:
            header = json.loads(text)
            checksum = header.get("__metadata__", {}).get(CHECKSUM)
        except (ValueError, RecursionError, AttributeError) as error:
            raise WeightsError(f"{path} is not a readable safetensors file: its header is damaged") from error
        if checksum is not None and checksum != _checksum(header, file.read()):
            raise WeightsError(f"{path} is damaged: it does not match its own checksum. Restore it from a copy.")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a checkpoint, `.safetensors` or a file of `torch.save`, into a flat dict of tensors."""
    path = Path(path)
    if not path.is_file():
        raise WeightsError(f"there is no checkpoint at {path}")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            content: Any = load_file(path)
            check_weights(path)
        except SafetensorError as error:
            raise WeightsError(f"{path} is not a readable safetensors file: {error}") from error
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error}") from error
    else:
        try:
            with torch.serialization.safe_globals([argparse.Namespace]):  # which holds attributes and runs nothing
                content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise WeightsError(
                f"{path} holds more than plain tensors and was not opened, because a pickle can run code."
            ) from error
        except (RuntimeError, EOFError, ValueError, OSError) as error:
            raise WeightsError(f"{path} is not a checkpoint that torch can read: {error}") from error
    state = unwrap_state_dict(content)
    if not state:
        raise WeightsError(f"{path} holds no tensors")
    return state


def unwrap_state_dict(content: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint: found under `state_dict`, `model` and the like, averaged weights before others;
    names without `module.`."""
    while isinstance(content, Mapping):
        inner = next((content[w] for w in _WRAPPERS if isinstance(content.get(w), Mapping)), None)
        if inner is None:
            return {str(k).removeprefix("module."): v for k, v in content.items() if isinstance(v, Tensor)}
        content = inner
    return {}


def load_weights(model: nn.Module, source: str | Path | Mapping[str, Tensor], where: str = "") -> LoadReport:
    """Load what fits from a file or a state dict, resize what can be resized, and report the rest.

    Raises WeightsError when fewer than half of the model's tensors find a value, which means that the file belongs to
    another architecture; it calls the source `where`.
    """
    state = unwrap_state_dict(source) if isinstance(source, Mapping) else read_weights(source)
    where = where or ("the given state dict" if isinstance(source, Mapping) else str(source))
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    expected = model.state_dict()
    state = fit_state(model, state)
    fitting = {name: value for name, value in state.items() if name in expected and expected[name].shape == value.shape}
    if len(fitting) * 2 < len(expected):
        raise WeightsError(
            f"{where} does not belong to {type(model).__name__}: it has only {len(fitting)} of its {len(expected)} "
            f"tensors. It holds {', '.join(list(shapes)[:3])}, ...; the model {', '.join(list(expected)[:3])}, ..."
        )
    model.load_state_dict(fitting, strict=False)
    return LoadReport(
        resized=[
            f"{name} ({shapes[name]} to {tuple(value.shape)})"
            for name, value in fitting.items()
            if shapes.get(name) != tuple(value.shape)
        ],
        left_out=[
            f"{name} (file {tuple(value.shape)}, model {tuple(expected[name].shape)})"
            for name, value in state.items()
            if name in expected and name not in fitting
        ],
        missing=[name for name in expected if name not in state and not name.endswith("num_batches_tracked")],
        unknown=[name for name in state if name not in expected],
    )


def fit_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let the model's family resize position tables, if it has a rule for that."""
    for cls in type(model).__mro__:
        rule = getattr(sys.modules.get(cls.__module__), "checkpoint_filter_fn", None)
        if rule is not None:
            fitted: dict[str, Tensor] = rule(dict(state), model)
            return fitted
    return state

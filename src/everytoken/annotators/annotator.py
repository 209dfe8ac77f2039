"""What an annotator is: something that gives every cell of an image a score for every class.

Builders (timm, registry, python, self, fit) differ in where the network comes from; the job that fills a store sees
only this interface. `settings` goes into the store's manifest: everything that changes the maps, and nothing else, so
that a store is continued only by the annotator that began it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.classes import ClassList
from everytoken.errors import EverytokenError


class AnnotatorError(EverytokenError):
    """An annotator cannot be had or does not work; the message says what else there is."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the annotator's input.

    Attributes:
        size: (height, width) in pixels.
        mean, std: of the normalisation, for each channel, pixels in 0..1.
        interpolation: filter of the resize.
    """

    size: tuple[int, int] = (224, 224)
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    interpolation: str = "bicubic"

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] -> float32 [B, 3, H, W] in channels-last layout, on the same device."""
        count, height, width, _ = pixels.shape
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        # whole rows at a time: an inner dimension of three channels would not vectorise
        scale, shift = ((v.repeat(width)).to(pixels.device) for v in (1 / (255 * std), -mean / std))
        rows = pixels.reshape(count, height, width * 3).float().mul_(scale).add_(shift)
        return rows.view(count, height, width, 3).permute(0, 3, 1, 2)


@dataclass
class Annotator(ABC):
    """Scores for every cell.

    Attributes:
        name: how the user calls it, for messages and the manifest.
        preprocessing: the input it wants.
        classes: what its scores mean.
        settings: what the manifest says about it (plain JSON values).
    """

    name: str
    preprocessing: Preprocessing
    classes: ClassList
    settings: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """Logits [B, h, w, K] of normalised images [B, 3, H, W]; `indices` [B] say which images of the data set."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move to a device and make ready for use."""

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        own = self.preprocessing
        view = {"size": own.size, "mean": own.mean, "std": own.std, "interpolation": own.interpolation}
        return {"name": self.name, "input": view, **self.settings}

    @torch.inference_mode()
    def grid(self, device: torch.device) -> tuple[int, int]:
        """(h, w) of its maps, found with one grey image; checks what comes out."""
        height, width = self.preprocessing.size
        images = torch.zeros(1, 3, height, width, device=device)
        try:
            logits = self.score(images, np.zeros(1, dtype=np.int64))
        except (RuntimeError, ValueError, AssertionError) as error:
            if isinstance(error, EverytokenError) or "out of memory" in str(error):
                raise
            raise AnnotatorError(
                f"{self.name} fails on an image of {height} x {width} pixels: {str(error).strip()[:300]}\n"
                "Try another --img-size; transformers want their own size, other networks multiples of 32."
            ) from error
        if logits.ndim != 4 or logits.shape[0] != 1 or logits.shape[3] != self.classes.count:
            raise AnnotatorError(
                f"{self.name} returns scores of shape {list(logits.shape)} for one image; "
                f"[1, rows, columns, {self.classes.count}] is needed (one score per cell and class)."
            )
        return logits.shape[1], logits.shape[2]


@dataclass
class NetworkAnnotator(Annotator):
    """An annotator that is one network, `module`: images [B, 3, H, W] -> [B, h, w, K]."""

    module: nn.Module = field(default_factory=nn.Identity)

    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """Logits of every cell."""
        logits: Tensor = self.module(images)
        return logits

    def to(self, device: torch.device) -> None:
        """Convolutions are faster on channels-last images, on the CPU too."""
        self.module.to(device).to(memory_format=torch.channels_last).eval().requires_grad_(False)


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of all weights with their names, types and shapes: which annotator it was, beyond its name."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    return digest.hexdigest()

"""The model under test: from a run, a weights file, timm or the package registry, with what it knows about itself."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.annotators.annotator import weights_hash
from everytoken.evaluation.run import Voter, check_vote
from everytoken.models.open import Description, open_model


@dataclass(frozen=True)
class Subject:
    """A model under test.

    Attributes:
        name: how tables call it. net: normalised images -> logits, in evaluation mode, on its device.
        about: architecture, class names, input size, normalisation.
        outputs: number of logits. parameters: of the backbone. weights: a hash of all of them.
        token_vote: how much the strongest token logit of each class is worth.
    """

    name: str
    net: nn.Module
    about: Description
    outputs: int
    parameters: int
    weights: str
    device: str
    token_vote: float = 0.0

    @property
    def place(self) -> str:
        """A folder's name for its results, which is another one for other weights or another vote."""
        vote = f"-vote{self.token_vote:g}" if self.token_vote else ""
        return slug(f"{self.name}-{self.weights[:6]}{vote}")


class Normalised(nn.Module):
    """Images in 0..1 -> logits of some classes: what attacks see, which is what evaluation sees.

    Args:
        net: normalised images -> logits.
        columns: outputs to keep; None: all.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, net: nn.Module, mean: tuple[float, ...], std: tuple[float, ...], columns: np.ndarray | None
    ) -> None:
        super().__init__()
        self.net = net
        like = next(net.parameters())
        self.register_buffer("mean", torch.tensor(mean, device=like.device).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std, device=like.device).view(1, -1, 1, 1))
        self.columns = None if columns is None else torch.from_numpy(columns).to(like.device)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in 0..1 -> [B, K]"""
        logits: Tensor = self.net((images - self.mean) / self.std).float()
        return logits if self.columns is None else logits[:, self.columns]


def open_subject(
    source: str, *, architecture: str = "", checkpoint: str = "", img_size: int = 0, crop_pct: float = 0.0,
    token_vote: float = 0.0, device: str = "cpu",
) -> Subject:  # fmt: skip
    """Open RUN, CHECKPOINT, timm:NAME (with `checkpoint` for its weights) or registry:NAME."""
    loaded = open_model(source, architecture=architecture, checkpoint=checkpoint, img_size=img_size, crop_pct=crop_pct)
    check_vote(loaded, token_vote)
    net = Voter(loaded.model, token_vote).to(device).eval().requires_grad_(False)
    outputs = int(loaded.model.backbone.num_classes)  # type: ignore[arg-type]
    parameters = sum(p.numel() for p in loaded.model.backbone.parameters())
    weights = weights_hash(net)[:24]
    return Subject(_name(source), net, loaded.info, outputs, parameters, weights, device, token_vote)


def _name(source: str) -> str:
    path = Path(source)
    return source if ":" in source or path.is_dir() else path.name


def slug(name: str) -> str:
    """A name that can be a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


@torch.no_grad()
def throughput(subject: Subject, batch: int = 32, seconds: float = 1.0) -> float:
    """Images per second of the network alone, from noise."""
    images = torch.randn(batch, 3, *subject.about.img_size, device=subject.device)
    subject.net(images)
    done, started = 0, time.perf_counter()
    while done == 0 or time.perf_counter() - started < seconds:
        subject.net(images)
        if subject.device.startswith("cuda"):
            torch.cuda.synchronize()
        done += batch
    return done / (time.perf_counter() - started)

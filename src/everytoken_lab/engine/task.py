"""What a task is: timm's `TrainingTask` with its data, its validation and what it exports.

Classification, segmentation and detection are subclasses, and `loop.run` trains any of them. A subclass sets
`batches_per_epoch`, and has at least `backbone`, `train_batches` and `validate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from timm.task import TrainingTask
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from everytoken.files import write_picture
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.loader import BadImages, BatchReader, Loader
from everytoken_lab.data.tree import network_address
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.options import LoopOptions
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.terminal import Progress

B = TypeVar("B", bound=Sized)
IMAGES = 8
"""Most images in the picture of a batch."""


def watched(batches: Iterable[B], total: int, world: World) -> Iterator[B]:
    """Hand batches on and show how far validation is: a bar on a terminal, a plain line every half minute elsewhere."""
    done = 0
    with Progress("validation", "images", every=30, keep=False) if world.is_main else nullcontext() as progress:
        for batch in batches:
            yield batch
            done += len(batch) * world.size
            if progress is not None:
                progress(min(done, total), total)


class Task(TrainingTask):
    """Base class of everything that the loop trains.

    Args:
        module: what is trained; `module(batch)` in training mode gives {"loss": scalar, further terms}.
        world: this process among its peers; the module is moved to its device.
    """

    score_name = "score"
    is_reported = True  # its run ends with a page for people
    batches_per_epoch: int  # of this process

    def __init__(self, module: nn.Module, options: LoopOptions, world: World, folder: RunFolder) -> None:
        super().__init__(device=world.device, verbose=False)
        self.trainable_module: nn.Module = module.to(world.device)
        self.options, self.world, self.folder = options, world, folder
        self.loaders: list[Loader] = []

    @property
    def module(self) -> nn.Module:
        """What is trained, without a wrapper for many processes."""
        return unwrap_model(self.trainable_module)

    @property
    def backbone(self) -> nn.Module:
        """The timm model, whose layer groups and exemptions from weight decay the optimizer follows."""
        raise NotImplementedError

    def train_batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Batches of an epoch for this process, on the device, from `start` on: functions of (seed, epoch, position).

        A batch is a dataclass with a length, `keys` (names of its images) and `key`, which the loop sets.
        """
        raise NotImplementedError

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Loss terms of a batch; "loss" is minimised, "output" is not logged."""
        terms: dict[str, Tensor] = self.trainable_module(batch)
        return terms

    def validate(self, module: nn.Module) -> dict[str, float]:
        """Numbers of `module` (or an average of it), which is in evaluation mode; "score" is what "best" means.

        Without a score the last weights are the best.
        """
        raise NotImplementedError

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Of the module's state dict, what to write, by suffix of the file's name: "" is the main file."""
        return {"": state}

    def metadata(self) -> dict[str, str]:
        """What somebody needs to know to use the weights; kept in the files."""
        return {}

    def timm_config(self) -> dict[str, Any] | None:
        """What timm reads in config.json beside the weights; None: timm cannot open them."""
        return None

    def facts(self) -> dict[str, str]:
        """Data and model as rows of a table, for the log and the plan of a run."""
        return {"task": type(self).__name__}

    def finish(self, module: nn.Module) -> None:
        """Write tables and pictures of a finished run, on rank 0; `module` is in evaluation mode."""

    def report(self, path: Path, **options: Any) -> None:
        """Write the page of a finished run; options: those of `lab.report`."""
        data = network_address(self.options.data)
        device, workers = self.world.device.type, self.options.dataset.workers
        self.folder.read().report(path, **{"data": data, "device": device, "workers": workers, **options})

    def picture(self, batch: Any) -> Image.Image | None:
        """The first training batch, as a picture for people; None: there is nothing to see."""
        return None

    def show(self, batch: Any) -> None:
        """Write the picture of a batch to batch.jpg, on rank 0. Random numbers stay as they were, errors are logged."""
        if not self.folder.writable:
            return
        devices = [self.world.device] if self.world.device.type == "cuda" else []
        with self.folder.surviving("batch.jpg"), torch.random.fork_rng(devices), torch.no_grad():
            picture = self.picture(batch)
            if picture is not None:
                write_picture(self.folder.path / "batch.jpg", picture, quality=88)

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision as the options have it."""
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.options.optim.amp)

    def loader(
        self, data: DataSet | BatchReader[Any], transform: Any = None, batch_size: int = 1, *, train: bool, **more: Any
    ) -> Loader:
        """A loader of this process's part of `data`; bad images are handled as the options say."""
        log = self.folder.path / "skipped-images.jsonl" if self.folder.writable else None
        loader = Loader(
            data,
            transform,
            batch_size,
            train=train,
            seed=self.options.run.seed,
            workers=self.options.dataset.workers,
            rank=self.world.rank,
            world=self.world.size,
            bad_images=BadImages(self.options.dataset.on_bad_image, log=log),
            pin_memory=self.world.device.type == "cuda",
            **more,
        )
        self.loaders.append(loader)
        return loader

    def close(self) -> None:
        """End the loaders' workers."""
        for loader in self.loaders:
            loader.close()


def pixels_of(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Normalised images [B, 3, H, W] as bytes [B, H, W, 3]."""
    scale, shift = (torch.tensor(values).view(1, -1, 1, 1) for values in (std, mean))
    pixels = (images.detach().float().cpu() * scale + shift).mul(255).round().clamp(0, 255).byte()
    return pixels.permute(0, 2, 3, 1).numpy()

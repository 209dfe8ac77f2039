"""TensorBoard and Weights & Biases, by option. The run folder's own files are always written; these are copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everytoken.engine.options import LoopOptions
from everytoken.errors import need


class TensorBoard:
    """Scalars under step/ and epoch/, in <run>/tensorboard."""

    def __init__(self, folder: Path) -> None:
        need("tensorboard", "track", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def record(self, row: dict[str, Any]) -> None:
        """One row."""
        for key, value in row.items():
            if key not in ("kind", "step") and isinstance(value, int | float):
                self.writer.add_scalar(f"{row['kind']}/{key}", value, row["step"])

    def close(self) -> None:
        """Flush."""
        self.writer.close()


class WandB:
    """A run of a Weights & Biases project; a resumed run keeps its id."""

    def __init__(self, project: str, folder: Path, config: dict[str, Any]) -> None:
        wandb = need("wandb", "track", "wandb")
        self.run = wandb.init(project=project, name=folder.name, id=folder.name, resume="allow", config=config)

    def record(self, row: dict[str, Any]) -> None:
        """One row."""
        values = {f"{row['kind']}/{k}": v for k, v in row.items() if k not in ("kind", "step")}
        self.run.log(values, step=row["step"])

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


Tracker = TensorBoard | WandB


def build_trackers(options: LoopOptions, folder: Path, config: dict[str, Any]) -> list[Tracker]:
    """Those that were asked for."""
    out: list[Tracker] = []
    if options.run.tensorboard:
        out.append(TensorBoard(folder))
    if options.run.wandb:
        out.append(WandB(options.run.wandb, folder, config))
    return out

"""TensorBoard, Weights & Biases and MLflow, by option. The run folder's own files are always written; these are copies.

Runs are called <folder>-<id> there; ids are kept in the folder's trackers.json, so that a resumed run continues its
record. A tracker that cannot be reached at the start is an error; one that fails later is left out with a line in the
log, and training goes on.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everytoken.errors import EverytokenError, MissingExtraError, need
from everytoken.files import make_inside, plain_json, write_atomically
from everytoken_lab import schema
from everytoken_lab.engine.options import RunOptions


class TensorBoard:
    """Scalars under step/ and epoch/, in <run>/tensorboard, which TensorBoard names by the run folder."""

    def __init__(self, project: object, folder: Path, ids: object, config: object) -> None:
        need("tensorboard", "track", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(make_inside(folder, "tensorboard")))

    def record(self, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of a Weights & Biases project. Offline (WANDB_MODE=offline), it is written to <run>/wandb."""

    def __init__(self, project: str, folder: Path, ids: dict[str, str], config: dict[str, Any]) -> None:
        wandb = need("wandb", "track", "wandb")
        make_inside(folder, "wandb")
        self.run = wandb.init(
            project=project,
            name=f"{folder.resolve().name}-{ids['id']}",
            id=ids["id"],
            resume="allow",
            config=config,
            dir=str(folder),
            settings=wandb.Settings(disable_git=True),  # git executes what a folder configures, see run_folder.py
        )

    def record(self, row: Mapping[str, Any]) -> None:
        self.run.log(_numbers(row), step=row["step"])

    def close(self) -> None:
        self.run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)


class MLflow:
    """A run of an MLflow experiment, where MLFLOW_TRACKING_URI says; without it, in mlflow.db of this folder."""

    def __init__(self, experiment: str, folder: Path, ids: dict[str, str], config: Mapping[str, Any]) -> None:
        mlflow = need("mlflow", "track", "mlflow")
        self.client = mlflow.MlflowClient()
        if "mlflow" in ids:
            self.client.update_run(ids["mlflow"], status="RUNNING")
            self.run = ids["mlflow"]
            return
        number, folder = mlflow.set_experiment(experiment).experiment_id, folder.resolve()
        made = self.client.create_run(number, run_name=f"{folder.name}-{ids['id']}", tags={"folder": str(folder)})
        self.run = ids["mlflow"] = made.info.run_id
        parameters = [mlflow.entities.Param(key, str(value)[:500]) for key, value in config.items()]
        for start in range(0, len(parameters), 100):  # as many as a call may have
            self.client.log_batch(self.run, params=parameters[start : start + 100])

    def record(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, row["step"]) for name, value in _numbers(row).items()]
        self.client.log_batch(self.run, metrics=metrics)

    def close(self) -> None:
        self.client.set_terminated(self.run, "FINISHED" if sys.exc_info()[0] is None else "KILLED")


Tracker = TensorBoard | WandB | MLflow


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {f"{row['kind']}/{k}": v for k, v in row.items() if k not in ("kind", "step") and isinstance(v, int | float)}


def build_trackers(run: RunOptions, folder: Path, config: dict[str, Any]) -> list[Tracker]:
    """Those that were asked for."""
    config, path = schema.texts(config, schema.without_secrets), folder / "trackers.json"
    # not keyed: two runs with the same seed have to differ
    ids = schema.read_json(path, dict[str, str]) if path.is_file() else {"id": secrets.token_hex(3)}
    kinds: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
    trackers: list[Tracker] = []
    for name, kind in kinds.items():
        try:
            if project := getattr(run, name):
                trackers.append(kind(project, folder, ids, config))
        except MissingExtraError:
            raise
        except Exception as error:  # each library has its own
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise EverytokenError(f"{name} cannot be written to ({reason}). Check its address and login.") from error
    if trackers:
        write_atomically(path, plain_json(ids).encode())
    return trackers

"""TensorBoard, Weights & Biases and MLflow, with the real libraries."""

import json
from types import SimpleNamespace

import pytest

from everytoken.errors import EverytokenError
from everytoken_lab.engine import track
from everytoken_lab.engine.options import RunOptions
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.training.classify import train

QUICK = {"model": "vit_nano_patch4_32", "img_size": 32, "batch_size": 4, "workers": 0, "device": "cpu"}
QUICK |= {"warmup_epochs": 0, "aa": "", "log_interval": 1}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    for library in ("tensorboard", "wandb", "mlflow"):
        pytest.importorskip(library)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")  # a database takes seconds longer
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def test_all_trackers_get_every_row_and_a_resumed_run_continues_its_record(photos, tmp_path, offline):
    import mlflow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = {"tensorboard": True, "wandb": "birds", "mlflow": "birds", "out": str(tmp_path / "a/run"), **QUICK}
    train(photos, epochs=1, **wanted)
    run = train(photos, epochs=2, **wanted)
    scores = {row["step"]: row["score"] for row in run.history}
    assert len(scores) == 2

    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert {event.step: event.value for event in events.Scalars("epoch/score")} == pytest.approx(scores)

    client = mlflow.MlflowClient()
    (kept,) = client.search_runs([client.get_experiment_by_name("birds").experiment_id])
    history = client.get_metric_history(kept.info.run_id, "epoch/score")
    assert {metric.step: metric.value for metric in history} == scores
    assert kept.data.params["model"] == "vit_nano_patch4_32"
    assert kept.info.status == "FINISHED"

    number = json.loads((run.path / "trackers.json").read_text())["id"]
    assert kept.info.run_name == f"run-{number}"
    files = list((run.path / "wandb").glob(f"*-{number}/run-{number}.wandb"))
    assert len(files) == 2  # one of each start, with the same id
    assert all(b"epoch/score" in file.read_bytes() for file in files)

    options = RunOptions(mlflow="birds")
    RunFolder(tmp_path / "b/run").open().release()
    track.build_trackers(options, tmp_path / "b/run", {})[0].close()
    names = {run.info.run_name for run in client.search_runs([kept.info.experiment_id])}
    assert len(names) == 2  # of two folders with the same name


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path, caplog):
    class Broken:
        def record(self, row):
            raise ConnectionError("the server is gone")

        def close(self):
            raise ConnectionError("still gone")

    folder = RunFolder(tmp_path / "run")
    with folder.open() as _, caplog.at_level("INFO"):
        folder.trackers = [Broken(), SimpleNamespace(record=print, close=print)]
        for step in (1, 2):
            folder.record({"kind": "step", "step": step})
        assert len(folder.trackers) == 1
        folder.trackers.append(Broken())
        folder.close_trackers()
    assert len(folder.read().steps) == 2
    assert caplog.text.count("the server is gone") == 1
    assert "still gone" in caplog.text


def test_a_tracker_that_cannot_be_reached_is_named_before_training(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://here")
    with pytest.raises(EverytokenError, match="mlflow cannot be written to"):
        track.build_trackers(RunOptions(mlflow="birds"), tmp_path, {})

"""A run is a folder: configuration, metrics, log, checkpoints, summary. Only rank 0 writes.

config.yaml       all options, resolved
environment.json  versions, machine, command, git commit
metrics.jsonl     one line per logged update and per epoch
metrics.csv       one line per epoch
log.txt           what was said
checkpoints/      see checkpoint.py
best.safetensors  the weights with the best validation score, as a plain timm model
summary.json      the result
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from everytoken._json import plain_json
from everytoken._version import version
from everytoken.errors import EverytokenError
from everytoken.files import write_atomically
from everytoken.locks import Lock
from everytoken.maps.errors import StoreBusyError, StoreError


class RunFolder:
    """The files of one run.

    Args:
        path: the folder.
        writable: False on all ranks but the first; everything that writes is then silent.
    """

    def __init__(self, path: str | Path, writable: bool = True) -> None:
        self.path = Path(path)
        self.writable = writable
        self.trackers: list[Any] = []  # see `track`
        if writable:
            if self.path.exists() and not self.path.is_dir():
                raise EverytokenError(f"--output {self.path} is a file; a run is a folder")
            self.checkpoints.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write(self, name: str, text: str) -> None:
        """Replace a small file in one step, on the disk."""
        if not self.writable:
            return
        write_atomically(self.path / name, text.encode())

    def write_config(self, options: dict[str, Any]) -> None:
        """`config.yaml`, and the environment of this start appended to `environment.json`."""
        self.write("config.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
        path = self.path / "environment.json"
        starts = json.loads(path.read_text()) if path.exists() else []
        self.write("environment.json", json.dumps([*starts, environment()], indent=1))

    def read_config(self) -> dict[str, Any]:
        """The options of the run that is in the folder; {} if there is none."""
        path = self.path / "config.yaml"
        return yaml.safe_load(path.read_text()) if path.exists() else {}

    def is_finished(self, updates: int) -> bool:
        """Whether the result of a run of so many updates has been written."""
        path = self.path / "summary.json"
        return path.exists() and json.loads(path.read_text()).get("updates") == updates

    def say(self, text: str) -> None:
        """A line in log.txt, with the time."""
        if self.writable:
            with (self.path / "log.txt").open("a") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def record(self, row: dict[str, Any]) -> None:
        """A line in metrics.jsonl; rows of kind "epoch" also renew metrics.csv."""
        if not self.writable:
            return
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(plain_json(row, None) + "\n")
        for tracker in self.trackers:
            tracker.record(row)
        if row.get("kind") == "epoch":
            self._write_csv()

    def rows(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl (the last may be torn after a kill)."""
        path = self.path / "metrics.jsonl"
        out = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                out.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return out

    def forget_after(self, step: int) -> None:
        """Drop the metrics of updates that a resumed run will do again."""
        kept = [row for row in self.rows() if row["step"] <= step]
        self.write("metrics.jsonl", "".join(plain_json(row, None) + "\n" for row in kept))
        if self.writable:
            self._write_csv()

    def _write_csv(self) -> None:
        rows = [row for row in self.rows() if row.get("kind") == "epoch"]
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "kind"))
        table = io.StringIO(newline="")
        writer = csv.DictWriter(table, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
        self.write("metrics.csv", table.getvalue())


class RunBusyError(EverytokenError):
    """Another process is training in the folder."""


def lock_run(path: Path) -> Lock | None:
    """The right to write to a run folder, which ends with this process; None where the system has no file locks."""
    try:
        return Lock(path, "run")
    except StoreBusyError as error:
        raise RunBusyError(
            f"another process is training in {path}; wait for it, or choose another --output.\n{error}"
        ) from error
    except StoreError:
        return None
    except OSError as error:
        raise EverytokenError(f"{path} cannot be written to ({error.strerror}); choose another --output") from error


def environment() -> dict[str, Any]:
    """Where and with what a run was started."""
    import numpy
    import timm
    import torch
    import torchvision

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "folder": os.getcwd(),  # where relative paths in config.yaml start
        "everytoken": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "git": _git_commit(),
    }


def _git_commit() -> str | None:
    """The commit of the working directory, or None outside of git.

    The files of `.git` are read, git is not run: `git status` executes what a folder's own `.git/config` names
    (core.fsmonitor, filters), so that training inside a downloaded folder would run its code.
    """
    for folder in (Path.cwd(), *Path.cwd().parents):
        head = folder / ".git" / "HEAD"
        try:
            commit = head.read_text().strip()
            if commit.startswith("ref: "):
                name = commit.removeprefix("ref: ")
                loose = head.parent / name
                if loose.is_file():
                    commit = loose.read_text().strip()
                else:
                    lines = (head.parent / "packed-refs").read_text().splitlines()
                    commit = next((line.split()[0] for line in lines if line.endswith(f" {name}")), "")
        except (OSError, UnicodeDecodeError, IndexError):
            continue
        return commit if re.fullmatch("[0-9a-f]{40,64}", commit) else None
    return None

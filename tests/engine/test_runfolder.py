"""Run folders: what is recorded about the surroundings of a run, and what is not executed for it."""

import json
import subprocess

from everytoken_lab.engine.run_folder import environment


def git(folder, *words):
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words], cwd=folder, check=True)


def test_the_commit_is_recorded_without_running_what_the_folder_configures(tmp_path, monkeypatch):
    repository = tmp_path / "downloaded"
    repository.mkdir()
    git(repository, "init", "-q")
    (repository / "a.txt").write_text("a")
    git(repository, "add", "a.txt")
    git(repository, "commit", "-q", "-m", "a")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True).stdout.strip()
    hook = tmp_path / "hook.sh"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    hook.chmod(0o755)
    with (repository / ".git" / "config").open("a") as file:
        file.write(f"[core]\n\tfsmonitor = {hook}\n")
    (repository / "inside").mkdir()
    monkeypatch.chdir(repository / "inside")
    assert environment()["git"] == commit
    git(repository, "-c", "core.fsmonitor=false", "pack-refs", "--all")
    assert environment()["git"] == commit
    assert not (tmp_path / "executed").exists()
    monkeypatch.chdir(tmp_path)
    assert environment()["git"] is None
    json.dumps(environment())

"""Files are there and whole, or not there; nobody's links are followed; locks die with their process."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from everytoken import files
from everytoken.files import DiskFullError, FileError, Lock, write_atomically
from everytoken_lab.terminal import Progress


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / ".tmp-0-table.csv").symlink_to(victim)  # the name that was used once
    write_atomically(tmp_path / "table.csv", b"new")
    monkeypatch.setattr(files, "temporary_name", lambda path, rank=0: tmp_path / "guessed")
    (tmp_path / "guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "table.csv", b"newer")
    assert victim.read_text() == "precious"
    assert (tmp_path / "table.csv").read_bytes() == b"new"


WRITE = """
import sys, pathlib, everytoken.files as files
for _ in range(150):
    with files.writing(pathlib.Path(sys.argv[1]), sync=False) as file:
        file.write(b"x" * 999)
"""


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    both = [subprocess.Popen([sys.executable, "-c", WRITE, str(tmp_path / "x")]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").stat().st_size == 999


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), files.writing(path) as file:
        file.writelines([b"half", None])
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("x", b"old")]


@pytest.mark.parametrize("name", ["nothing/x.csv", "folder"])
def test_an_error_names_the_file_that_was_to_be_written(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as caught:  # noqa: PT011  (which one, the system decides)
        write_atomically(tmp_path / name, b"new")
    assert caught.value.filename == str(tmp_path / name)


def test_the_mode_of_files_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_atomically(tmp_path / "x", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_long_names_have_temporary_names_too(tmp_path):
    path = tmp_path / ("ü" * 120 + ".json")
    write_atomically(path, b"x")
    assert path.read_bytes() == b"x"


def test_writing_needs_no_pwrite_and_no_syncing_of_folders(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pwrite")  # Windows has none
    fsync = os.fsync

    def only_files(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "Invalid argument")  # some network disks
        fsync(fd)

    monkeypatch.setattr(os, "fsync", only_files)
    write_atomically(tmp_path / "x", b"whole")
    with Lock(tmp_path, "run"):
        pass
    assert (tmp_path / "x").read_bytes() == b"whole"


def test_disk_errors_become_sentences(tmp_path):
    for number, kind, words in (
        (errno.ENOSPC, DiskFullError, "no space left"),
        (errno.EACCES, FileError, "Permission denied"),
        (errno.EROFS, FileError, "Read-only"),
    ):
        with pytest.raises(kind, match=words) as caught, files.disk_errors(tmp_path, "saving weights", "All is kept."):
            raise OSError(number, os.strerror(number))
        assert str(tmp_path) in str(caught.value)
        assert "saving weights" in str(caught.value)


def test_json_has_null_for_numbers_that_are_none():
    assert json.loads(files.plain_json({"a": [float("nan"), 1.0], "b": float("inf")})) == {"a": [None, 1.0], "b": None}


def test_a_lock_file_that_is_a_link_or_a_second_name_is_refused(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock = tmp_path / ".lock-run"
    lock.symlink_to(victim)
    with pytest.raises(FileError, match="link"):
        Lock(tmp_path, "run", patience=0)
    lock.unlink()
    lock.hardlink_to(victim)
    with pytest.raises(FileError, match=r"\.lock-run"):
        Lock(tmp_path, "run", patience=0)
    assert victim.read_text() == "precious"
    lock.unlink()
    Lock(tmp_path, "run", patience=0).release()


def test_one_of_many_has_the_lock(tmp_path):
    """Threads that wait for it, take it and give it back: never two at once, also when its file is new."""
    inside, most = [0], [0]

    def work() -> None:
        for _ in range(20):
            with Lock(tmp_path, "run", patience=60):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.001)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_what_killed_writers_left_is_removed_by_the_owner_of_the_folder(tmp_path):
    left = [files.temporary_name(tmp_path / "x", rank) for rank in (0, 1, 5)]
    for path in left:
        path.touch()
    files.remove_temporary(tmp_path, rank=0, world=2)
    assert list(tmp_path.iterdir()) == [left[1]]
    files.remove_temporary(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_rate_is_that_of_the_job_without_the_time_before_it(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("everytoken_lab.terminal.time.monotonic", lambda: now[0])
    with Progress("job", "images") as progress:
        for now[0], done in ((100.0, 10), (102.0, 20), (110.0, 40)):
            progress(done, 70)
    assert capsys.readouterr().err.splitlines() == ["job: 40 of 70 images, 3 images/s, 0:10 left"]


def test_a_terminal_gets_a_bar_and_a_file_gets_lines(monkeypatch, capsys):
    with Progress("job", "maps", every=0) as progress:
        progress(0, 200)
        progress(100, 200)
    first, second = capsys.readouterr().err.splitlines()
    assert "100 of 200 maps" in second
    assert "left" in second
    assert first == "job: 0 of 200 maps"  # nothing is known about the rate yet
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress("job", "B") as progress:
        progress(5 * 10**6, 2 * 10**9, "[/red] now")
    shown = capsys.readouterr().err
    assert "5.0 MB of 2.00 GB" in shown
    assert "job [/red] now" in shown

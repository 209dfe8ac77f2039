"""Archives at fsspec addresses, through the local cache; with fsspec's file system in memory."""

from __future__ import annotations

import io
import os
import signal
import time
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from everytoken_lab.data import archives
from everytoken_lab.data.datasets import DataError, open_dataset
from everytoken_lab.engine.task import Task

from .conftest import jpeg, tar_of

SHARDS = 4


def shard(number):
    """Four samples with labels."""
    images = ((f"{number}{i}.jpg", jpeg(number * 10 + i)) for i in range(4))
    return tar_of([*images, *((f"{number}{i}.cls", b"%d" % (i % 2)) for i in range(4))])


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """memory://bucket with train and val shards, and a cache of its own; counts what is opened."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    for number in range(SHARDS):
        fs.pipe_file(f"/bucket/train-{number:04d}.tar", shard(number))
    fs.pipe_file("/bucket/val-0000.tar", shard(9))
    monkeypatch.setenv("EVERYTOKEN_CACHE", str(tmp_path / "cache"))
    archives.find_remote.cache_clear()
    calls = []
    own = MemoryFileSystem.open  # of the class, as each thread has a file system of its own
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *a, **k: calls.append("open") or own(*a, **k))
    yield calls
    fs.store.clear()


def cached(tmp_path):
    return sorted((tmp_path / "cache").glob("*/*.tar"))


BUCKET = "memory://bucket/{train-{0000..0003},val-0000}.tar"


def test_shards_at_an_address_are_a_dataset_and_are_downloaded_once(bucket, tmp_path):
    for _ in range(2):
        data = open_dataset(BUCKET)
        assert len(data) == 4 * SHARDS
        assert data.key(5) == "11.jpg"
        assert data.open_bytes(5) == jpeg(11)
        assert data.where(5) == "memory:///bucket/train-0001.tar!11.jpg"
        assert data.labels.tolist() == [0, 1, 0, 1] * SHARDS
    assert open_dataset(BUCKET, "val").open_bytes(0) == jpeg(90)
    assert bucket.count("open") == len(cached(tmp_path)) == SHARDS + 1
    assert [path.read_bytes() for path in cached(tmp_path)].count(shard(1)) == 1


def test_a_run_on_an_address_is_trained_and_reported_when_it_is_typed(bucket, tmp_path, monkeypatch, capsys):
    from everytoken_lab.cli import main
    from everytoken_lab.engine.run_folder import read_run

    monkeypatch.setattr(Task, "is_reported", True)
    words = ["train", BUCKET, "--model", "vit_nano_patch4_32", "--img-size", "32", "--epochs", "1"]
    words += ["-b", "8", "-j", "1", "--device", "cpu", "--threads", "1", "--warmup-epochs", "0"]
    run = tmp_path / "run"
    assert main([*words, "--out", str(run)]) == 0
    assert read_run(run).summary["updates"] == 2
    (run / "report-predictions.npz").unlink()
    report = ["report", str(run), "--out", str(tmp_path / "report.html")]
    capsys.readouterr()
    assert main([*report, "--data", BUCKET]) == 0
    assert "no address is opened" not in capsys.readouterr().out
    assert (run / "report-predictions.npz").is_file()
    assert not (tmp_path / "run/skipped-images.jsonl").exists()


def test_a_truncated_download_is_never_taken_as_whole(bucket, tmp_path, monkeypatch):
    whole = MemoryFileSystem.open
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *a, **k: io.BytesIO(whole(*a, **k).read()[:-100]))
    with pytest.raises(DataError, match=r"train-0000\.tar could not be downloaded whole \([\d,]+ of "):
        open_dataset("memory://bucket/train-0000.tar")
    assert not cached(tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "open", whole)
    assert len(open_dataset("memory://bucket/train-0000.tar")) == 4


def test_an_archive_that_changes_during_its_download_is_not_kept(bucket, tmp_path, monkeypatch):
    """The new one has the same size, so that the number of bytes does not tell."""
    opened, path = MemoryFileSystem.open, "/bucket/train-0000.tar"
    assert len(shard(0)) == len(shard(7))

    def change(fs, *args, **kwargs):
        monkeypatch.setattr(MemoryFileSystem, "open", opened)
        fs.pipe_file(path, shard(7))
        return opened(fs, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "open", change)
    with pytest.raises(DataError, match=r"train-0000\.tar was changed"):
        open_dataset("memory://bucket/train-0000.tar")
    assert not cached(tmp_path)


def test_a_file_of_another_size_and_a_changed_archive_are_downloaded_anew(bucket, tmp_path):
    spec = "memory://bucket/train-0000.tar"
    (file,) = archives.find_remote((spec,))
    file.cached.parent.mkdir(parents=True)
    file.cached.write_bytes(shard(0)[:500])
    assert open_dataset(spec).open_bytes(0) == jpeg(0)
    fsspec.filesystem("memory").pipe_file("/bucket/train-0000.tar", shard(7))
    archives.find_remote.cache_clear()
    assert open_dataset(spec).open_bytes(0) == jpeg(70)


def fetch_in_a_process(path, answers):
    for number in range(SHARDS):
        fsspec.filesystem("memory").pipe_file(f"/b/{number}.tar", shard(number))
    for info in fsspec.filesystem("memory").store.values():  # the same for both, as of one server
        info.created = info.modified = 0
    os.environ["EVERYTOKEN_CACHE"] = str(path)
    answers.put((open_dataset("memory://b/{0..3}.tar").open_bytes(9) == jpeg(21), len(list(path.glob("*/*.tar")))))


def test_two_processes_share_the_cache(tmp_path, forkserver):
    answers = forkserver.SimpleQueue()
    processes = [forkserver.Process(target=fetch_in_a_process, args=(tmp_path / "cache", answers)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [answers.get() for _ in processes] == [(True, SHARDS)] * 2


def fetch_and_die(path, answers, at):
    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    def pieces(file):
        yield shard(0)[: file.size // 2]
        die()

    setattr(*{"piece": (archives, "_pieces", pieces), "name": (os, "replace", die)}[at])
    fetch_in_a_process(path, answers)


@pytest.mark.parametrize("at", ["piece", "name"])
def test_a_download_that_is_killed_anywhere_leaves_nothing_that_is_taken_for_whole(tmp_path, forkserver, at):
    folder, answers = tmp_path / "cache", forkserver.SimpleQueue()
    killed = forkserver.Process(target=fetch_and_die, args=(folder, answers, at))
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    assert not list(folder.glob("*/[!.]*.tar"))
    again = forkserver.Process(target=fetch_in_a_process, args=(folder, answers))
    again.start()
    again.join(120)
    assert answers.get() == (True, SHARDS)
    assert not list(folder.glob("*/.*"))  # what the first one left


@pytest.mark.parametrize("call", ["info", "open", "read"])
def test_a_server_that_is_silent_is_named(bucket, tmp_path, monkeypatch, call):
    monkeypatch.setattr(archives, "_TIMEOUT", 0.2)
    stuck = type("Stuck", (io.BytesIO,), {"read": lambda self, size=-1: time.sleep(1) or b""})
    if call == "read":
        monkeypatch.setattr(MemoryFileSystem, "open", lambda *a, **k: stuck())
    else:
        monkeypatch.setattr(MemoryFileSystem, call, lambda *a, **k: time.sleep(2))
    with pytest.raises(DataError, match=r"train-0000\.tar: no answer for 0\.2 seconds"):
        open_dataset("memory://bucket/train-0000.tar")
    assert not cached(tmp_path)


def test_a_servers_error_is_told_as_one(bucket, monkeypatch):
    class Answer(Exception):  # noqa: N818  (as aiohttp's)
        status = 500

    def info(*a, **k):
        raise FileNotFoundError("x") from Answer("500, message='broken'")

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    with pytest.raises(DataError, match=r"the server answers Answer: 500, message='broken'"):
        open_dataset("memory://bucket/train-0000.tar")
    Answer.status = 404
    with pytest.raises(DataError, match="There is no file"):
        open_dataset("memory://bucket/train-0000.tar")


def test_wrong_bytes_do_not_stay_in_the_cache(bucket, tmp_path, caplog):
    address, whole = "memory://bucket/train-0000.tar", shard(0)
    fsspec.filesystem("memory").pipe_file("/bucket/train-0000.tar", b"\xff" * len(whole))
    with pytest.raises(DataError, match="cannot be read as a zip or tar archive"):
        open_dataset(address)
    assert not cached(tmp_path)
    fsspec.filesystem("memory").pipe_file("/bucket/train-0000.tar", whole)
    archives.find_remote.cache_clear()
    open_dataset(address)
    (archive,) = cached(tmp_path)
    archive.write_bytes(whole[:700] + bytes((whole[700] ^ 1,)) + whole[701:])
    assert open_dataset(address).open_bytes(0) == jpeg(0)
    assert "is damaged and is downloaded again" in caplog.text
    assert archive.read_bytes() == whole


def test_a_disk_without_room_is_noticed_before_anything_is_downloaded(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(DataError, match=r"do not fit on the disk of the cache.*EVERYTOKEN_CACHE"):
        open_dataset("memory://bucket/train-0000.tar")
    assert "open" not in bucket


def test_names_in_the_cache_are_plain():
    for url, name in (("s3://b/train-0.tar", "train-0.tar"), ("s3://b/..", "archive"), ("x://b/a b?c", "a_b_c")):
        assert archives.RemoteFile(url, 1, "").cached.name == name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("memory://bucket/gone.tar", r"There is no file memory:///?bucket/gone\.tar"),
        ("memory://bucket/x*.tar", "name the archives with braces"),
        ("memory://bucket", "is a folder"),
        ("pipe:aws s3 cp s3://b/1.tar -", "commands are not run"),
        ("nonsense://b/1.tar", "cannot be read .*Protocol not known"),
    ],
)
def test_mistakes_in_addresses_are_explained(bucket, spec, message):
    with pytest.raises(DataError, match=message):
        open_dataset(spec)

"""A store survives kill -9, second runs and full disks, and comes out the same."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from everytoken.files import BusyError, DiskFullError
from everytoken.maps import Maps, MapWriter, verify
from tests.maps import fill_store as filling

SCRIPT = Path(__file__).with_name("fill_store.py")


def start(
    folder: Path, rank: int = 0, world: int = 1, delay: float = 0, finish: bool = True
) -> subprocess.Popen[bytes]:
    words = [folder, 40, 8, rank, world, delay, int(finish)]
    return subprocess.Popen([sys.executable, SCRIPT, *map(str, words)], stderr=subprocess.PIPE)


def forked(work) -> int:
    """Run ``work`` in a child process; its exit status (a negative number is a signal)."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(step: int) -> None:
    """Let this process kill itself at its ``step``-th operation on the disk; a write is left half done."""
    left = [step]

    def deadly(function, half=None):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                if half:
                    half(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    write = os.write
    os.write = deadly(write, lambda fd, data: write(fd, bytes(data)[: len(data) // 2]))
    for name in ("fsync", "replace", "unlink", "open", "ftruncate"):
        setattr(os, name, deadly(getattr(os, name)))
    Path.unlink = deadly(Path.unlink)  # type: ignore[method-assign]


def check_every_kill(work, content, tmp_path: Path, every: int, before: Path | None = None) -> None:
    """Whatever the disk operation at which `work(folder)` is killed, doing it again ends in the same store."""
    work(tmp_path / "undisturbed")
    undisturbed, step = content(tmp_path / "undisturbed"), 0

    def killed_work(step: int, folder: Path) -> None:
        die_at(step)
        work(folder)

    while True:
        folder = tmp_path / f"s{step}"
        if before is not None:
            shutil.copytree(before, folder)
        killed = forked(lambda: killed_work(step, folder)) == -signal.SIGKILL  # noqa: B023
        if before is not None:
            verdict = verify(folder)
            assert verdict.ok, f"{verdict.problems} after a kill at operation {step}"
        work(folder)
        assert content(folder) == undisturbed, f"differs after a kill at operation {step}"
        if not killed:
            break
        step += 1 if "EVERYTOKEN_KILLS" in os.environ else every
    assert step > 10


def test_a_kill_at_any_disk_operation_ends_in_the_same_store(content, tmp_path):
    check_every_kill(lambda folder: filling.fill(folder, n=12), content, tmp_path, every=2)


def test_a_kill_while_skipped_images_are_tried_again_ends_in_the_same_store(content, tmp_path):
    def retry(folder: Path):
        with MapWriter(folder, filling.keys(12), filling.META, 8, retry_skipped=True) as writer:
            writer.write({key: filling.make_map(key) for key in writer.pending_keys()})
            writer.finalize()

    filling.fill(tmp_path / "before", n=12)
    shutil.copytree(tmp_path / "before", tmp_path / "undisturbed")
    check_every_kill(retry, content, tmp_path, every=3, before=tmp_path / "before")


def test_kills_at_random_moments_end_in_the_same_store(content, reference, tmp_path):
    chance, folder, kills = random.Random(7), tmp_path / "s", 0
    for _ in range(int(os.environ.get("EVERYTOKEN_KILLS", 3))):
        process = start(folder, delay=0.01)
        time.sleep(chance.uniform(0.1, 0.6))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert start(folder).wait() == 0
    assert kills >= 1
    assert content(folder) == reference


def test_a_resumed_run_redoes_only_the_shard_in_work(tmp_path):
    seen: list[str] = []

    def run(stop_after: int | None):
        with MapWriter(tmp_path / "s", filling.keys(40), filling.META, 8) as writer:
            for key in writer.pending_keys():
                if len(seen) == stop_after:
                    raise KeyboardInterrupt
                seen.append(key)
                writer.write({key: filling.make_map(key)})
            writer.finalize()

    with pytest.raises(KeyboardInterrupt):
        run(21)  # 2 shards and 5 of the third
    assert not list((tmp_path / "s").glob(".tmp-*"))
    run(None)
    assert len(seen) == 40 + 5
    assert [key for key in dict.fromkeys(seen) if seen.count(key) > 1] == sorted(filling.keys(40))[16:21]


def test_two_processes_side_by_side_make_the_same_store_as_one(content, reference, tmp_path):
    folder = tmp_path / "s"
    both = [start(folder, rank, 2, delay=0.005, finish=False) for rank in (0, 1)]
    assert [process.wait() for process in both] == [0, 0], [process.stderr.read() for process in both]
    with MapWriter(folder, filling.keys(40), filling.META, rank=0, world=2) as writer:
        assert writer.pending_shards(0, 1) == []
        writer.finalize()
    assert content(folder) == reference


def test_a_killed_run_of_many_processes_is_finished_by_one(content, reference, tmp_path):
    folder = tmp_path / "s"
    both = [start(folder, rank, 3, delay=0.02, finish=False) for rank in (1, 2)]
    for process in both:
        until = time.monotonic() + 30
        while not list(folder.glob("shard-*")) and time.monotonic() < until:
            time.sleep(0.01)
        process.kill()
        process.wait()
    filling.fill(folder)
    assert content(folder) == reference  # no temporary file of the dead is left either


def test_a_second_run_is_refused_while_the_first_lives_and_welcome_when_it_was_killed(tmp_path):
    folder = tmp_path / "s"
    first = start(folder, delay=0.05)
    while not list(folder.glob("shard-*")):
        time.sleep(0.01)
    with pytest.raises(BusyError, match=f"{folder} is being written by another run"):
        MapWriter(folder, filling.keys(40), filling.META, patience=0.1)
    first.kill()  # and not waited for: the lock must go with the process
    MapWriter(folder, filling.keys(40), filling.META).close()
    first.wait()


def test_one_process_cannot_open_a_store_for_writing_twice(tmp_path):
    with MapWriter(tmp_path / "s", filling.keys(9), filling.META):
        with pytest.raises(BusyError, match="being written"):
            MapWriter(tmp_path / "s", filling.keys(9), filling.META, patience=0)
        # and the failed attempt must not have freed the first one's lock
        code = f"import pathlib, everytoken.files as f; f.Lock(pathlib.Path({str(tmp_path / 's')!r}), 'rank-0', 0)"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "BusyError" in result.stderr
    MapWriter(tmp_path / "s", filling.keys(9), filling.META).close()


def test_a_forked_worker_does_not_hold_the_lock(tmp_path):
    ready, done = os.pipe(), os.pipe()

    def owner():
        MapWriter(tmp_path / "s", filling.keys(9), filling.META)
        if os.fork() == 0:  # like a data-loading worker
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(owner) == -signal.SIGKILL
    MapWriter(tmp_path / "s", filling.keys(9), filling.META, patience=1).close()
    os.write(done[1], b"x")


def test_a_full_disk_is_told_and_loses_nothing(content, reference, tmp_path, monkeypatch):
    folder = tmp_path / "s"
    for function, victim in ((os.write, "write"), (os.fsync, "fsync"), (os.replace, "replace")):
        for calls in (1, 4, 9, 17, 33):
            left = [calls]

            def full(*args, left=left, function=function):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return function(*args)

            with monkeypatch.context() as patch:
                patch.setattr(os, victim, full)
                told = ""
                try:
                    filling.fill(folder)
                except DiskFullError as error:
                    told = str(error)
                assert left[0] >= 0 or ("no space left" in told and str(folder) in told)
            assert not list(folder.glob(".tmp-*")), "a torn file was left"
    filling.fill(folder)
    assert content(folder) == reference


ON_A_SMALL_DISK = """
import logging, runpy, sys
from pathlib import Path
from everytoken.maps import Maps
from everytoken.files import DiskFullError
logging.basicConfig(stream=sys.stdout, format="%(message)s")
filling = runpy.run_path(sys.argv[2])
folder = Path(sys.argv[1], "s")
for turn in range(2):
    try:
        filling["fill"](folder, n=800, shard_size=50)
    except DiskFullError as error:
        print("same command again" in str(error))
    print(not list(folder.glob(".tmp-*")))
store = Maps(folder, partial=True)
print(len(store) > 40, store.read(0) == filling["make_map"](store.key(0)))
"""


def test_a_really_full_disk(tmp_path):
    # in a name space of its own, so that the mount goes away with the process
    script = 'mount -t tmpfs -o size=96k tmpfs "$1" && exec "$2" -c "$3" "$1" "$4"'
    words = ["unshare", "-m", "sh", "-c", script, "sh", tmp_path, sys.executable, ON_A_SMALL_DISK, SCRIPT]
    try:
        ran = subprocess.run(list(map(str, words)), capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare here")
    if "unshare" in ran.stderr or "mount" in ran.stderr:
        pytest.skip("cannot mount a small disk here")
    assert ran.stdout.splitlines() == ["True", "True", "True", "True", "True True"], ran.stderr


def test_a_file_system_without_locks_is_warned_about(tmp_path, monkeypatch, caplog):
    import fcntl

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    filling.fill(tmp_path / "s")
    assert "no file locks" in caplog.text
    assert len(Maps(tmp_path / "s")) == 36

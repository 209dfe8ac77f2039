"""Batches: the same samples whatever the workers, the order, the rank or the restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everytoken.data.batch import Batch
from everytoken.maps import ScoreMap
from everytoken_lab.data.augment import AugmentOptions, EvalTransform, TrainTransform
from everytoken_lab.data.datasets import DataError, open_dataset
from everytoken_lab.data.decode import ImageError
from everytoken_lab.data.loader import BadImages, BatchReader, BatchSampler, Loader, WorkerError

from .conftest import encode, photo

TRAIN = TrainTransform(32, AugmentOptions(reprob=0.5, recount=2))
EVAL = EvalTransform(32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for i in range(25):
        path = root / "abc"[i % 3] / f"{i:02d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode(photo((40 + 3 * i, 90 - 2 * i), i), "JPEG", quality=92))
    return root


@pytest.fixture(scope="module")
def data(folder):
    return open_dataset(folder)


class FakeStore:
    """Maps that tell which image they belong to."""

    path, skipped, num_classes = "maps", {}, 500

    def __init__(self, without=()):
        self.without = without

    def __contains__(self, key):
        return key not in self.without

    def key(self, i):
        return f"key {i}"

    def __getitem__(self, key):
        if key in self.without:
            raise DataError(f"no map of {key}")
        number = int(key[2:4])
        classes = np.array([number, number + 100, number + 200], dtype=np.uint16) * np.ones((4, 5, 1), np.uint16)
        return ScoreMap(np.full((4, 5, 3), number, np.float16), classes, (10, 10), (0.0, 0.0, 1.0, number / 100 + 0.5))


def collect(batches):
    """key -> everything that the loader says about the sample."""
    found = {}
    for batch in batches:
        assert batch.images.shape[1:] == (3, 32, 32)
        assert batch.images.dtype == torch.uint8
        for k, key in enumerate(batch.keys):
            assert key not in found
            parts = (batch.images[k], batch.placement[k], batch.labels[k], batch.indices[k])
            found[key] = tuple(part.numpy().tobytes() for part in parts)
    return found


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_sample_is_the_same_with_any_number_of_workers_in_any_order_and_after_a_restart(data):
    want = collect(Loader(data, TRAIN, 1, train=True, seed=5).epoch(2))
    assert len(want) == 25
    for workers in (1, 4):
        loader = Loader(data, TRAIN, 5, train=True, seed=5, workers=workers)
        first = collect(loader.epoch(1))
        assert first != want  # another epoch looks different
        assert collect(loader.epoch(2)) == want  # the workers of epoch 1 live on
        rest = collect(loader.epoch(2, start=3))
        assert len(rest) == 25 - 3 * 5
        assert all(want[key] == value for key, value in rest.items())
        loader.close()
    other = collect(Loader(data, TRAIN, 7, train=True, seed=5).epoch(2))
    assert all(want[key] == value for key, value in other.items())  # another batch size
    fewer = data.subset(range(0, 25, 2))
    some = collect(Loader(fewer, TRAIN, 5, train=True, seed=5).epoch(2))
    assert all(want[key][:2] == value[:2] for key, value in some.items())  # other samples around it
    assert collect(Loader(data, TRAIN, 5, train=True, seed=6).epoch(2)) != want


def test_every_pass_over_the_loader_is_the_next_epoch(data):
    loader = Loader(data, TRAIN, 4, train=True)
    by_number = [collect(loader.epoch(n)) for n in range(4)]
    fresh = Loader(data, TRAIN, 4, train=True)
    assert [collect(fresh), collect(fresh)] == by_number[:2]
    assert collect(fresh.epoch(0)) == by_number[0]  # asked for by number, an epoch is always the same
    assert collect(fresh.epoch(2)) == by_number[2]
    assert collect(fresh) == by_number[3]
    assert by_number[0] != by_number[1]
    calm = Loader(data, EVAL, 4, train=False)
    assert collect(calm) == collect(calm)


def test_an_epoch_can_be_left_in_the_middle_and_begun_again(data):
    loader = Loader(data, TRAIN, 4, train=True, workers=2)
    whole = [batch.keys for batch in loader.epoch(0)]
    for batch in loader.epoch(0):
        assert batch.keys == whole[0]
        break
    assert [batch.keys for batch in loader.epoch(0)] == whole
    assert [batch.keys for batch in loader.epoch(0, start=5)] == whole[5:]
    loader.close()


def test_repeated_augmentation_shows_each_image_several_times_and_each_time_differently(data):
    loader = Loader(data, TRAIN, 5, train=True, repeats=3)
    looks: dict[int, set[bytes]] = {}
    count = 0
    for batch in loader.epoch(0):
        for image, sample in zip(batch.images, batch.indices.tolist(), strict=True):
            looks.setdefault(sample, set()).add(image.numpy().tobytes())
            count += 1
    assert count == 25
    assert len(looks) == 9
    assert sorted(map(len, looks.values())) == [1] + [3] * 8
    plain = collect(Loader(data, TRAIN, 5, train=True).epoch(0))
    first = {value[0] for value in plain.values()}
    assert all(len(first & views) == 1 for views in looks.values())  # the first look is the usual one


def test_evaluation_is_in_order_and_needs_no_generator(data):
    loader = Loader(data, EVAL, 10, train=False, workers=1)
    keys = [key for batch in loader for key in batch.keys]
    assert keys == list(data.keys())
    batch = next(iter(loader))
    want, placement = EVAL(data.picture(4))
    assert np.array_equal(batch.images[4].permute(1, 2, 0).numpy(), want)
    assert np.allclose(batch.placement[4].numpy(), placement)
    assert batch.labels.tolist() == data.labels[:10].tolist()
    loader.close()


def test_any_callable_is_a_transform(data):
    def corner(picture, rng):
        return picture.region((0, 0, 8, 6)), np.eye(2, 3)

    batch = next(iter(Loader(data, corner, 3, train=False)))
    assert batch.images.shape == (3, 3, 6, 8)


@pytest.mark.parametrize("workers", [0, 2])
def test_score_maps_travel_with_their_images(data, workers):
    loader = Loader(data, TRAIN, 4, train=True, workers=workers, maps=FakeStore())
    for batch in loader.epoch(0):
        numbers = torch.tensor([int(key[2:4]) for key in batch.keys])
        assert torch.equal(batch.maps.scores[:, 0, 0, 0].long(), numbers)
        words = batch.maps.classes.gather(1, batch.maps.local.flatten(1).long()).view(batch.maps.local.shape)
        assert torch.equal(words[..., 1], (numbers + 100).view(-1, 1, 1).expand(-1, 4, 5))
        assert torch.allclose(batch.maps.area[:, 3], numbers / 100 + 0.5)
        assert batch.maps.num_classes == 500
    loader.close()


def test_missing_maps_are_found_before_the_first_batch(data):
    with pytest.raises(DataError, match=rf"no map of 1 of the 25 images(.|\n)*'{data.key(3)}' is not in it"):
        Loader(data, TRAIN, 5, train=True, maps=FakeStore(without={data.key(3)}))
    with pytest.raises(DataError, match=r"no map of 25 of the 25 images(.|\n)*such as 'key 0'"):
        Loader(data, TRAIN, 5, train=True, maps=FakeStore(set(data.keys())))


class Numbers(BatchReader):
    """A reader of batches with targets of its own."""

    def __getitems__(self, requests):
        numbers = torch.tensor([request.sample for request in requests])
        if 7 in numbers:
            raise DataError("the target of sample 7 is wrong")
        return Batch(images=torch.zeros(len(numbers), 3, 1, 1), targets=numbers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_task_can_read_batches_itself_and_its_errors_arrive_as_they_are(data, workers):
    loader = Loader(Numbers(data), batch_size=3, train=False, workers=workers)
    batches = loader.epoch(0)
    assert [next(batches).targets.tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(DataError) as caught:
        next(batches)
    assert str(caught.value) == "the target of sample 7 is wrong"  # torch would add a traceback to it
    loader.close()


@pytest.fixture
def spoilt(tmp_path):
    for i in range(12):
        path = tmp_path / "data" / "ab"[i % 2] / f"{i:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        good = encode(photo((120, 90), i), "JPEG", quality=92)
        path.write_bytes(good[: len(good) * 3 // 4] if i in (3, 8) else good)
    return open_dataset(tmp_path / "data")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_raises_by_name_in_one_line(spoilt, workers):
    loader = Loader(spoilt, TRAIN, 4, train=True, workers=workers)
    with pytest.raises(ImageError, match=r"^[^\n]*(03|08)\.jpg: [^\n]*truncated[^\n]*$"):
        list(loader.epoch(0))
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_skipped_image_is_left_out_counted_and_logged_once_and_never_replaced(spoilt, workers, tmp_path):
    bad = BadImages("skip", quota=0.5, log=tmp_path / "bad.jsonl")
    loader = Loader(spoilt, TRAIN, 4, train=True, workers=workers, bad_images=bad)
    for epoch in range(2):
        batches = list(loader.epoch(epoch))
        assert len(batches) == len(loader) == 3
        keys = [key for batch in batches for key in batch.keys]
        assert sorted(keys) == sorted(key for key in list(spoilt.keys()) if key[2:4] not in ("03", "08"))
        assert sum(len(batch) + len(batch.skipped) for batch in batches) == 12
    rows = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert sorted(row["key"] for row in rows) == ["a/08.jpg", "b/03.jpg"]
    assert all("truncated" in row["reason"] for row in rows)
    assert len(bad.seen) == 2
    loader.close()


def test_too_many_bad_images_stop_the_run_with_their_names(spoilt, tmp_path):
    loader = Loader(spoilt, EVAL, 4, train=False, bad_images=BadImages("skip", 0.1, tmp_path / "x"))
    with pytest.raises(DataError, match=r"2 of 12 images.*quota of 10\.0%(.|\n)*03\.jpg(.|\n)*are listed in"):
        list(loader)
    few = BadImages("skip")  # 1 % of 60 images is none, and yet five may be bad
    few.note([(str(i), "truncated") for i in range(5)], 60)
    with pytest.raises(DataError, match=r"6 of 60 images(.|\n)*everytoken doctor"):
        few.note([("5", "truncated")], 60)


def test_a_batch_without_a_single_readable_image_stops_training_but_not_evaluation(spoilt):
    only = spoilt.subset([i for i in range(12) if spoilt.key(i)[2:4] in ("03", "08")])
    with pytest.raises(DataError, match="None of a batch's 2 images"):
        list(Loader(only, TRAIN, 2, train=True, bad_images=BadImages("skip", 1.0)).epoch(0))
    assert list(Loader(only, EVAL, 2, train=False, bad_images=BadImages("skip", 1.0))) == []


def test_a_program_that_ends_without_closing_its_loader_ends(folder):
    code = f"""
from everytoken_lab.data.loader import Loader
from everytoken_lab.data.augment import TrainTransform
from everytoken_lab.data.datasets import open_dataset
loader = Loader(open_dataset({str(folder)!r}), TrainTransform(32), 4, train=True, workers=2)
batches = loader.epoch(0)
print(next(batches).images.shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "[4, 3, 32, 32]" in done.stdout


def test_workers_outlive_signals_to_the_group_and_end_when_the_loader_is_closed(data):
    loader = Loader(data, TRAIN, 4, train=True, workers=2)
    batches = loader.epoch(0)
    next(batches), next(batches)  # one of each worker, so both have begun
    workers = loader._workers.loader._iterator._workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(batches)) == len(loader) - 2
    assert all(worker.is_alive() for worker in workers)
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(loader.epoch(0))) == len(loader)  # new workers
    loader.close()


def test_the_loader_leaves_global_generators_alone(data):
    before = torch.get_rng_state()
    loader = Loader(data, TRAIN, 8, train=True, workers=1)
    list(loader.epoch(0))
    loader.close()
    assert torch.equal(before, torch.get_rng_state())


class Stubborn:
    """Reads batches; the second one takes long, kills its worker, or does not fit into shared memory."""

    def __init__(self, data, how):
        self.data, self.how = data, how

    def __getitems__(self, requests):
        if self.how == "slow" and requests[0].sample:
            time.sleep(4)
        if self.how == "killed" and requests[0].sample:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "full":
            torch.Tensor.share_memory_ = _no_space
        return Batch(torch.zeros(len(requests), 3, 1, 1), torch.zeros(len(requests)), keys=("a",) * len(requests))


def _no_space(tensor):
    raise RuntimeError("unable to allocate shared memory")


@pytest.mark.parametrize(
    ("how", "match"),
    [("killed", r"^a process that loads images \(pid \d+\) is killed by signal: Killed\."), ("full", "shm-size"),
     ("slow", "no batch for 1 seconds")],
)  # fmt: skip
def test_a_worker_that_dies_cannot_send_or_does_not_answer_is_an_error_in_one_sentence(data, how, match, monkeypatch):
    monkeypatch.setattr("everytoken_lab.data.loader._TIMEOUT", 1)
    loader = Loader(Stubborn(data, how), batch_size=12, train=False, workers=2)
    with pytest.raises(WorkerError, match=match) as caught:
        list(loader.epoch(0))
    assert len(str(caught.value).splitlines()) == 1
    loader.close()


@pytest.mark.skipif(sys.platform != "linux", reason="forks, counts its own handles")
def test_with_too_few_handles_an_epoch_ends_or_is_an_error_but_never_hangs(folder):
    code = f"""
import os, resource, signal, time
from everytoken_lab.data.loader import Loader
from everytoken_lab.data.augment import TrainTransform
from everytoken_lab.data.datasets import open_dataset
data, ends = open_dataset({str(folder)!r}), []
for more in range(4, 40, 3):
    if (pid := os.fork()) == 0:
        signal.alarm(60)
        limit = len(os.listdir("/proc/self/fd")) + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            for _ in Loader(data, TrainTransform(32), 2, train=True, workers=2).epoch(0):
                time.sleep(0.02)  # the workers read ahead
        except Exception as error:
            os._exit(1)
        os._exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(*ends)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    ends = done.stdout.split()
    assert ends[0] == "1", done.stderr
    assert ends[-1] == "0"
    assert set(ends) == {"0", "1"}


# -- which samples make up which batch --------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    total=st.integers(1, 200),
    batch=st.integers(1, 17),
    world=st.integers(1, 6),
    repeats=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_every_sample_of_an_epoch_is_seen_exactly_once_over_all_ranks(total, batch, world, repeats, epoch):
    def steps(rank, **options):
        sampler = BatchSampler(total, batch, rank=rank, world=world, **options)
        sampler.epoch = epoch
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert all(batches)
        return batches

    samples = [r.sample for rank in range(world) for step in steps(rank, train=False) for r in step]
    assert sorted(samples) == list(range(total))
    if total < batch * world:
        with pytest.raises(DataError, match="do not fill one batch"):
            BatchSampler(total, batch, train=True, world=world)
        return
    ranks = [steps(rank, train=True, repeats=repeats) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1  # no rank waits for a batch that another does not have
    requests = [r for batches in ranks for step in batches for r in step]
    assert len(set(requests)) == len(requests) == total // (batch * world) * batch * world
    assert all(r.epoch == epoch for r in requests)
    assert all(len(step) == batch for batches in ranks for step in batches)
    if repeats == 1:
        assert len({r.sample for r in requests}) == len(requests)


@pytest.mark.parametrize("repeats", [1, 3])
def test_two_processes_share_the_steps_of_one(repeats):
    def steps(batch, rank, world):
        return list(BatchSampler(100, batch, train=True, seed=1, rank=rank, world=world, repeats=repeats))

    one = steps(16, 0, 1)
    for whole, left, right in zip(one, steps(8, 0, 2), steps(8, 1, 2), strict=True):
        assert sorted(whole) == sorted(left + right)


def test_epochs_have_different_orders_and_drop_different_samples():
    sampler = BatchSampler(50, 8, train=True, seed=0)
    kept = []
    for epoch in range(6):
        sampler.epoch = epoch
        kept.append([r.sample for step in sampler for r in step])
    assert len({tuple(k) for k in kept}) == 6
    assert len(set.union(*(set(range(50)) - set(k) for k in kept))) > 4

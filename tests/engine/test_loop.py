"""The loop on a toy task: resume, faults, averaging, accumulation."""

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from everytoken.errors import EverytokenError
from everytoken.keyed import torch_generator
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.loop import Loop, Stopped
from everytoken_lab.engine.options import DataOptions, OptimOptions, RunOptions, TrainOptions
from everytoken_lab.engine.run_folder import RunFolder, read_run
from everytoken_lab.engine.task import Task


@dataclass(frozen=True)
class ToyBatch:
    x: torch.Tensor
    y: torch.Tensor
    key: object = None

    @property
    def keys(self):
        return [f"image-{i}" for i in range(len(self.x))]

    def __len__(self):
        return len(self.x)


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, batch):
        return {"loss": (self.net(batch.x)[:, 0] - batch.y).square().mean()}


class Toy(Task):
    """Regression; batches are a function of (epoch, position)."""

    batches_per_epoch = 6

    def __init__(self, options, folder, trouble=None, module=None):
        super().__init__(module or Step(), options, WORLD, folder)
        self.trouble = trouble or (lambda epoch, position, batch: batch)

    @property
    def backbone(self):
        return self.module.net

    def train_batches(self, epoch, start):
        for position in range(start, self.batches_per_epoch):
            x = torch.randn(8, 6, generator=torch_generator(1, epoch, position))
            yield self.trouble(epoch, position, ToyBatch(x, x.sum(1)))

    def validate(self, module):
        assert not module.training
        x = torch.randn(64, 6, generator=torch_generator(9))
        return {"score": -float((module.net(x)[:, 0] - x.sum(1)).square().mean())}

    def weights(self, state):
        return {"": {k.removeprefix("net."): v for k, v in state.items()}}

    def metadata(self):
        return {"architecture": "toy"}


OPTIONS = TrainOptions(
    data="toy",
    dataset=DataOptions(batch_size=8),
    optim=OptimOptions(epochs=3, lr=0.01, warmup_epochs=1, model_ema=True, model_ema_decay=0.9),
    run=RunOptions(log_interval=2, checkpoint_steps=2),
)
WORLD = World(0, 1, torch.device("cpu"))


def make(path, task=Toy, world=WORLD, batch_size=8, **changes):
    """A loop in a folder; `task(options, folder)` makes the task."""
    optim = replace(OPTIONS.optim, **{k: v for k, v in changes.items() if k in OptimOptions.__dataclass_fields__})
    run = replace(OPTIONS.run, **{k: v for k, v in changes.items() if k in RunOptions.__dataclass_fields__})
    options = replace(OPTIONS, optim=optim, run=run, dataset=DataOptions(batch_size=batch_size))
    folder = RunFolder(path)
    folder.open().release()
    return Loop(task(options, folder), options, folder, world)


def with_trouble(trouble):
    return lambda options, folder: Toy(options, folder, trouble)


def summary_of(path):
    return read_run(path).summary


def final(folder):
    (last,) = sorted(folder.glob("checkpoints/step-*"))[-1:]
    state = torch.load(last / "state.pt", weights_only=True)
    state.pop("seconds")
    state.pop("options", None)
    return state


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class CutError(Exception):
    pass


def cut_at(number):
    """Raise before a batch, counted over epochs."""

    def trouble(epoch, position, batch):
        if epoch * 6 + position == number:
            raise CutError
        return batch

    return with_trouble(trouble)


def signal_at(where, number):
    def trouble(epoch, position, batch):
        if (epoch, position) == where:
            os.kill(os.getpid(), number)
        return batch

    return with_trouble(trouble)


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").open()]


def logged(path):
    """Rows of metrics without what depends on the clock."""
    clock = ("seconds", "images_per_second", "waiting")
    return [{k: v for k, v in row.items() if k not in clock} for row in rows(path)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nothing happened to."""
    path = tmp_path_factory.mktemp("whole")
    make(path).run()
    return path


@pytest.mark.parametrize("cut", range(18))
def test_a_run_that_is_cut_anywhere_ends_with_the_same_bits(undisturbed, tmp_path, cut):
    with pytest.raises(CutError):
        make(tmp_path, cut_at(cut)).run()
    make(tmp_path).run()
    assert same(final(undisturbed), final(tmp_path))
    assert logged(undisturbed) == logged(tmp_path)


def test_a_damaged_newest_checkpoint_costs_only_time(undisturbed, tmp_path, caplog):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    (sorted((tmp_path / "checkpoints").iterdir())[-1] / "state.pt").write_bytes(b"torn")
    with caplog.at_level("INFO"):
        make(tmp_path).run()
    assert "damaged checkpoint" in caplog.text
    assert same(final(undisturbed), final(tmp_path))


@pytest.mark.parametrize("name", ["environment.json", "config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("content", [b"\xff{[", b"[1, 2]\n3\n", b""])
def test_damaged_records_never_keep_a_run_from_continuing(undisturbed, tmp_path, name, content):
    with pytest.raises(CutError):
        make(tmp_path, cut_at(10)).run()
    RunFolder(tmp_path).write_config({"epochs": 3})
    (tmp_path / name).write_bytes(content)
    make(tmp_path).run()
    assert same(final(undisturbed), final(tmp_path))
    run = read_run(tmp_path)
    assert run.state == "finished"
    assert run.config["epochs"] == 3


def test_metrics_that_cannot_be_read_are_counted_and_logged(tmp_path, caplog):
    with pytest.raises(CutError):
        make(tmp_path, cut_at(13)).run()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step"\n"text"\n{"kind": "step", "step": "x"}\n{"kind"')
    with caplog.at_level("INFO"):
        make(tmp_path).run()
    assert "2 of 12 lines of metrics.jsonl" in caplog.text
    assert [row["epoch"] for row in read_run(tmp_path).history] == [1, 2, 3]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_stop_and_the_run_continues_exactly(undisturbed, tmp_path, number, code):
    with pytest.raises(Stopped) as stop:
        make(tmp_path, signal_at((1, 2), number)).run()
    assert stop.value.exit_code == code
    assert final(tmp_path)["step"] == 9
    make(tmp_path).run()
    assert same(final(undisturbed), final(tmp_path))


def test_a_signal_at_the_end_of_an_epoch_stops_after_its_validation(tmp_path):
    with pytest.raises(Stopped):
        make(tmp_path, signal_at((0, 5), signal.SIGTERM)).run()
    assert [row["epoch"] for row in read_run(tmp_path).history] == [1]
    make(tmp_path).run()
    assert [row["epoch"] for row in read_run(tmp_path).history] == [1, 2, 3]


def test_training_works_outside_of_the_main_thread(tmp_path):
    errors = []

    def work():
        try:
            make(tmp_path, epochs=1).run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert summary_of(tmp_path)["updates"] == 6


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_single_bad_loss_is_left_out_and_counted_and_batch_norms_forget_it(tmp_path, accumulate):
    def trouble(epoch, position, batch):
        norm = module.net[1]
        if (epoch, position) == (1, 2):
            before.update({name: value.clone() for name, value in norm.named_buffers()})
            return replace(batch, x=batch.x * float("nan"))
        if (epoch, position) == (1, 2 + accumulate):
            assert same(before, dict(norm.named_buffers()))
            assert before["num_batches_tracked"] == 8
        return batch

    module, before = Step(), {}
    loop = make(
        tmp_path,
        lambda options, folder: Toy(options, folder, trouble, module),
        grad_accum_steps=accumulate,
        log_interval=1,
    )
    loop.run()
    assert bool(torch.isfinite(torch.cat([b.flatten() for b in loop.ema.buffers()])).all())
    assert summary_of(tmp_path)["updates left out"] == 1
    bad = json.loads((tmp_path / "bad-updates.jsonl").read_text())
    assert bad["step"] == 8 // accumulate
    assert bad["images"][0] == "image-0"
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())


def accumulated(parts):
    """Four updates per epoch, each of a batch of eight in so many parts."""

    class Plain(Toy):
        def __init__(self, options, folder):
            module = Step()
            module.net = nn.Sequential(nn.Linear(6, 1))
            torch.manual_seed(1)
            nn.init.normal_(module.net[0].weight)
            nn.init.zeros_(module.net[0].bias)
            super().__init__(options, folder, module=module)
            self.batches_per_epoch = 4 * parts

        def train_batches(self, epoch, start):
            for position in range(start, self.batches_per_epoch):
                x = torch.randn(8, 6, generator=torch_generator(1, epoch, position // parts))
                part = x.chunk(parts)[position % parts]
                yield ToyBatch(part, part.sum(1))

    return Plain


@pytest.mark.parametrize("changes", [{"opt": "adamw"}, {"opt": "sgd"}, {"opt": "sgd", "clip_grad": 0.5}])
def test_accumulated_updates_equal_large_batches(tmp_path, changes):
    """SGD and clipping see the size of the gradient, which AdamW divides out."""
    changes = {"model_ema": False, "epochs": 1, **changes}
    one = make(tmp_path / "one", accumulated(1), **changes)
    two = make(tmp_path / "two", accumulated(2), grad_accum_steps=2, batch_size=4, **changes)
    for loop in (one, two):
        loop.run()
    for p, q in zip(one.task.module.parameters(), two.task.module.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)
    norms = [[row["grad_norm"] for row in rows(loop.folder.path) if row["kind"] == "step"] for loop in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_learning_rate_follows_the_real_batch(tmp_path):
    loop = make(tmp_path, lr=0.0, lr_base=1e-3, grad_accum_steps=2)
    assert loop.lr == pytest.approx(1e-3 * 16 / 1024)


def test_weights_of_a_checkpoint_and_the_best_are_plain(undisturbed):
    newest = sorted((undisturbed / "checkpoints").iterdir())[-1]
    weights = load_file(newest / "model.safetensors")
    assert all(torch.equal(weights[k], final(undisturbed)["module"][f"net.{k}"]) for k in weights)
    assert (undisturbed / "best.safetensors").is_file()
    run = read_run(undisturbed)
    assert run.summary["best"]["score"] == max(row["ema_score"] for row in run.history)
    assert run.summary["updates"] == 18


def test_results_without_a_checkpoint_are_not_overwritten(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(EverytokenError, match=r"best\.safetensors, summary\.json"):
        make(tmp_path).run()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before
    for name in ("best.safetensors", "summary.json"):
        (tmp_path / name).unlink()
    with pytest.raises(EverytokenError, match="metrics of 3 epochs"):
        make(tmp_path).run()


@pytest.mark.parametrize("method", ["save", "_write_best"])
@pytest.mark.parametrize("end", [1, 2])
def test_a_kill_around_the_checkpoint_of_an_epoch_costs_only_time(undisturbed, tmp_path, monkeypatch, method, end):
    def cut(loop):
        if loop.epoch == end:
            raise CutError
        return real(loop)

    real = getattr(Loop, method)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, method, cut)
        with pytest.raises(CutError):
            make(tmp_path, checkpoint_steps=0).run()
    make(tmp_path, checkpoint_steps=0).run()
    assert same(final(undisturbed), final(tmp_path))
    assert (undisturbed / "best.safetensors").read_bytes() == (tmp_path / "best.safetensors").read_bytes()


def test_best_weights_are_there_after_a_kill_just_before_them(tmp_path, monkeypatch):
    """The last epoch is the best, and the run is killed when its checkpoint is written but not its weights."""
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_write_best", lambda loop: None)
        make(tmp_path).run()
    assert not (tmp_path / "best.safetensors").exists()
    make(tmp_path).run()
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    best, last = load_file(tmp_path / "best.safetensors"), load_file(newest / "ema.safetensors")
    assert all(torch.equal(best[name], value) for name, value in last.items())


class Counted(Toy):
    """48 images in an order that depends on the epoch alone, in batches of any size; keeps what it has shown."""

    def __init__(self, options, folder):
        super().__init__(options, folder)
        self.batch = options.dataset.batch_size
        self.batches_per_epoch, self.shown = 48 // self.batch, []

    def train_batches(self, epoch, start):
        order = torch.randperm(48, generator=torch_generator(2, epoch))
        for position in range(start, self.batches_per_epoch):
            images = order[position * self.batch : (position + 1) * self.batch]
            self.shown += [(epoch, int(i)) for i in images]
            x = torch.randn(len(images), 6, generator=torch_generator(3, epoch, position))
            yield ToyBatch(x, x.sum(1))


def counted(path, batch, **changes):
    return make(path, Counted, batch_size=batch, **changes)


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (6, 16)])
def test_epochs_are_counted_on_when_the_batch_changes(tmp_path, caplog, before, after):
    counted(tmp_path, before, epochs=1).run()
    loop = counted(tmp_path, after, epochs=3)
    with caplog.at_level("INFO"):
        loop.run()
    assert f"the global batch is {after} now and was {before}" in caplog.text
    run = read_run(tmp_path)
    assert run.summary["updates"] == 48 // before + 2 * (48 // after)
    assert sorted(loop.task.shown) == [(epoch, i) for epoch in (1, 2) for i in range(48)]
    assert [row["epoch"] for row in run.history] == [1, 2, 3]
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(OPTIONS.optim.min_lr)
    with caplog.at_level("INFO"):
        counted(tmp_path, after, epochs=3).run()
    assert "is finished" in caplog.messages[-1]


def test_an_epoch_under_way_shows_the_images_that_are_left_when_the_batch_changes(tmp_path):
    loop = counted(tmp_path, 4, epochs=2)
    batches = loop._batches()
    for _ in range(14):  # a whole epoch and two updates
        loop._update(batches)
    loop.save()
    shown = loop.task.shown[-8:]
    loop = counted(tmp_path, 8, epochs=2)
    loop.run()
    assert sorted(shown + loop.task.shown) == [(1, i) for i in range(48)]


def test_the_same_global_batch_in_other_parts_continues_at_the_same_image(tmp_path, caplog):
    loop = counted(tmp_path, 8, epochs=1)
    batches = loop._batches()
    for _ in range(2):
        loop._update(batches)
    loop.save()
    loop = counted(tmp_path, 4, epochs=1, grad_accum_steps=2)
    with caplog.at_level("INFO"):
        loop.resume()
    assert (loop.step, loop.epoch, loop.position) == (2, 0, 4)
    assert "global batch" not in caplog.text


# -- updates instead of epochs


def updates(path, iters, task=Counted, batch=16, **changes):
    changes = {"val_iters": 4, "warmup_epochs": 0, "warmup_iters": 2, **changes}
    return make(path, task, batch_size=batch, iters=iters, **changes)


def test_updates_are_counted_through_whole_passes_over_the_data(tmp_path):
    loop = updates(tmp_path, 7, grad_accum_steps=2)
    loop.run()
    shown = list(dict.fromkeys(loop.task.shown))  # what is left of a pass at a validation is asked for again
    assert sorted(shown[: 4 * 48]) == [(epoch, i) for epoch in range(4) for i in range(48)]
    run = read_run(tmp_path)
    assert [row["step"] for row in run.history] == [4, 7]
    assert run.summary["updates"] == 7
    assert run.summary["epochs"] == pytest.approx(7 * 2 / 3, abs=1e-3)
    assert run.history[-1]["epoch"] == run.summary["epochs"]
    assert run.state == "finished"
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(OPTIONS.optim.min_lr, rel=0.2)


@pytest.mark.parametrize("cut", [1, 5, 9, 13])
def test_updates_that_are_cut_anywhere_end_with_the_same_bits(tmp_path, cut):
    def task(options, folder):
        def trouble(epoch, position, batch):
            trouble.shown += 1
            if trouble.shown == cut:
                raise CutError
            return batch

        trouble.shown = 0
        return Toy(options, folder, trouble)

    updates(tmp_path / "whole", 15, Toy).run()
    with pytest.raises(CutError):
        updates(tmp_path / "cut", 15, task).run()
    updates(tmp_path / "cut", 15, Toy).run()
    assert same(final(tmp_path / "whole"), final(tmp_path / "cut"))
    assert logged(tmp_path / "whole") == logged(tmp_path / "cut")


def test_validating_more_often_does_not_change_where_updates_continue(tmp_path):
    updates(tmp_path, 8).run()
    loop = updates(tmp_path, 12, val_iters=3)
    loop.resume()
    assert (loop.step, loop.epoch, loop.position) == (8, 2, 2)
    loop.run()
    assert [row["step"] for row in read_run(tmp_path).history] == [4, 8, 9, 12]


def test_too_few_batches_are_explained(tmp_path):
    with pytest.raises(EverytokenError, match="grad_accum_steps 7"):
        make(tmp_path, grad_accum_steps=7)


# -- many processes decide alike


class TwoProcesses(World):
    """The first of two: collectives answer as if the other process had said `other`."""

    other = False

    def any(self, flag):
        return bool(flag) or self.other

    def gather(self, value):
        return [value, value]

    def share_buffers(self, module):
        pass

    def barrier(self):
        pass


@pytest.mark.parametrize(
    ("rank", "late", "other", "saves"),
    [(0, True, False, True), (1, True, False, False), (0, False, False, False), (1, False, True, True)],
)
def test_the_first_process_decides_when_a_timed_checkpoint_is_due(tmp_path, monkeypatch, rank, late, other, saves):
    """Saving sharded weights is collective: a process that saved by its own clock would wait for ever."""
    world = TwoProcesses(rank, 2, torch.device("cpu"))
    monkeypatch.setattr(TwoProcesses, "other", other)
    monkeypatch.setattr("everytoken_lab.engine.loop.distribute", lambda module, *_: module)
    loop = make(tmp_path, world=world, checkpoint_steps=0, checkpoint_minutes=1)
    saved = set()
    monkeypatch.setattr(loop, "save", lambda: saved.add(loop.step))
    monkeypatch.setattr(loop, "_stop", lambda: None)
    monkeypatch.setattr(loop, "saved", time.monotonic() - (100 if late else 10))
    for step in range(1, 9):  # processes talk every eighth update
        loop.step = step
        loop._stop_or_save()
    assert saved == ({8} if saves else set())


def test_a_changed_record_of_the_options_is_not_taken_for_another_run(undisturbed, tmp_path):
    with pytest.raises(CutError):
        make(tmp_path / "run", cut_at(9)).run()
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("seed: 42", "seed: 43").replace("data: toy", "data: tox"))
    make(tmp_path / "run").run()
    assert same(final(tmp_path / "run"), final(undisturbed))


def test_what_killed_writers_left_in_a_run_goes_when_it_is_opened(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    (tmp_path / "run" / ".tmp-0-1-abc-best.safetensors").write_bytes(bytes(100))
    make(tmp_path / "run").run()
    assert not list((tmp_path / "run").glob(".tmp*"))


def on_a_gpu(loop):
    """The loop, which now takes its device for one that the host has to wait for."""
    loop.world = replace(loop.world, device=torch.device("cuda"))
    return loop


def bad_at(*updates, cut=-1):
    def trouble(epoch, position, batch):
        if epoch * 6 + position == cut:
            raise CutError
        return replace(batch, x=batch.x * float("nan")) if epoch * 6 + position in updates else batch

    def build(options, folder):
        module = Step()
        module.net[1] = nn.Identity()  # batch norm would keep the bad statistics
        return Toy(options, folder, trouble, module)

    return build


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lamb"])
def test_bad_updates_are_left_out_on_the_device_and_counted_at_the_log_interval(tmp_path, monkeypatch, opt):
    """The first update, too, and with an optimizer that cannot be told on the device: the same weights either way."""
    monkeypatch.setattr(torch, "empty_like", lambda like, **how: torch.full_like(like, float("nan"), **how))
    task = bad_at(0, 7, 8)
    choice = {"opt": opt, "log_interval": 5, "checkpoint_steps": 4, "lr": 1e-3}
    plain = make(tmp_path / "cpu", task, **choice)
    plain.run()
    deferred, seen = on_a_gpu(make(tmp_path / "gpu", task, **choice)), []
    read = deferred.read_flags
    deferred.read_flags = lambda: seen.append(deferred.step) or read()
    deferred.run()
    assert sorted(set(seen)) == [4, 5, 6, 8, 10, 12, 15, 16, 18]  # logs, checkpoints, ends of epochs
    state = final(tmp_path / "gpu")
    assert same(state, final(tmp_path / "cpu"))
    assert state["bad_total"] == 3
    rows = [(tmp_path / name / "bad-updates.jsonl").read_text() for name in ("cpu", "gpu")]
    assert rows[0] == rows[1]
    assert [json.loads(line)["step"] for line in rows[0].splitlines()] == [0, 7, 8]
    assert all(bool(torch.isfinite(p).all()) for p in deferred.task.module.parameters())


def test_bad_updates_in_a_row_stop_a_run_on_a_gpu_and_their_count_is_exact(tmp_path):
    with pytest.raises(EverytokenError, match=r"3 updates in a row.*bad-updates\.jsonl.*lower lr"):
        on_a_gpu(make(tmp_path, bad_at(1, 3, 4, 5, 6, 7), bad_loss_limit=3, log_interval=50)).run()
    assert [json.loads(line)["step"] for line in (tmp_path / "bad-updates.jsonl").open()] == [1, 3, 4, 5]
    assert final(tmp_path)["step"] == 4  # the last checkpoint before the limit was seen

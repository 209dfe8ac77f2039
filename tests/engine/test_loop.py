"""The loop on a toy task: resume, faults, averaging, accumulation."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from everytoken.data.batch import Batch
from everytoken.engine.checkpoint import save_checkpoint
from everytoken.engine.distributed import World
from everytoken.engine.loop import BadLossError, Loop, Stopped
from everytoken.engine.options import DataOptions, OptimOptions, RunOptions, TrainOptions
from everytoken.engine.runfolder import RunFolder
from everytoken.errors import EverytokenError
from everytoken.keyed import torch_generator


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, batch):
        return {"loss": (self.net(batch.images)[:, 0] - batch.targets).square().mean()}


class Toy:
    """Regression; batches are a function of (epoch, position)."""

    batches_per_epoch = 6
    score_name = "score"

    def __init__(self, trouble=None):
        self.module = Step()
        self.backbone = self.module.net
        self.trouble = trouble or (lambda epoch, position, batch: batch)

    def batches(self, epoch, start):
        for position in range(start, self.batches_per_epoch):
            x = torch.randn(8, 6, generator=torch_generator(1, epoch, position))
            x, y = self.trouble(epoch, position, (x, x.sum(1)))
            yield Batch(x, targets=y)

    def size(self, batch):
        return len(batch)

    def name(self, batch):
        return [f"image-{i}" for i in range(len(batch))]

    def score(self, module):
        module.eval()
        x = torch.randn(64, 6, generator=torch_generator(9))
        with torch.no_grad():
            loss = float((module.net(x)[:, 0] - x.sum(1)).square().mean())
        module.train()
        return {"score": -loss}

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


def make(folder, task=None, **changes):
    optim = replace(OPTIONS.optim, **{k: v for k, v in changes.items() if k in OptimOptions.__dataclass_fields__})
    run = replace(OPTIONS.run, **{k: v for k, v in changes.items() if k in RunOptions.__dataclass_fields__})
    loop = Loop(task or Toy(), replace(OPTIONS, optim=optim, run=run), RunFolder(folder), WORLD)
    loop.resume(lambda text: None)
    return loop


def final(folder):
    (last,) = sorted(folder.glob("checkpoints/step-*"))[-1:]
    state = torch.load(last / "state.pt", weights_only=True)
    state.pop("seconds")
    return state


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class CutError(Exception):
    pass


@pytest.mark.parametrize("cut", range(18))
def test_a_run_that_is_cut_anywhere_ends_with_the_same_bits(tmp_path, cut):
    make(tmp_path / "whole").run()

    def trouble(epoch, position, batch):
        if epoch * 6 + position == cut:
            raise CutError
        return batch

    with pytest.raises(CutError):
        make(tmp_path / "cut", Toy(trouble)).run()
    make(tmp_path / "cut").run()
    assert same(final(tmp_path / "whole"), final(tmp_path / "cut"))
    metrics = [
        [
            {k: v for k, v in row.items() if k not in ("seconds", "images_per_second", "waiting")}
            for row in folder.rows()
        ]
        for folder in (RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut"))
    ]
    assert metrics[0] == metrics[1]


def test_a_damaged_newest_checkpoint_costs_only_time(tmp_path):
    make(tmp_path / "whole").run()
    make(tmp_path / "cut", epochs=3).run()
    newest = sorted((tmp_path / "cut/checkpoints").iterdir())[-1]
    (newest / "state.pt").write_bytes(b"torn")
    told = []
    loop = Loop(Toy(), OPTIONS, RunFolder(tmp_path / "cut"), WORLD)
    loop.resume(told.append)
    assert "passing over" in told[0]
    loop.run()
    assert same(final(tmp_path / "whole"), final(tmp_path / "cut"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_save_and_stop_and_the_run_goes_on_exactly(tmp_path, number, code):
    make(tmp_path / "whole").run()

    def trouble(epoch, position, batch):
        if (epoch, position) == (1, 2):
            os.kill(os.getpid(), number)
        return batch

    with pytest.raises(Stopped) as stop:
        make(tmp_path / "cut", Toy(trouble)).run()
    assert stop.value.code == code
    assert final(tmp_path / "cut")["step"] == 9
    make(tmp_path / "cut").run()
    assert same(final(tmp_path / "whole"), final(tmp_path / "cut"))


def test_a_signal_at_the_end_of_an_epoch_stops_after_its_validation(tmp_path):
    def trouble(epoch, position, batch):
        if (epoch, position) == (0, 5):
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with pytest.raises(Stopped):
        make(tmp_path, Toy(trouble)).run()
    rows = [row for row in RunFolder(tmp_path).rows() if row["kind"] == "epoch"]
    assert [row["epoch"] for row in rows] == [1]
    make(tmp_path).run()
    rows = [row for row in RunFolder(tmp_path).rows() if row["kind"] == "epoch"]
    assert [row["epoch"] for row in rows] == [1, 2, 3]


def test_a_single_bad_loss_is_left_out_and_counted(tmp_path):
    def trouble(epoch, position, batch):
        return (batch[0] * float("nan"), batch[1]) if (epoch, position) == (1, 1) else batch

    task = Toy(trouble)
    task.module.net[1] = nn.Identity()  # batch norm would keep the bad statistics
    summary = make(tmp_path, task).run()
    assert summary["updates left out"] == 1
    bad = json.loads((tmp_path / "bad-updates.jsonl").read_text())
    assert bad["step"] == 7
    assert bad["images"][0] == "image-0"
    assert all(bool(torch.isfinite(p).all()) for p in task.module.parameters())


def test_bad_losses_in_a_row_stop_the_run_with_advice(tmp_path):
    task = Toy(lambda epoch, position, batch: (batch[0] * float("inf"), batch[1]))
    with pytest.raises(BadLossError, match=r"bad-updates\.jsonl.*--lr"):
        make(tmp_path, task, bad_loss_limit=3).run()
    assert len((tmp_path / "bad-updates.jsonl").read_text().splitlines()) == 3


def test_accumulated_updates_equal_large_batches(tmp_path):
    class Plain(Toy):
        batches_per_epoch = 4

        def __init__(self, parts):
            super().__init__()
            self.module.net = nn.Sequential(nn.Linear(6, 1))
            torch.manual_seed(1)
            nn.init.normal_(self.module.net[0].weight)
            nn.init.zeros_(self.module.net[0].bias)
            self.backbone = self.module.net
            self.parts = parts
            self.batches_per_epoch = 4 * parts

        def batches(self, epoch, start):
            for position in range(start, self.batches_per_epoch):
                x = torch.randn(8, 6, generator=torch_generator(1, epoch, position // self.parts))
                part = x.chunk(self.parts)[position % self.parts]
                yield Batch(part, targets=part.sum(1))

    one, two = Plain(1), Plain(2)
    make(tmp_path / "one", one, model_ema=False).run()
    make(tmp_path / "two", two, model_ema=False, grad_accum_steps=2).run()
    for p, q in zip(one.module.parameters(), two.module.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_the_learning_rate_follows_the_real_batch(tmp_path):
    loop = make(tmp_path, lr=0.0, lr_base=1e-3, grad_accum_steps=2)
    assert loop.lr == pytest.approx(1e-3 * 16 / 1024)


def test_weights_of_a_checkpoint_and_the_best_are_plain(tmp_path):
    task = Toy()
    summary = make(tmp_path, task).run()
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1]
    weights = load_file(newest / "model.safetensors")
    assert all(torch.equal(weights[k], v) for k, v in task.module.net.state_dict().items())
    assert (tmp_path / "best.safetensors").is_file()
    assert summary["best"]["score"] == max(r["ema_score"] for r in RunFolder(tmp_path).rows() if r["kind"] == "epoch")
    assert json.loads((tmp_path / "summary.json").read_text())["updates"] == 18
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 4


def test_a_used_folder_is_not_overwritten(tmp_path):
    make(tmp_path).run()
    with pytest.raises(EverytokenError, match="another --output"):
        make(tmp_path, resume="never")


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_results_without_a_checkpoint_are_not_overwritten(tmp_path, resume):
    make(tmp_path).run()
    shutil.rmtree(tmp_path / "checkpoints")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(EverytokenError, match=r"best\.safetensors, summary\.json.*another --output, or delete"):
        make(tmp_path, resume=resume)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_metrics_of_whole_epochs_without_a_checkpoint_are_not_overwritten(tmp_path):
    make(tmp_path).run()
    shutil.rmtree(tmp_path / "checkpoints")
    for name in ("best.safetensors", "summary.json"):
        (tmp_path / name).unlink()
    with pytest.raises(EverytokenError, match="metrics of 3 epochs"):
        make(tmp_path)


@pytest.mark.parametrize("moment", ["save", "_write_best"])
@pytest.mark.parametrize("end", [1, 2])
def test_a_kill_around_the_checkpoint_of_an_epoch_costs_only_time(tmp_path, monkeypatch, moment, end):
    make(tmp_path / "whole", checkpoint_steps=0).run()

    def cut(loop):
        if loop.epoch == end:
            raise CutError
        return real(loop)

    real = getattr(Loop, moment)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, moment, cut)
        with pytest.raises(CutError):
            make(tmp_path / "cut", checkpoint_steps=0).run()
    make(tmp_path / "cut", checkpoint_steps=0).run()
    assert same(final(tmp_path / "whole"), final(tmp_path / "cut"))
    best = [(tmp_path / name / "best.safetensors").read_bytes() for name in ("whole", "cut")]
    assert best[0] == best[1]


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

    def __init__(self, batch):
        super().__init__()
        self.batch, self.batches_per_epoch, self.seen = batch, 48 // batch, []

    def batches(self, epoch, start):
        order = torch.randperm(48, generator=torch_generator(2, epoch))
        for position in range(start, self.batches_per_epoch):
            shown = order[position * self.batch : (position + 1) * self.batch]
            self.seen += [(epoch, int(i)) for i in shown]
            x = torch.randn(len(shown), 6, generator=torch_generator(3, epoch, position))
            yield Batch(x, targets=x.sum(1))


def with_batch(folder, batch, told=None, **changes):
    optim = replace(OPTIONS.optim, **{"grad_accum_steps": 1, **changes})
    options = replace(OPTIONS, dataset=DataOptions(batch_size=batch), optim=optim)
    loop = Loop(Counted(batch), options, RunFolder(folder), WORLD)
    loop.resume([].append if told is None else told.append)
    return loop


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4), (6, 16)])
def test_epochs_are_counted_on_when_the_batch_changes(tmp_path, before, after):
    with_batch(tmp_path, before, epochs=1).run()
    told = []
    loop = with_batch(tmp_path, after, told, epochs=3)
    assert loop.step == 48 // before
    assert loop.place == 48 // after
    summary = loop.run()
    assert f"the global batch is {after} now and was {before}" in told[0]
    assert summary["updates"] == 48 // before + 2 * (48 // after)
    assert sorted(loop.task.seen) == [(epoch, i) for epoch in (1, 2) for i in range(48)]
    rows = [row for row in RunFolder(tmp_path).rows() if row["kind"] == "epoch"]
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert loop.optimizer.param_groups[0]["lr"] == pytest.approx(OPTIONS.optim.min_lr)
    again = []
    with_batch(tmp_path, after, again, epochs=3)
    assert "is finished" in again[-1]


def test_an_epoch_under_way_shows_the_images_that_are_left_when_the_batch_changes(tmp_path):
    loop = with_batch(tmp_path, 4, epochs=2)
    for _ in range(14):  # a whole epoch and two updates
        batches = loop.task.batches(loop.epoch, loop.position)
        loop._update(batches)
        if loop.position == 12:
            loop.epoch, loop.position = loop.epoch + 1, 0
    loop.save()
    seen = loop.task.seen[-8:]
    loop = with_batch(tmp_path, 8, epochs=2)
    assert (loop.epoch, loop.position) == (1, 1)
    loop.run()
    assert sorted(seen + loop.task.seen) == [(1, i) for i in range(48)]


def test_the_same_global_batch_in_other_parts_goes_on_at_the_same_image(tmp_path):
    loop = with_batch(tmp_path, 8, epochs=1)
    for _ in range(2):
        loop._update(loop.task.batches(0, loop.position))
    loop.save()
    told = []
    loop = with_batch(tmp_path, 4, told, epochs=1, grad_accum_steps=2)
    assert (loop.step, loop.epoch, loop.position) == (2, 0, 4)
    assert not any("global batch" in text for text in told)


def test_a_task_that_counts_updates_does_so_with_epochs_of_another_length(tmp_path):
    class Updates(Toy):
        counts_updates = True

    make(tmp_path, Updates(), epochs=2).run()
    shorter = Updates()
    shorter.batches_per_epoch = 3  # twice as many validations
    loop = make(tmp_path, shorter, epochs=6)
    assert (loop.step, loop.epoch, loop.epochs) == (12, 4, 6)


def test_a_checkpoint_that_says_nothing_about_epochs_goes_on(tmp_path):
    make(tmp_path / "whole").run()

    def trouble(epoch, position, batch):
        if (epoch, position) == (1, 3):
            raise CutError
        return batch

    with pytest.raises(CutError):
        make(tmp_path / "cut", Toy(trouble)).run()
    (newest,) = sorted((tmp_path / "cut/checkpoints").iterdir())[-1:]
    state = torch.load(newest / "state.pt", weights_only=True)
    for name in ("epoch", "updates_of_epoch", "updates_per_epoch", "global_batch"):
        del state[name]
    shutil.rmtree(tmp_path / "cut/checkpoints")
    save_checkpoint(tmp_path / "cut/checkpoints", state["step"], {}, {**state, "position": 2}, {})
    make(tmp_path / "cut").run()
    assert same(final(tmp_path / "whole"), final(tmp_path / "cut"))


def test_too_few_batches_are_explained(tmp_path):
    with pytest.raises(EverytokenError, match="--grad-accum-steps 7"):
        make(tmp_path, grad_accum_steps=7)

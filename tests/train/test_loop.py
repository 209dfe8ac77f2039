"""The loop on a toy task: resume, faults, averaging, accumulation."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from everytoken.data.keyed import torch_generator
from everytoken.errors import EverytokenError
from everytoken.train.distributed import World
from everytoken.train.loop import BadLossError, Loop, Stopped
from everytoken.train.options import DataOptions, OptimOptions, RunOptions, TrainOptions
from everytoken.train.runfolder import RunFolder


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def forward(self, batch, moment):
        x, y = batch
        return {"loss": (self.net(x)[:, 0] - y).square().mean()}


class Toy:
    """Regression; batches are a function of (epoch, position)."""

    batches_per_epoch = 6

    def __init__(self, trouble=None):
        self.module = Step()
        self.backbone = self.module.net
        self.trouble = trouble or (lambda epoch, position, batch: batch)

    def batches(self, epoch, start):
        for position in range(start, self.batches_per_epoch):
            x = torch.randn(8, 6, generator=torch_generator(1, epoch, position))
            yield self.trouble(epoch, position, (x, x.sum(1)))

    def size(self, batch):
        return len(batch[0])

    def name(self, batch):
        return [f"image-{i}" for i in range(len(batch[0]))]

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
                yield part, part.sum(1)

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


def test_too_few_batches_are_explained(tmp_path):
    with pytest.raises(EverytokenError, match="--grad-accum-steps 7"):
        make(tmp_path, grad_accum_steps=7)

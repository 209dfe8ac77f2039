"""The loop that trains every task: update, average, log, validate, checkpoint, resume.

    run(lambda world, folder: Detection(..., options, world, folder), options, "runs/first")

It counts epochs (`optim.epochs`, validated every `run.val_interval` epochs) or updates (`optim.iters`, validated every
`run.val_iters` updates). Resuming is exact: batches are functions of (seed, epoch, position) and everything random in
an update is seeded by (seed, update, rank) just before it, so a run that was killed anywhere ends with the weights of
an undisturbed one.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.files import plain_json
from everytoken.keyed import StepKey, generator
from everytoken_lab.engine import checkpoint, distributed, optim
from everytoken_lab.engine.distributed import World, distribute, join_world, kernel_settings, mean_over
from everytoken_lab.engine.options import LoopOptions, flat, how_to_run
from everytoken_lab.engine.run_folder import Run, RunFolder
from everytoken_lab.engine.task import Task
from everytoken_lab.engine.track import build_trackers
from everytoken_lab.models import PUBLISHED
from everytoken_lab.terminal import Progress, clock

_QUICK = 120  # seconds: the report evaluates the best weights once more if a validation takes less
_TALK_EVERY = 8  # updates after which processes agree on stopping and saving
_READ_EVERY = 1000  # updates at most whose flags stay on the device
_SAME_RUN = ("model", "model_kwargs", "img_size", "seed", "data", "maps", "weights")
_PATHS = ("data", "maps", "weights")
_PARTS = {"model": "module", "ema": "ema"}  # files of a checkpoint, and the parts of its state in them


class Stopped(EverytokenError):  # noqa: N818  (not an error)
    """A signal asked the run to stop; the state was saved, and the same call continues."""

    exit_code: int


class OutOfTime(EverytokenError):  # noqa: N818  (not an error)
    """The deadline of a run came before its last update."""


def run(
    build: Callable[[World, RunFolder], Task], options: LoopOptions, output: str | Path, deadline: float = math.inf
) -> Run:
    """Train the task that `build` makes in the folder `output`, from its last good checkpoint if it has one.

    Raises:
        Stopped: after SIGTERM or SIGINT; the same call continues the run.
        OutOfTime: `time.monotonic()` is past the deadline, which runs of one process may have.
    """
    optim.check_loop(options)
    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    with join_world(options.run.device) as world, kernel_settings(world.device):
        torch.manual_seed(options.run.seed)  # of fresh weights
        folder = RunFolder(output, writable=world.is_main)
        with closing(build(world, folder)) as task, ExitStack() as stack:
            loop = Loop(task, options, folder, world)
            loop.deadline = deadline
            with world.agree():  # if another program has the lock, all processes stop alike
                if world.is_main:
                    stack.enter_context(folder.open())
            loop.run()
    return folder.read()


class Loop:
    """One training run: `run()` begins or continues it and trains to the end.

    It counts `step` updates of `total`, and `epoch` passes over the data of `epochs`, with `position` batches of the
    next one.
    """

    def __init__(self, task: Task, options: LoopOptions, folder: RunFolder, world: World) -> None:
        self.task, self.options, self.folder, self.world = task, options, folder, world
        how = options.optim
        self.accumulate = how.grad_accum_steps
        self.updates_per_epoch = task.batches_per_epoch // self.accumulate
        if self.updates_per_epoch == 0 and not how.iters:
            found = f"an epoch has {task.batches_per_epoch} batches"
            raise EverytokenError(f"{found}, fewer than grad_accum_steps {self.accumulate}")
        self.global_batch = options.dataset.batch_size * world.size * self.accumulate
        self.lr = optim.learning_rate(how, self.global_batch)
        self.fsdp = options.run.fsdp and world.size > 1
        if how.model_ema:  # a copy, which a sharded module does not allow
            kind = distributed.ShardedAverage if self.fsdp else ModelEmaV3
            task.trainable_module_ema = kind(task.module, decay=how.model_ema_decay, use_warmup=True)
            if self.fsdp:
                task.trainable_module_ema.shard_twin(task.module, task.backbone, world)
        task.trainable_module = distribute(task.module, task.backbone, world, self.fsdp)
        self.optimizer = optim.build_optimizer(task.module, task.backbone, how, self.lr)
        self.statistics = optim.RunningStatistics(task.module)
        self.schedule, self.total = optim.build_schedule(self.optimizer, how, self.updates_per_epoch)
        # an update may span two passes over the data if updates are counted; an epoch is a whole number of updates
        self.batches_per_epoch = task.batches_per_epoch if how.iters else self.updates_per_epoch * self.accumulate
        self.epochs = round(self.total * self.accumulate / self.batches_per_epoch, 4)
        self.step = self.epoch = self.position = 0
        self.best: dict[str, Any] = {}
        self.bad_in_row = self.bad_total = 0
        self.unread: list[tuple[Tensor, int, Mapping[str, Tensor], list[str]]] = []  # see `read_flags`
        self.seconds = 0.0  # of training, over all starts
        self.saved = time.monotonic()
        self.validating = 0.0  # seconds of the last validation
        self.signal = 0  # that asked to stop
        self.deadline = math.inf

    @property
    def ema(self) -> nn.Module | None:
        """The average of the module's weights, if one is kept."""
        average = self.task.get_trainable_module(ema=True)
        return None if average is None else average.module

    @property
    def place(self) -> int:
        """Updates done of `total`: `step`, unless epochs are counted and the batch was changed on the way."""
        if self.options.optim.iters:
            return self.step
        return self.epoch * self.updates_per_epoch + self.position // self.accumulate

    @property
    def is_done(self) -> bool:
        """Whether the last update is done."""
        return self.place >= self.total

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Begin or continue the run, and train to the end."""
        self.resume()
        if self.is_done and self.folder.read().summary.get("updates") == self.step:
            return  # its record stays as it is
        self.folder.write_config(flat(self.options), self.task.timm_config())
        if self.world.is_main:
            self.folder.trackers = build_trackers(self.options.run, self.folder.path, flat(self.options))
        self.folder.log("; ".join(f"{name}: {value}" for name, value in self.facts().items()))
        try:
            with self._signals():
                while not self.is_done:
                    self._train()
                    self._validate_and_save()
        finally:
            self.folder.close_trackers()
        self._finish()

    def facts(self) -> dict[str, str]:
        """The plan, for the log."""
        how, batch = self.options.optim, self.options.dataset.batch_size
        return {
            **self.task.facts(),
            "batch": f"{batch} x {self.world.size} processes x {self.accumulate} accumulated = {self.global_batch}",
            "updates": f"{self.updates_per_epoch} per epoch, {self.total:,} in all, {self.epochs:g} epochs",
            "learning rate": f"{self.lr:.3g} ({how.sched}, down to {min(how.min_lr, self.lr):.3g})",
            "run folder": str(self.folder.path),
        }

    def _train(self) -> None:
        """Updates until it is time to validate."""
        self.task.trainable_module.train()
        batches = self._batches()
        with TrainingProgress(self) as progress:
            while True:
                started = time.perf_counter()
                terms, images, waited = self._update(batches)
                interval = min(self.options.run.log_interval, _READ_EVERY)
                if self.world.device.type == "cpu" or self.step % interval == 0:
                    self.read_flags()  # where the host waits for the device, the clock must see it
                spent = time.perf_counter() - started
                self.seconds += spent
                progress.update(terms, images, waited, spent)
                if self.validation_is_due():
                    return  # which saves, too
                self._stop_or_save()

    def _batches(self) -> Iterator[Any]:
        """Batches from the current place on, pass after pass over the data."""
        while True:
            for batch in self.task.train_batches(self.epoch, self.position):
                self.position += 1
                if self.position == self.batches_per_epoch:
                    self.epoch, self.position = self.epoch + 1, 0
                yield batch
                if self.position == 0:
                    break

    def validation_is_due(self) -> bool:
        """Whether an epoch, or what lies between two validations, has just ended."""
        if self.options.optim.iters:
            every = self.options.run.val_iters
            return self.step == self.total or (bool(every) and self.step % every == 0)
        return self.position == 0  # after every epoch, though not all of them are validated

    def _update(self, batches: Iterator[Any]) -> tuple[Mapping[str, Tensor], int, float]:
        """One update of the weights; returns the loss terms, the number of images and the seconds spent waiting."""
        run, task = self.options.run, self.task
        torch_seed = int(generator(run.seed, self.step, self.world.rank, "update").integers(2**62))
        torch.manual_seed(torch_seed)  # drop path and dropout draw from torch's generator
        # objectives read the part that is done; where epochs are counted, in epochs
        epochs = 1 if self.options.optim.iters else int(self.epochs)
        epoch = self.place / (self.total if self.options.optim.iters else self.updates_per_epoch)
        terms, keys, waited = dict[str, Tensor](), list[str](), 0.0
        self.statistics.keep()
        for part in range(self.accumulate):
            started = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - started
            batch = replace(batch, key=StepKey(run.seed, self.step, self.world.rank, part, epoch, epochs))
            with nullcontext() if part == self.accumulate - 1 else task.no_sync():
                with task.autocast():
                    answer = task(batch)
                (answer["loss"] / self.accumulate).backward()
            for name, value in answer.items():
                if name != "output":
                    terms[name] = terms.get(name, 0) + value.detach() / self.accumulate
            keys += batch.keys
            if self.step == 0 and part == 0:
                task.show(batch)
        self._apply(terms, keys)
        return terms, len(keys), waited

    def _apply(self, terms: dict[str, Tensor], keys: list[str]) -> None:
        """Clip, step, schedule, average. Nothing here waits for the device: see `read_flags`."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = distributed.whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self.options.optim.clip_grad:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.options.optim.clip_grad, norm)
        # after the all-reduce the gradient is the same on every rank, so all ranks decide alike
        bad = ~torch.isfinite(norm)
        optim.step_unless(self.optimizer, bad)
        self.statistics.restore_if(bad)
        self.optimizer.zero_grad(set_to_none=True)
        terms["grad_norm"] = norm
        self.unread.append((bad, self.step, terms, keys))
        self.step += 1
        self.schedule.step_update(self.place)
        self.task.update_ema(step=self.step)

    def read_flags(self) -> None:
        """Count and report the updates since the last call that were left out because they were not finite.

        Asking waits for the device, so it is done once for all of them: at the log interval and before a checkpoint.

        Raises:
            EverytokenError: too many in a row.
        """
        unread, self.unread = self.unread, []
        flags = torch.stack([bad for bad, *_ in unread]).tolist() if unread else []
        for bad, (_, step, terms, keys) in zip(flags, unread, strict=True):
            self.bad_in_row = self.bad_in_row + 1 if bad else 0
            if not bad:
                continue
            self.bad_total += 1
            values = {name: float(value) for name, value in terms.items()}
            self.folder.log(f"update {step} was left out: the loss or its gradient is not finite ({values})")
            self.folder.append("bad-updates.jsonl", {"step": step, "terms": str(values), "images": keys})
            if self.bad_in_row >= self.options.run.bad_loss_limit:
                what = f"{self.bad_in_row} updates in a row had a loss that is not finite"
                listed = f"their images are listed in {self.folder.path / 'bad-updates.jsonl'}"
                raise EverytokenError(f"{what}; {listed}. Try a lower lr, clip_grad 1 or no amp.")

    def _validate_and_save(self) -> None:
        """Validate, remember the best, checkpoint."""
        self.read_flags()
        run, how = self.options.run, self.options.optim
        epoch = round(self.place / self.total * self.epochs, 4) if how.iters else self.epoch
        row: dict[str, Any] = {"kind": "epoch", "step": self.step, "epoch": epoch, "seconds": round(self.seconds, 2)}
        if how.iters or self.epoch % run.val_interval == 0 or self.place == self.total:
            row.update(self._validate(self.task.module))
            if self.ema is not None:
                row.update({f"ema_{name}": value for name, value in self._validate(self.ema).items()})
            score = row.get("ema_score", row.get("score"))
            if not self.best or score is None or score > self.best["score"]:
                self.best = {"score": score, "epoch": epoch, "step": self.step}
            if score is not None:
                text = f"{self.when()}: validation {self.task.score_name} {score:.2f}"
                self.folder.log(text if self.best["step"] == self.step else f"{text} ({self._best()})")
        # before the checkpoint: a run that is killed between the two drops the row and redoes it
        self.folder.record(row)
        self.save()
        if self.best.get("step") == self.step:  # after it: best weights without a checkpoint are an earlier run's
            self._write_best()
        if not self.is_done and self.world.any(bool(self.signal)):
            self._stop()

    def _validate(self, module: nn.Module) -> dict[str, float]:
        self.world.share_buffers(module)
        was_training, started = module.training, time.monotonic()
        with torch.no_grad():
            numbers = self.task.validate(module.eval())
        self.validating = time.monotonic() - started
        module.train(was_training)
        return numbers

    def _finish(self) -> None:
        """Write the summary, and what the task has to show."""
        if not self.world.is_main:
            return
        run = self.folder.read()
        summary = {
            "best": self.best,
            "last": run.history[-1] if run.history else {},
            "epochs": self.epochs,
            "updates": self.step,
            "seconds": round(self.seconds, 1),
            "updates left out": self.bad_total,
        }
        self.folder.write("summary.json", plain_json(summary))
        with torch.no_grad():
            self.task.finish((self.task.module if self.ema is None else self.ema).eval())
        self.folder.log(f"{self._best()}; weights: {self.folder.path / 'best.safetensors'}")
        if self.task.is_reported:
            path, quick = self.folder.path / "report.html", self.world.size == 1 and self.validating < _QUICK
            with self.folder.surviving("report.html"):
                self.task.report(path, predictions=quick)
                more = "" if quick else "; without predictions, which `everytoken report` adds"
                self.folder.log(f"report: {path}{more}")

    def when(self) -> str:
        """epoch 3/10, or update 8000/160000."""
        if self.options.optim.iters:
            return f"update {self.step}/{self.total}"
        return f"epoch {self.epoch + bool(self.position)}/{self.epochs:g}"

    def _best(self) -> str:
        if self.best["score"] is None:
            return f"last weights, of epoch {self.best['epoch']:g}, without validation images"
        return f"best {self.task.score_name} {self.best['score']:.2f} at epoch {self.best['epoch']:g}"

    # -- signals --------------------------------------------------------------------------------------------------

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask to stop after the current update; only the main thread can be asked."""
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        previous = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.signal:  # a second signal does not wait
            raise KeyboardInterrupt
        self.signal = number

    def _stop_or_save(self) -> None:
        """Between updates: stop if a signal came; write a checkpoint if it is time, by rank 0's clock."""
        run = self.options.run
        due = bool(run.checkpoint_steps) and self.step % run.checkpoint_steps == 0
        if self.world.size == 1 or self.step % _TALK_EVERY == 0:
            if self.world.any(bool(self.signal)):
                self.save()
                self._stop()
            if time.monotonic() > self.deadline:
                raise OutOfTime(f"{self.place:,} of {self.total:,} updates in {self.folder.path.name} were done")
            due |= self.world.any(self.world.is_main and time.monotonic() - self.saved > run.checkpoint_minutes * 60)
        if due:
            self.save()

    def _stop(self) -> None:
        stopped = Stopped(f"stopped by a signal after update {self.step}; the same command continues from here")
        stopped.exit_code = 128 + (self.signal or signal.SIGTERM)
        self.folder.log(str(stopped))
        raise stopped

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint."""
        self.read_flags()  # which updates were left out is part of it
        self.saved = time.monotonic()
        state: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "updates_of_epoch": self.position // self.accumulate,
            "updates_per_epoch": self.updates_per_epoch,
            "global_batch": self.global_batch,
            "best": self.best,
            "bad_total": self.bad_total,
            "seconds": self.seconds,
            "options": plain_json(flat(self.options), None),
        }
        if self.world.is_main or self.fsdp:  # sharded tensors are put together by all processes
            state["module"] = distributed.module_state(self.task.module, self.fsdp)
            state["optimizer"] = distributed.optimizer_state(self.task.module, self.optimizer, self.fsdp)
            if self.ema is not None:
                state["ema"] = distributed.module_state(self.ema, self.fsdp)
        if self.world.is_main:
            parts = {stem: self.task.weights(state[part]) for stem, part in _PARTS.items() if part in state}
            weights = {f"{stem}{suffix}": part[suffix] for stem, part in parts.items() for suffix in part}
            root, keep = self.folder.checkpoints, self.options.run.keep
            checkpoint.save_checkpoint(root, self.step, weights, state, self.task.metadata(), keep)

    def _write_best(self) -> None:
        state = distributed.module_state(self.task.module if self.ema is None else self.ema, self.fsdp)
        if self.world.is_main:
            for suffix, tensors in self.task.weights(state).items():
                path = self.folder.path / f"best{suffix}.safetensors"
                checkpoint.write_weights(path, tensors, self.task.metadata())

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, if there is one.

        Continuing with other settings may be wanted; with another network or other data it is a mistake.
        """
        newest = checkpoint.newest_good(self.folder.checkpoints, self.folder.log) if self.world.is_main else None
        newest = self.world.gather(newest)[0]
        if newest is None:
            self._refuse_to_overwrite()
            self.folder.forget_after(0)  # of a start that was killed before its first checkpoint
            return
        with self.world.agree():
            if not newest.is_dir():
                who = f"rank {self.world.rank} (on {socket.gethostname()})"
                raise EverytokenError(f"{who} does not see {newest}. Give an output on a disk that all machines share.")
        state = checkpoint.load_state(newest)
        before, now = json.loads(state["options"]), flat(self.options)
        names = [name for name in now if name in before and before[name] != now[name] and name not in how_to_run()]
        changes = {name: (before[name], now[name]) for name in names}
        self._refuse({name: values for name, values in changes.items() if _is_another(name, *values)})
        try:
            distributed.load_module_state(self.task.module, state["module"], self.fsdp)
            if self.ema is not None:
                distributed.load_module_state(self.ema, state["ema"], self.fsdp)
            distributed.load_optimizer_state(self.task.module, self.optimizer, state["optimizer"], self.fsdp)
        except (RuntimeError, KeyError) as error:  # a network of another shape
            self._refuse(changes, str(error).strip().splitlines()[0])
        for name, values in changes.items():
            self.folder.log(f"note: continuing with another {name}: {values[0]!r} before, {values[1]!r} now")
        optim.prepare_fused(self.optimizer)
        self.step, self.best = state["step"], state["best"]
        self.bad_total, self.seconds = state["bad_total"], state["seconds"]
        self._restore_place(state)
        self.schedule.step_update(self.place)
        self.folder.forget_after(self.step)
        if self.best.get("step") == self.step and ("ema" in state) == (self.ema is not None):
            self._write_best()  # the run may have been killed between this checkpoint and its best weights
        if self.is_done:
            self.folder.log(f"{self.folder.path} is finished: {self.step:,} updates; there is nothing to do")
        else:
            self.folder.log(f"continuing from {newest.name}: {self.place:,} of {self.total:,} updates done")

    def _restore_place(self, state: Mapping[str, Any]) -> None:
        """Epoch and position of a checkpoint, which may have been written with another batch.

        Epochs that are done stay done, and of the current one the images that were shown count: their order does not
        depend on the batch. Where updates are counted, the number of updates decides.
        """
        before = state["global_batch"]
        if before != self.global_batch:
            self.folder.log(f"note: the global batch is {self.global_batch} now and was {before}")
        if self.options.optim.iters:
            self.epoch, self.position = divmod(self.step * self.accumulate, self.batches_per_epoch)
            return
        done: int = state["updates_of_epoch"]
        if state["updates_per_epoch"] != self.updates_per_epoch:
            done = min(done * before // self.global_batch, self.updates_per_epoch)
        self.epoch, self.position = state["epoch"], done * self.accumulate
        if self.position == self.batches_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0

    def _refuse_to_overwrite(self) -> None:
        """Raise if the folder has results of an earlier run, which a new one would replace.

        A start that was killed before its first checkpoint leaves at most the row of its first epoch.
        """
        run = self.folder.read()
        results = sorted(p.name for pattern in ("best*.safetensors", "summary.json") for p in run.path.glob(pattern))
        results += [f"metrics of {len(run.epochs)} epochs"] if len(run.epochs) > 1 else []
        if results:
            what = f"{run.path} holds results of an earlier run ({', '.join(results)}) and no whole checkpoint"
            raise EverytokenError(f"{what}. Choose another output, or delete the folder.")

    def _refuse(self, changes: Mapping[str, tuple[Any, Any]], why: str = "") -> None:
        if changes or why:
            listed = [f", {name} {before!r} and not {now!r}" for name, (before, now) in changes.items()]
            what = f"{self.folder.path} holds another run{''.join(listed[:3])}{why and f' ({why})'}"
            raise EverytokenError(f"{what}. Choose another output, or repeat its settings to continue it.")


class TrainingProgress(ExitStack):
    """Progress until the next validation; a context manager.

    Loss terms stay on the device until they are recorded: what is shown in between are the terms of the last record (on
    the CPU, of the last update).
    """

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.loop, self.shown = loop, time.monotonic()
        self.images, self.updates, self.waited, self.spent = 0, 0, 0.0, 0.0
        self.values: dict[str, float] = {}  # of the terms, when they were last read
        on_terminal = loop.world.is_main and sys.stderr.isatty()
        self.bar = self.enter_context(Progress("training", "updates", keep=False)) if on_terminal else None

    def update(self, terms: Mapping[str, Tensor], images: int, waited: float, spent: float) -> None:
        """Count one update; show and record it when it is time."""
        loop = self.loop
        self.images, self.updates = self.images + images, self.updates + 1
        self.waited, self.spent = self.waited + waited, self.spent + spent
        last = loop.validation_is_due()
        record = last or loop.step % loop.options.run.log_interval == 0
        pause = 30.0 if self.bar is None else 0.5
        show = loop.world.is_main and (last or time.monotonic() - self.shown > pause)
        if not (record or show):
            return
        if record:  # at the same updates on every process
            terms = mean_over(dict(terms), loop.world)
        if record or loop.world.device.type == "cpu":
            scalars = torch.stack([value.detach().float().reshape(()) for value in terms.values()])
            self.values = dict(zip(terms, scalars.tolist(), strict=True))
        rate, waiting = self.images * loop.world.size / max(self.spent, 1e-9), self.waited / max(self.spent, 1e-9)
        lr = max(group["lr"] for group in loop.optimizer.param_groups)
        if record:
            epoch = round(loop.place / loop.total * loop.epochs, 4)
            row = {"kind": "step", "step": loop.step, "epoch": epoch, "lr": lr, **self.values}
            loop.folder.record({**row, "images_per_second": round(rate, 2), "waiting": round(waiting, 4)})
        if show:
            self.shown = time.monotonic()
            losses = " ".join(f"{key} {value:.3f}" for key, value in self.values.items() if key != "grad_norm")
            if self.bar is not None:
                self.bar(loop.place, loop.total, losses)
            else:
                left = clock((loop.total - loop.place) * self.spent / self.updates)
                facts = f"{rate:.1f} images/s, waiting {waiting:.0%}, lr {lr:.2g}, {left} left"
                loop.folder.log(f"{loop.when()}: {losses} | {facts}")


def _is_another(name: str, before: Any, now: Any) -> bool:
    """Whether a changed option makes it another run; a path may have moved."""
    if name not in _PATHS or not before or not now or str(now).startswith(PUBLISHED):
        return name in _SAME_RUN
    return Path(before).exists() and Path(before).resolve() != Path(now).resolve()

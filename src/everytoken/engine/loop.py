"""The loop that serves every task: update, average, log, validate, checkpoint, resume.

A task brings a module that turns a batch into loss terms, its batches, and a way to be scored; the loop does the rest.
Resuming is exact: batches are functions of (seed, epoch, position) and everything random in an update is seeded by
(seed, update, rank) just before it, so a run that was killed anywhere ends with the weights of an undisturbed one.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everytoken._json import plain_json
from everytoken.engine.checkpoint import load_state, newest_good, save_checkpoint, write_weights
from everytoken.engine.distributed import World
from everytoken.engine.optim import build_optimizer, build_schedule, learning_rate
from everytoken.engine.options import LoopOptions
from everytoken.engine.progress import Progress, tell_score
from everytoken.engine.resume import place_in_epochs, refuse_to_overwrite
from everytoken.engine.runfolder import RunFolder
from everytoken.engine.sharding import (
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
    spread,
    whole,
)
from everytoken.errors import EverytokenError
from everytoken.keyed import StepKey, generator


class Task(Protocol):
    """What the loop needs of a task."""

    module: nn.Module
    """Called as module(batch) in training mode; returns loss terms, of which "loss" is minimised."""
    backbone: nn.Module
    batches_per_epoch: int
    score_name: str
    """How people call the score: top-1, mIoU."""

    def batches(self, epoch: int, start: int) -> Iterator[Any]:
        """Batches of an epoch for this rank, on the device, from position `start`."""
        ...

    def size(self, batch: Any) -> int:
        """Images in a batch."""
        ...

    def name(self, batch: Any) -> list[str]:
        """Keys of a batch's images, for the log of a bad one."""
        ...

    def score(self, module: nn.Module) -> dict[str, float]:
        """Validation of a copy of `module`; "score" is what "best" means."""
        ...

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Of the module's state dict, those to give away, by suffix of their file: "" is the plain timm model's."""
        ...

    def metadata(self) -> dict[str, str]:
        """What somebody needs to know to use the weights."""
        ...


class BadLossError(EverytokenError):
    """The loss was not finite too often."""


class Stopped(Exception):  # noqa: N818  (not an error)
    """A signal asked the run to stop; the state was saved."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Loop:
    """Train a task for the configured number of epochs."""

    def __init__(self, task: Task, options: LoopOptions, folder: RunFolder, world: World) -> None:
        self.task, self.options, self.folder, self.world = task, options, folder, world
        optim = options.optim
        self.accumulate = optim.grad_accum_steps
        self.updates_per_epoch = task.batches_per_epoch // self.accumulate
        if self.updates_per_epoch == 0:
            raise EverytokenError(
                f"an epoch has {task.batches_per_epoch} batches, fewer than --grad-accum-steps {self.accumulate}: "
                "lower --batch-size or --grad-accum-steps"
            )
        self.global_batch = options.dataset.batch_size * world.size * self.accumulate
        self.lr = learning_rate(optim, self.global_batch)
        self.fsdp = options.run.fsdp and world.size > 1
        if self.fsdp and optim.model_ema:
            raise EverytokenError("--fsdp does not keep an average of the weights yet; add --no-model-ema")
        self.trained = spread(task.module, task.backbone, world, self.fsdp)
        self.optimizer = build_optimizer(task.module, task.backbone, optim, self.lr)
        self.schedule, self.epochs = build_schedule(self.optimizer, optim, self.updates_per_epoch)
        self.ema = ModelEmaV3(task.module, decay=optim.model_ema_decay, use_warmup=True) if optim.model_ema else None
        self.dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[optim.amp_dtype]
        scaled = optim.amp and self.dtype is torch.float16
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=scaled)
        self.step = 0  # updates done
        self.epoch = 0  # epochs done
        self.position = 0  # batches of this epoch that are done
        self.best: dict[str, float] = {}
        self.bad_in_row = self.bad_total = 0
        self.seconds = 0.0  # of training, over all starts
        self.stop_code = 0

    # -- resume ---------------------------------------------------------------------------------------------------

    def resume(self, tell: Any) -> bool:
        """Go on from the newest whole checkpoint, if there is one."""
        found = newest_good(self.folder.checkpoints, tell)
        if found is None:
            refuse_to_overwrite(self.folder)
            self.folder.forget_after(0)  # of a start that was killed before its first checkpoint
            return False
        if self.options.run.resume == "never":
            raise EverytokenError(
                f"{self.folder.path} holds a run already (checkpoint {found.name}); choose another --output, or drop "
                "--resume never to go on with it"
            )
        state = load_state(found)
        load_module_state(self.task.module, state["module"], self.fsdp)
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        load_optimizer_state(self.task.module, self.optimizer, state["optimizer"], self.fsdp)
        self.scaler.load_state_dict(state["scaler"])
        self.step, self.best = state["step"], state["best"]
        self.bad_total, self.seconds = state["bad_total"], state["seconds"]
        self._find_place(state, tell)
        self.schedule.step_update(self.place)
        self.folder.forget_after(self.step)
        if self.best.get("step") == self.step and ("ema" in state) == (self.ema is not None):
            self._write_best()  # the run may have been killed between this checkpoint and its best weights
        if self.epoch >= self.epochs:
            tell(f"{self.folder.path} is finished: {self.epochs} epochs, {self.step:,} updates; there is nothing to do")
        else:
            done = f"{self.position // self.accumulate} of its {self.updates_per_epoch} updates done"
            tell(f"going on from {found.name}: epoch {self.epoch + 1}, {done}")
        return True

    def _find_place(self, state: Mapping[str, Any], tell: Any) -> None:
        """Epoch and position of a checkpoint, which may have been written with another batch."""
        counts_updates = getattr(self.task, "counts_updates", False)
        self.epoch, done = place_in_epochs(state, self.updates_per_epoch, self.global_batch, counts_updates)
        self.position = done * self.accumulate
        before = state.get("global_batch", self.global_batch)
        if before != self.global_batch:
            tell(f"note: the global batch is {self.global_batch} now and was {before}")

    def save(self) -> None:
        """Write a checkpoint of this very moment."""
        module = module_state(self.task.module, self.fsdp)  # with FSDP, gathered from all processes
        optimizer = optimizer_state(self.task.module, self.optimizer, self.fsdp)
        if not self.world.is_main:
            return
        weights = {f"model{suffix}": w for suffix, w in self.task.weights(module).items()}
        state: dict[str, Any] = {
            "module": module,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "epoch": self.epoch,
            "updates_of_epoch": self.position // self.accumulate,
            "updates_per_epoch": self.updates_per_epoch,
            "global_batch": self.global_batch,
            "best": self.best,
            "bad_total": self.bad_total,
            "seconds": self.seconds,
        }
        if self.ema is not None:
            state["ema"] = self.ema.module.state_dict()
            weights |= {f"ema{suffix}": w for suffix, w in self.task.weights(state["ema"]).items()}
        save_checkpoint(self.folder.checkpoints, self.step, weights, state, self.task.metadata(), self.options.run.keep)

    @property
    def place(self) -> int:
        """Where the schedule is, in updates of this run's epochs: `step`, unless the batch was changed on the way."""
        return self.epoch * self.updates_per_epoch + self.position // self.accumulate

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the end and return the summary."""
        old = {s: signal.signal(s, self._ask_to_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.epoch < self.epochs:
                self._train_epoch()
                self._end_epoch()
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        return self._summary()

    def _ask_to_stop(self, number: int, frame: Any) -> None:
        if self.stop_code:  # a second signal does not wait
            raise KeyboardInterrupt
        self.stop_code = 128 + number

    def _train_epoch(self) -> None:
        options, epoch = self.options, self.epoch
        self.trained.train()
        progress = Progress(self, epoch)
        saved = time.monotonic()
        batches = self.task.batches(epoch, self.position)
        with progress:
            while self.position < self.updates_per_epoch * self.accumulate:
                started = time.perf_counter()
                terms, images, waited = self._update(batches)
                spent = time.perf_counter() - started
                self.seconds += spent
                progress.update(terms, images, waited, spent)
                if self.place % self.updates_per_epoch == 0:
                    break  # the end of an epoch validates and saves
                # ranks talk every eighth update only, so that all stop at the same one
                if (self.world.size == 1 or self.step % 8 == 0) and self.world.any(bool(self.stop_code)):
                    self.save()
                    raise Stopped(self.stop_code or 143)
                due = time.monotonic() - saved > options.run.checkpoint_minutes * 60
                due |= bool(options.run.checkpoint_steps) and self.step % options.run.checkpoint_steps == 0
                if due:
                    self.save()
                    saved = time.monotonic()
        self.epoch, self.position = epoch + 1, 0

    def _update(self, batches: Iterator[Any]) -> tuple[Mapping[str, Tensor], int, float]:
        """One update of the weights; returns the loss terms, the number of images and the seconds spent waiting."""
        options = self.options.optim
        seed = int(generator(self.options.run.seed, self.step, self.world.rank, "update").integers(2**62))
        torch.manual_seed(seed)  # drop path and dropout draw from torch's generator
        terms: dict[str, Tensor] = {}
        names: list[str] = []
        images, waited = 0, 0.0
        for part in range(self.accumulate):
            started = time.perf_counter()
            batch = next(batches)
            epoch = self.place / self.updates_per_epoch
            key = StepKey(self.options.run.seed, self.step, self.world.rank, part, epoch, self.epochs)
            waited += time.perf_counter() - started
            last = part == self.accumulate - 1
            no_sync = self.trained.no_sync if isinstance(self.trained, DistributedDataParallel) else nullcontext
            with nullcontext() if last else no_sync():
                with torch.autocast(self.world.device.type, self.dtype, enabled=options.amp):
                    out = self.trained(replace(batch, key=key))
                self.scaler.scale(out["loss"] / self.accumulate).backward()
            out.pop("output", None)
            for key, value in out.items():
                terms[key] = terms.get(key, 0) + value.detach() / self.accumulate
            images += self.task.size(batch)
            names += self.task.name(batch)
        self.position += self.accumulate
        self._apply(terms, names)
        return terms, images, waited

    def _apply(self, terms: dict[str, Tensor], names: list[str]) -> None:
        """Clip, check, step, schedule, average."""
        options = self.options.optim
        self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        # after the all-reduce the gradient is the same on every rank, so all ranks decide alike
        if bool(torch.isfinite(norm)):
            if options.clip_grad:
                torch.nn.utils.clip_grads_with_norm_(parameters, options.clip_grad, norm)
            self.scaler.step(self.optimizer)
            self.bad_in_row = 0
        elif not self.scaler.is_enabled() or not bool(torch.isfinite(terms["loss"])):
            self._bad_update(terms, names)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        terms["grad_norm"] = norm
        self.step += 1
        self.schedule.step_update(self.place)
        if self.ema is not None:
            self.ema.update(self.task.module, step=self.step)

    def _bad_update(self, terms: Mapping[str, Tensor], names: list[str]) -> None:
        self.bad_in_row += 1
        self.bad_total += 1
        values = {key: float(value) for key, value in terms.items()}
        text = f"update {self.step}: the loss or its gradient is not finite ({values}); the update was left out"
        self.folder.say(text)
        if self.folder.writable:
            with (self.folder.path / "bad-updates.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, "terms": str(values), "images": names}) + "\n")
        if self.bad_in_row >= self.options.run.bad_loss_limit:
            raise BadLossError(
                f"{self.bad_in_row} updates in a row had a loss that is not finite; the last good weights are in the "
                f"checkpoint. The images are listed in {self.folder.path / 'bad-updates.jsonl'}. Try a lower --lr, "
                "--clip-grad 1, --amp-dtype bfloat16 or no --amp."
            )

    def _score(self, module: nn.Module) -> dict[str, float]:
        self.world.share_buffers(module)
        return self.task.score(module)

    def _end_epoch(self) -> None:
        """Validate, remember the best, checkpoint."""
        run, epoch = self.options.run, self.epoch
        row: dict[str, Any] = {"kind": "epoch", "step": self.step, "epoch": epoch, "seconds": round(self.seconds, 2)}
        if epoch % run.val_interval == 0 or epoch == self.epochs:
            row.update(self._score(self.task.module))
            if self.ema is not None:
                row.update({f"ema_{k}": v for k, v in self._score(self.ema.module).items()})
            score = row.get("ema_score", row["score"])
            if not self.best or score > self.best["score"]:
                self.best = {"score": score, "epoch": epoch, "step": self.step}
            tell_score(self, score)
        # before the checkpoint: a run that is killed between the two drops the row and redoes it
        self.folder.record(row)
        self.save()
        if self.best.get("step") == self.step:  # after it: best weights without a checkpoint are an earlier run's
            self._write_best()
        if self.world.any(bool(self.stop_code)) and epoch < self.epochs:
            raise Stopped(self.stop_code or 143)

    def _write_best(self) -> None:
        state = module_state(self.task.module if self.ema is None else self.ema.module, self.fsdp)
        if not self.world.is_main:
            return
        for suffix, tensors in self.task.weights(state).items():
            write_weights(self.folder.path / f"best{suffix}.safetensors", tensors, self.task.metadata())

    def _summary(self) -> dict[str, Any]:
        last: dict[str, Any] = next((row for row in reversed(self.folder.rows()) if row.get("kind") == "epoch"), {})
        summary = {
            "best": self.best,
            "last": {k: v for k, v in last.items() if k != "kind"},
            "epochs": self.epochs,
            "updates": self.step,
            "seconds": round(self.seconds, 1),
            "updates left out": self.bad_total,
        }
        self.folder.write("summary.json", plain_json(summary))
        return summary

"""The objectives as a timm training task, for timm's own training script or any loop built on `TrainingTask`.

    task = TokenTask(timm.create_model("deit_tiny_patch16_224"), {"drloc": {}}, mixing={"cutmix": {}})
    result = task(images, labels)        # labels: class numbers [B]
    result["loss"].backward()

Score maps come in a `Batch`: `task(batch)`, or, from a loader that yields (batch.images, batch), `task(images, batch)`,
which is what timm's loop calls. Mixing is drawn here, so leave timm's own mixup off. A task does not see the loop
around it: terms that grow or fade with the training (drloc as released) want to know its length, `steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from timm.task import TrainingTask
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.keyed import StepKey
from everytoken.mixing import build_mixer
from everytoken.mixing.mix import Mixer
from everytoken.models import TokenModel
from everytoken.objectives.registry import build_objectives, required_by
from everytoken.objectives.tl_align import TLAlign
from everytoken.step import FrozenTeacher, TokenStep


class TokenTask(TrainingTask):
    """Any everytoken objectives on a plain timm model.

    Args:
        model: a timm model, or a TokenModel (with a token head, if an objective needs one).
        objectives: name -> settings, as in a recipe, or name -> an objective that has been built.
        mixing: name -> settings, as in a recipe, or a mixer.
        teacher: for objectives that need one.
        seed: key of all randomness.
        smoothing: label smoothing of objectives that do not say their own: timm's `args.smoothing`.
        steps: batches in the whole training, epochs · len(loader); only objectives that follow the progress of the
            training ask for it. It may be set later: `task.steps = ...`.

    Example:
        task = TokenTask(TokenModel(model, token_classes=maps.num_classes), {"token_labeling": {"beta": 0.5}})
        optimizer = create_optimizer_v2(task.get_trainable_module(), "adamw", weight_decay=0.05, layer_decay=0.75)
        for batch in loader:
            task(batch)["loss"].backward()
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Mapping[str, Mapping[str, Any] | nn.Module | None],
        mixing: Mapping[str, Mapping[str, Any]] | Mixer | None = None,
        teacher: FrozenTeacher | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
        steps: int | None = None,
        smoothing: float = 0.1,
    ) -> None:
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        view = model if isinstance(model, TokenModel) else TokenModel(model)
        built = {name: given for name, given in objectives.items() if isinstance(given, nn.Module)}
        settings = {name: given for name, given in objectives.items() if not isinstance(given, nn.Module)}
        if settings or not built:
            built |= build_objectives(settings, view, smoothing, teacher)
        mixer = build_mixer(mixing or {}) if mixing is None or isinstance(mixing, Mapping) else mixing
        if mixer is None and any(isinstance(objective, TLAlign) for objective in built.values()):
            raise EverytokenError("tl_align follows mixed images: TokenTask(..., mixing={'cutmix': {}}).")
        self.trainable_module: nn.Module = TokenStep(view, built, mixer, teacher).to(self.device)
        self.seed, self.step, self.steps = seed, 0, steps

    def prepare_distributed(self, device_ids: list[int] | None = None, **ddp_kwargs: Any) -> TokenTask:
        """Wrap what is trained in DistributedDataParallel."""
        from torch.nn.parallel import DistributedDataParallel

        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **kwargs: Any) -> nn.Module:
        """Compile the token model in place."""
        view = self._step().model
        view.compile(backend=backend, mode=mode, **kwargs)
        return view.backbone

    def get_clip_parameters(self, exclude_head: bool = False) -> Iterator[nn.Parameter]:
        """Parameters whose gradients are clipped; `exclude_head` leaves out the classifiers of image and tokens."""
        step = self._step()
        heads: Any = step.model.backbone.get_classifier() if exclude_head else ()  # type: ignore[operator]
        heads = [*(heads if isinstance(heads, tuple) else (heads,)), *([step.model.token_head] if exclude_head else [])]
        left_out = {id(p) for head in heads if isinstance(head, nn.Module) for p in head.parameters()}
        return (p for p in step.parameters() if id(p) not in left_out)

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        """The plain timm model, whose state dict checkpoints hold."""
        module = module or self.get_trainable_module(ema=ema)
        return None if module is None else self._step(module).model.backbone

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """What is trained besides the timm model: token head, objectives."""
        state = self._step(module or self.get_trainable_module(ema=ema)).state_dict()
        return {k: v for k, v in state.items() if not k.startswith("model.backbone.")} | {"step": self.step}

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        """The reverse of `get_task_state`; with `strict`, an error unless the state has exactly this task's names."""
        if not state:
            return
        differing = (state.keys() ^ self.get_task_state(module, ema).keys()) - {"step"}
        if strict and differing:
            more = f"{min(differing)!r} and {len(differing) - 1} other names are on one side only"
            raise EverytokenError(f"the checkpoint is of other objectives or another token head: {more}.")
        self.step = int(state.pop("step", 0))
        self._step(module or self.get_trainable_module(ema=ema)).load_state_dict(state, strict=False)

    def forward(self, input: Tensor | Batch, target: Tensor | Batch | None = None) -> dict[str, Tensor]:
        """{"loss", "output" (class logits [B, K]), terms}.

        Args:
            input: images [B, 3, H, W], or a Batch.
            target: labels [B]; or, from a loader that yields (images, batch), the Batch of these images.
        """
        if isinstance(input, Batch):
            batch = input
        elif isinstance(target, Batch):
            batch = replace(target, images=input)
        elif target is not None and target.ndim != 1:
            wrong = f"TokenTask takes class numbers [B], got {list(target.shape)}; switch timm's mixup off"
            raise EverytokenError(f"{wrong} and let the task mix: TokenTask(..., mixing={{'cutmix': {{}}}}).")
        else:
            batch = Batch(images=input, labels=target)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        training = self.trainable_module.training
        key = StepKey(self.seed, self.step, rank, epoch=self.progress if training else 0.0, epochs=1)
        result: dict[str, Tensor] = self.trainable_module(replace(batch, key=key))
        self.step += int(training)
        return result

    @property
    def progress(self) -> float:
        """Fraction of the training that is done; 0 where nobody asks and `steps` is not known."""
        if self.steps is not None:
            return min(1.0, self.step / max(1, self.steps))
        for name, objective in self._step().objectives.items():
            if "progress" in required_by(objective):
                raise EverytokenError(f"objective {name!r}: give TokenTask steps=epochs * len(loader).")
        return 0.0

    def _step(self, module: nn.Module | None = None) -> TokenStep:
        module = self.trainable_module if module is None else module
        while not isinstance(module, TokenStep):
            module = module.module  # type: ignore[assignment]
        return module

"""The objectives as a timm training task, for timm's own training script or any loop built on `TrainingTask`.

    task = TokenTask(timm.create_model("deit_tiny_patch16_224"), {"drloc": {}}, mixing={"cutmix": {}})
    result = task(images, labels)        # labels: class numbers [B]
    result["loss"].backward()

timm's batches have images and labels and no score maps; so objectives that need maps want the `Batch` form:
`task(batch)`. Mixing is drawn here, so leave timm's own mixup off. A task does not see the loop around it: terms that
grow or fade with the training (drloc with the released schedule) want to know its length, `steps`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from timm.task import TrainingTask
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.keyed import StepKey
from everytoken.models import TokenModel
from everytoken.tasks.step import TokenStep, build_mixer, build_objectives


class TokenTask(TrainingTask):
    """Any everytoken objectives on a plain timm model.

    Args:
        model: a timm model, or a TokenModel (with a token head, if an objective needs one).
        objectives: name -> settings, as in a recipe.
        mixing: name -> settings, as in a recipe.
        seed: key of all randomness.
        steps: batches in the whole training, epochs · len(loader); only objectives that follow the progress of the
            training ask for it. It may be set later: `task.steps = ...`.
    """

    def __init__(
        self,
        model: nn.Module,
        objectives: Mapping[str, Mapping[str, Any]],
        mixing: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        verbose: bool = True,
        steps: int | None = None,
    ) -> None:
        super().__init__(device=device, dtype=dtype, verbose=verbose)
        view = model if isinstance(model, TokenModel) else TokenModel(model)
        built = build_objectives(objectives, view)
        self.trainable_module: nn.Module = TokenStep(view, built, build_mixer(mixing or {})).to(self.device)
        self.seed, self.step, self.steps = seed, 0, steps

    def prepare_distributed(self, device_ids: list[int] | None = None, **ddp_kwargs: Any) -> TokenTask:
        """Wrap what is trained in DistributedDataParallel."""
        from torch.nn.parallel import DistributedDataParallel

        self.trainable_module = DistributedDataParallel(self.trainable_module, device_ids=device_ids, **ddp_kwargs)
        return self

    def compile(self, backend: str = "inductor", mode: str | None = None, **kwargs: Any) -> nn.Module:
        """Compile the token view in place."""
        view = self._step().model
        view.compile(backend=backend, mode=mode, **kwargs)
        return view.backbone

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module | None:
        """The plain timm model, whose state dict checkpoints hold."""
        module = module or self.get_trainable_module(ema=ema)
        return None if module is None else self._step(module).model.backbone

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """What is trained besides the timm model: token head, objectives' modules."""
        state = self._step(module or self.get_trainable_module(ema=ema)).state_dict()
        return {k: v for k, v in state.items() if not k.startswith("model.backbone.")} | {"step": self.step}

    def load_task_state(
        self, state: dict[str, Any] | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        """The reverse of `get_task_state`."""
        if state:
            state = dict(state)
            self.step = int(state.pop("step", 0))
            self._step(module or self.get_trainable_module(ema=ema)).load_state_dict(state, strict=False)

    def forward(self, input: Tensor | Batch, target: Tensor | None = None) -> dict[str, Tensor]:
        """Images [B, 3, H, W] and labels [B], or a Batch -> {"loss", "output" (class logits), terms}."""
        batch = input if isinstance(input, Batch) else Batch(images=input, labels=target)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        training = self.trainable_module.training
        key = StepKey(self.seed, self.step, rank, epoch=self.progress if training else 0.0, epochs=1)
        result: dict[str, Tensor] = self.trainable_module(replace(batch, key=key))
        self.step += int(training)
        return result

    @property
    def progress(self) -> float:
        """Part of the training that is done, 0..1; 0 where nobody asks and `steps` is not known."""
        if self.steps is not None:
            return min(1.0, self.step / max(1, self.steps))
        asking = [o.name for o in self._step().objectives if "progress" in o.needs]
        if asking:
            raise EverytokenError(
                f"objective {asking[0]!r} follows the progress of the training (its released schedule), which a task "
                "cannot see: give TokenTask steps=epochs * len(loader), or leave 'schedule' out of `released`."
            )
        return 0.0

    def _step(self, module: nn.Module | None = None) -> TokenStep:
        module = self.trainable_module if module is None else module
        while not isinstance(module, TokenStep):
            module = module.module  # type: ignore[assignment]
        return module

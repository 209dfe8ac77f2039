"""`train`: the classification task, the functions that train it, and the picture of its first batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from everytoken.data.batch import Batch, Prefetcher
from everytoken.errors import EverytokenError
from everytoken.files import plain_json
from everytoken.functional import CompactTarget, from_labels
from everytoken.maps import Maps
from everytoken.mixing import MIXERS
from everytoken.mixing.guided import GuidedMixer
from everytoken.mixing.mix import Mix, apply_to_pixels, mix_token_target
from everytoken.models.common import make_attention_explicit
from everytoken.objectives.token_labeling import FromMaps, TokenLabeling
from everytoken_lab import draw
from everytoken_lab.classes import shown_name
from everytoken_lab.engine.accuracy import AnyPredictions, join_predictions, predictions_of
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.loop import run
from everytoken_lab.engine.options import AutoOptions, TrainOptions, apply, read_recipe
from everytoken_lab.engine.run_folder import Run, RunFolder
from everytoken_lab.engine.task import IMAGES, Task, pixels_of, watched
from everytoken_lab.models.description import timm_config
from everytoken_lab.models.open import below
from everytoken_lab.training.build import ClassifierSetup, Inputs, build, complete, default_output


class Classification(Task):
    """Train a classifier with any objectives."""

    options: TrainOptions

    def __init__(self, setup: ClassifierSetup, options: TrainOptions, world: World, folder: RunFolder) -> None:
        super().__init__(setup.step, options, world, folder)
        self.setup = setup
        amp = options.optim.amp and world.device.type == "cpu"
        self.explicit_attention = amp and make_attention_explicit(setup.step, setup.grid)
        data, maps = options.dataset, {"maps": setup.store, "repeats": options.dataset.repeat_augment}
        self.train_loader = self.loader(setup.train_set, setup.train_view, data.batch_size, train=True, **maps)
        size = data.val_batch_size or data.batch_size
        self.val_loader = self.loader(setup.val_set, setup.eval_view, size, train=False)
        self.batches_per_epoch = len(self.train_loader)
        self.latest: AnyPredictions | None = None  # of the last validation
        self.score_name = "mAP" if setup.train_set.multi_label else "top-1"
        self.is_reported = self.is_reported and len(setup.val_set) > 0

    @property
    def backbone(self) -> nn.Module:
        """The timm model."""
        return self.setup.step.model.backbone

    def train_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Batches on the device. Where maps are sampled is planned while placements are still on the host."""
        yield from self._on_device(batch.plan(self.setup.grid) for batch in self.train_loader.epoch(epoch, start))

    def _on_device(self, batches: Iterator[Batch]) -> Prefetcher:
        view, last = self.setup.eval_view, self.options.model.channels_last
        return Prefetcher(batches, self.world.device, view.mean, view.std, channels_last=last)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Mixed precision; layers that can only call torch's attention are kept from its fused kernel on the CPU."""
        # blocks that run again in the backward pass do so outside of this context
        slow = self.explicit_attention and torch.is_grad_enabled() and not self.options.model.grad_checkpointing
        with super().autocast(), sdpa_kernel(SDPBackend.MATH) if slow else nullcontext():
            yield

    def picture(self, batch: Batch) -> Image.Image | None:
        """The batch as it is mixed, with what its tokens are to learn."""
        setup, view = self.setup, self.setup.eval_view
        guided = any(issubclass(MIXERS[name], GuidedMixer) for name in self.options.mixing if name in MIXERS)
        if not guided or not self.options.run.fsdp:  # a network that is sharded answers to all processes at once only
            batch = setup.step.mixed(batch)
        token_names = setup.store.class_names if setup.store is not None else ()
        objectives, names = setup.step.objectives.values(), setup.train_set.class_names
        return batch_picture(batch, objectives, setup.grid, names, token_names, view.mean, view.std)

    def validate(self, module: nn.Module) -> dict[str, float]:
        """Every validation image exactly once, over all processes; "score" is top-1, or mAP if multi-label."""
        if not len(self.setup.val_set):
            return {}
        self.latest = self._predictions(module)
        summary = self.latest.summary()
        return {"score": next(iter(summary.values())), **{f"val_{k}": round(v, 4) for k, v in summary.items()}}

    def _predictions(self, module: nn.Module) -> AnyPredictions:
        predictions = []
        for batch in watched(self._on_device(self.val_loader.epoch(0)), len(self.setup.val_set), self.world):
            with self.autocast():
                logits = module(Batch(batch.images))["output"].float()
            assert batch.indices is not None
            assert batch.labels is not None
            predictions.append(predictions_of(batch.indices, batch.labels, logits))
        if self.options.run.fsdp and self.world.size > 1:
            # sharded weights are gathered in every pass, so a process with fewer batches runs empty ones
            empty = Batch(torch.zeros(1, 3, *self.setup.description.img_size, device=self.world.device))
            for _ in range(len(predictions), max(self.world.gather(len(predictions)))):
                with self.autocast():
                    module(empty)
        return join_predictions([p for of_rank in self.world.gather(predictions) for p in of_rank])

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The plain timm model and, if it is separate, the token head."""
        prefixes = {"": "model.backbone.", ".token_head": "model.token_head."}
        files = {suffix: below(prefix, state) for suffix, prefix in prefixes.items()}
        return {suffix: tensors for suffix, tensors in files.items() if tensors}

    def metadata(self) -> dict[str, str]:
        """The description that `open_model` reads."""
        return self.setup.description.to_metadata()

    def timm_config(self) -> dict[str, Any]:
        """config.json, with which timm opens the run folder: `timm.create_model("local-dir:RUN", pretrained=True)`."""
        return timm_config(self.backbone, self.setup.description)

    def report(self, path: Path, **options: Any) -> None:
        """As any task, with the images that are open already."""
        super().report(path, images=self.setup.val_set, **options)

    def facts(self) -> dict[str, str]:
        """Data, model, objectives."""
        options, setup = self.options, self.setup
        objectives = setup.step.objectives.items()
        return {
            "data": f"{len(setup.train_set):,} training and {len(setup.val_set):,} validation images",
            "classes": f"{setup.train_set.num_classes:,}",
            "model": options.model.model,
            "weights": options.model.weights or "none, from scratch",
            "token grid": f"{setup.grid[0]} x {setup.grid[1]} at {options.model.img_size} px",
            "score maps": f"{options.maps} ({setup.store.meta.num_classes} classes)" if setup.store else "none",
            "objectives": ", ".join(f"{name} (weight {getattr(o, 'weight', 1):g})" for name, o in objectives),
            "mixing": ", ".join(options.mixing) or "none",
        }

    def finish(self, module: nn.Module) -> None:
        """Accuracy of each class, of the last epoch, with averaged weights if there are any."""
        if self.latest is None and self.world.size == 1 and self.is_reported:  # killed after its last checkpoint
            self.latest = self._predictions(module)
        if self.latest is not None:
            self.folder.write("classes.json", plain_json(self.latest.per_class(self.setup.train_set.class_names)))
            score = self.latest.accuracy
            interval = f"95 % interval {score.low:.2f} to {score.high:.2f}"
            self.folder.log(f"{self.score_name} {score.value:.2f} % ({interval})")


def train_with(
    options: TrainOptions, inputs: Inputs | None = None, reported: bool = True, deadline: float = math.inf
) -> Run:
    """Train a classifier as complete options say, or continue the run that their output folder holds.

    Args:
        reported: whether it ends with a page for people.
        deadline: of `time.monotonic()`, at which it gives up.
    """

    def task(world: World, folder: RunFolder) -> Task:
        setup = build(options, world, inputs)
        for note in setup.notes:
            folder.log(f"note: {note}")
        built = Classification(setup, options, world, folder)
        built.is_reported = built.is_reported and reported
        return built

    return run(task, options, options.run.out or default_output(options), deadline)


def train(
    data: str | Path,
    *,
    maps: str | Path | Maps = "",
    recipe: str = "",
    objectives: Mapping[str, Mapping[str, Any]] | None = None,
    mixing: Mapping[str, Mapping[str, Any]] | None = None,
    trust_code: bool = False,
    **options: Any,
) -> Run:
    """Train a classifier on every token, as `everytoken train` does; the same call again continues an interrupted run.

        run = lab.train("photos", minutes=10)      # decides everything itself, see `everytoken_lab.training.auto`
        run = lab.train("photos", maps="maps", recipe="small_96_token", epochs=30)
        run.summary["best"], run.history
        run.report("report.html")

    Args:
        data: folder of class folders (with or without train/ and val/), archive, torchvision:NAME.
        maps: store of score maps (its folder, or what `lab.annotate` returned), for objectives that need them.
        recipe: name of a shipped recipe, or a YAML file.
        objectives: name -> settings; what is given is merged into the recipe's, and None removes an entry.
        mixing: likewise.
        trust_code: import objectives that a recipe file or the run of `weights` names by import paths.
        options: any option of `everytoken train` by its name, such as model, epochs, batch_size, lr, out, device;
            without recipe and model also minutes (a budget) and linear (only fit a linear head on frozen features).
    """
    settings = TrainOptions()
    if recipe:
        settings = replace(apply(settings, read_recipe(recipe, trust_code), recipe), recipe=recipe)
    store = maps.path if isinstance(maps, Maps) else maps
    given = {"data": str(data), **({"maps": str(store)} if store else {}), **options}
    for name, changes in (("objectives", objectives), ("mixing", mixing)):
        if changes is not None:
            merged = {**getattr(settings, name), **changes}
            given[name] = {key: dict(value) for key, value in merged.items() if value is not None}
    auto = apply(AutoOptions(), {name: given.pop(name) for name in vars(AutoOptions()) if name in given}, "train()")
    return start(apply(settings, given, "train()"), set(given), auto, trust_code=trust_code)


def decides_itself(options: TrainOptions, auto: AutoOptions) -> bool:
    """Whether it is left open what to train: no recipe, no model, no objectives, no mixing, and no weights.

    With weights, they are the backbone if a budget, `linear` or `maps="auto"` says that the rest is open.
    """
    open_choice = not (options.recipe or options.model.model or options.objectives or options.mixing)
    wanted = bool(auto.minutes) or auto.linear or options.maps == "auto"
    if wanted and not open_choice:
        what = "minutes, linear and maps='auto'"
        raise EverytokenError(f"{what} are for training without a recipe, model, objectives and mixing")
    return open_choice and (wanted or not (options.model.weights or options.maps))


def start(
    options: TrainOptions,
    asked: Set[str],
    auto: AutoOptions,
    assignments: Sequence[str] = (),
    trust_code: bool = False,
) -> Run:
    """Train what was asked for; if that is left open, decide it first. Arguments as for `complete`."""
    inputs = Inputs()
    if not assignments and decides_itself(options, auto):
        from everytoken_lab.training.auto import train_photos  # which trains by this module

        return train_photos(options, asked, auto, trust_code, inputs)
    return train_with(complete(options, asked, assignments, trust_code, inputs), inputs)


# -- batch.jpg ---------------------------------------------------------------------------------------------------------


def batch_picture(
    batch: Batch,
    objectives: Iterable[Any],
    grid: tuple[int, int],
    class_names: Sequence[str],
    token_names: Sequence[str] = (),
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
) -> Image.Image:
    """The first images of a batch as the network gets them, with the labels of their tokens drawn on them.

    Crops, flips, colours and mixing are those of the batch, so a look at it tells whether labels are where things are.
    The labels come from score maps; without maps, if images are mixed, from the images' own labels. Tokens that are
    mixed after the patch embedding (MixToken) are shown as if their pixels had been mixed.

    Args:
        grid: (h, w) of the tokens.
        class_names, token_names: of the class head, and of the maps.
        mean, std: that the images are normalised with.
    """
    images, mix, count = batch.images, batch.mix, min(IMAGES, len(batch))
    if mix is not None and mix.of_tokens is not None:
        images = apply_to_pixels(images, _as_pixels(mix.of_tokens, (images.shape[-2], images.shape[-1])))
    target, from_maps = _token_target(batch, objectives, grid, len(class_names))
    names = [shown_name(name) for name in (token_names if from_maps and token_names else class_names)]
    colours, cards = draw.ClassColours(names), []
    for i, pixels in enumerate(pixels_of(images[:count], mean, std)):
        photo, legend = draw.fit_photo(Image.fromarray(pixels)), list[draw.Entry]()
        panels = [draw.Panel("what the network gets", photo)]
        if target is not None:
            own = target[slice(i, i + 1)]
            classes = torch.where(own.weight > 0.5, own.top_class(), -1)[0].cpu().numpy()
            confidence = own.dense().amax(-1).clamp(0, 1)[0].cpu().numpy()
            source = "from its score map" if from_maps else "by what is shown there"
            overlay, legend = draw.class_picture(photo, classes, confidence, names.__getitem__, colours)
            legend += [draw.Entry(draw.OTHER, "no label")] if (classes < 0).any() else []
            panels.append(draw.Panel("labels of its tokens", overlay, source))
        key = batch.keys[i] if i < len(batch.keys) else f"image {i}"
        cards.append(draw.Card(key, [draw.Row(_label(batch, i, class_names), panels, legend)]))
    how = "not mixed" if mix is None else f"{mix.level} mixed"
    meaning = "" if target is None else "colours: classes, stronger where the label is surer"
    return draw.draw_sheet(f"The first batch: {count} of {len(batch)} images, {how}", meaning, cards, 2)


def _as_pixels(mix: Mix, size: tuple[int, int]) -> Mix:
    """A mix of tokens as if it were one of the pixels below them."""
    return replace(mix, mask=mix.at(size), level="pixels", tokens=None)


def _token_target(
    batch: Batch, objectives: Iterable[Any], grid: tuple[int, int], num_classes: int
) -> tuple[CompactTarget | None, bool]:
    """Labels of the tokens of the mixed images (None: nothing to show), and whether they come from maps."""
    for objective in objectives:
        if isinstance(objective, TokenLabeling):
            target, _ = objective.token_target(batch, grid)
            tokens = None if batch.mix is None else batch.mix.of_tokens
            # the loss puts such tokens back to their own images; here they stay where they are
            return (target if tokens is None or not tokens.unmixes else mix_token_target(target, tokens)), True
        if isinstance(objective, FromMaps) and "token_logits" in objective.requires:
            target = batch.token_target or objective.map_targets(batch, grid).tokens
            return (target if batch.mix is None else mix_token_target(target, batch.mix)), True
    if batch.mix is None or batch.labels is None or batch.labels.dim() > 1:  # multi-label: the place is not known
        return None, False
    image, shape = from_labels(batch.labels, num_classes), (len(batch), *grid)
    mass, background, weight = (x[:, None, None] for x in (image.mass, image.background, image.weight))
    everywhere = mass.expand(*shape, -1), background.expand(shape), weight.expand(shape)
    return mix_token_target(CompactTarget(image.classes, *everywhere, num_classes), batch.mix), False


def _label(batch: Batch, i: int, class_names: Sequence[str]) -> str:
    """The label of the image and of its partner, with their fractions of the area."""

    def words(label: Tensor) -> str:
        classes = label.nonzero().flatten().tolist() if label.dim() else [int(label)]
        return ", ".join(shown_name(class_names[c]) for c in classes if 0 <= c < len(class_names)) or "no label"

    if batch.labels is None:
        return ""
    own, mix = words(batch.labels[i]), batch.mix
    if mix is None or (ratio := float(mix.ratio[i])) == 1:
        return f"label: {own}"
    return f"label: {own} {ratio:.0%} + {words(batch.labels[mix.partner[i]])} {1 - ratio:.0%}"

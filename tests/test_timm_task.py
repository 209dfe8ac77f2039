"""What a timm task knows of the training around it."""

import copy

import pytest
import timm
import torch
from timm.data import create_dataset
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, dispatch_clip_grad
from torch.utils.data import DataLoader
from torchvision.transforms import v2

import everytoken as et
from everytoken.errors import EverytokenError
from everytoken.mixing.methods import CutMix
from everytoken.models import TokenModel
from everytoken.objectives.drloc import Drloc
from everytoken.objectives.hard import HardLabels
from everytoken.timm_task import TokenTask

SCHEDULE = {"drloc": {"released": True, "warmup": 0.5}}


def task(objectives, name="swin_nano_patch2_window4_32", token_classes=None, **more):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, drop_path_rate=0.0)
    model = TokenModel(model, token_classes) if token_classes else model
    return TokenTask(model, objectives, verbose=False, **more).train()


def data():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 3])


def test_the_released_schedule_follows_the_steps_of_the_task():
    scheduled = task(SCHEDULE, steps=4)
    for progress in (0.0, 0.25, 0.5, 0.75, 1.0, 1.0):  # λ grows over half of the steps, then falls
        assert scheduled.progress == progress
        loss = float(scheduled(*data())["drloc/l1"].detach())
        assert (loss > 0) == (0 < progress < 1)


def test_a_schedule_without_the_number_of_steps_is_refused_and_the_number_may_come_later():
    one = task({"drloc": {"released": True}})
    with pytest.raises(EverytokenError, match=r"'drloc'.*steps=epochs \* len\(loader\)"):
        one(*data())
    one.steps = 10
    one(*data())
    assert one.progress == 0.1
    one.eval()
    one(*data())
    assert one.progress == 0.1, "evaluation is no training"


def test_a_resumed_task_goes_on_with_its_step_and_heads():
    first, second = task(SCHEDULE, steps=4), task(SCHEDULE, steps=4)
    first(*data())
    second.load_task_state(first.get_task_state())
    assert second.progress == 0.25
    mine, theirs = first.get_task_state(), second.get_task_state()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine if name != "step")


def test_it_answers_what_timms_optimizer_factory_asks():
    step = task({"drloc": {}}, name="vit_nano_patch4_32").get_trainable_module()
    optimizer = create_optimizer_v2(step, "adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    by_name = {id(p): n for n, p in step.named_parameters()}
    found = {by_name[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    plain = step.model.backbone
    alone = create_optimizer_v2(plain, "adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    for group in alone.param_groups:
        for parameter in group["params"]:
            name = by_name[id(parameter)]
            assert (found[name]["lr_scale"], found[name]["weight_decay"]) == (group["lr_scale"], group["weight_decay"])
    assert found["model.backbone.cls_token"]["weight_decay"] == found["model.backbone.pos_embed"]["weight_decay"] == 0
    assert found["model.backbone.patch_embed.proj.weight"]["lr_scale"] < found["model.backbone.head.weight"]["lr_scale"]
    assert found["objectives.drloc.heads.0.layers.0.weight"]["lr_scale"] == 1
    exempt = create_optimizer_v2(step, "adamw", lr=1.0, weight_decay=0.1)
    decays = {by_name[id(p)]: group["weight_decay"] for group in exempt.param_groups for p in group["params"]}
    assert decays["model.backbone.cls_token"] == decays["model.backbone.pos_embed"] == 0
    assert decays["objectives.drloc.heads.0.layers.0.weight"] == 0.1


def test_clipping_can_leave_out_the_classifiers():
    view = TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=4), token_classes=6)
    one = TokenTask(view, {"hard": {}, "drloc": {}}, verbose=False)
    left_out = {id(p) for p in one.get_clip_parameters()} - {id(p) for p in one.get_clip_parameters(exclude_head=True)}
    heads = [*view.backbone.head.parameters(), *view.token_head.parameters()]
    assert left_out == {id(p) for p in heads}


def pair(samples):
    batch = et.collate(samples)
    return batch.images, batch


def test_timms_script_trains_with_score_maps_as_the_documentation_shows(photos, photo_maps, tmp_path):
    """Loader and task of the diff in docs/train.md, in the calls that timm's train.py makes."""
    maps = et.Maps(photo_maps)
    dataset = create_dataset("", root=str(photos), split="train", is_training=True)
    steps = [v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    tokens = et.with_maps(dataset, maps, v2.Compose(steps), keys=dataset.filenames())
    loader = DataLoader(tokens, 12, shuffle=True, drop_last=True, collate_fn=pair)

    def new_task():
        model = timm.create_model("lvvit_micro_patch4_32", num_classes=3)
        objectives = {"token_labeling": {"class_target": "truth"}, "drloc": {}}
        return et.TokenTask(et.TokenModel(model, maps.num_classes), objectives, {"mixtoken": {}}, verbose=False)

    torch.manual_seed(0)
    task = new_task()
    optimizer = create_optimizer_v2(task.get_trainable_module(), "adamw", lr=1e-3, weight_decay=0.05)
    task.setup_ema(decay=0.5, use_warmup=False)
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert optimized >= {id(p) for p in task.get_trainable_module().parameters() if p.requires_grad}
    before = copy.deepcopy(task.get_trainable_module().state_dict())

    task.train()
    for number, (images, target) in enumerate(loader):  # accumulates gradients over two batches
        images, target = images.to(device="cpu", dtype=torch.float32), target.to(device="cpu")
        if number % 2 == 0:
            with task.no_sync():
                (task(images, target)["loss"] / 2).backward()
            continue
        result = task(images, target)
        (result["loss"] / 2).backward()
        dispatch_clip_grad(task.get_clip_parameters(exclude_head=True), value=1.0, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        task.update_ema(step=number)
    assert set(result) >= {"loss", "output", "token_labeling/class", "token_labeling/token", "drloc/l1"}
    assert result["output"].shape == (12, 3)
    assert task.get_eval_model() is task.get_trainable_module().model.backbone
    after = task.get_trainable_module().state_dict()
    for part in ("model.backbone.patch_embed.", "model.token_head.", "objectives.drloc."):
        names = [name for name in after if name.startswith(part)]
        assert any(not torch.equal(before[name], after[name]) for name in names), part

    saver = CheckpointSaver(task.get_trainable_module(), optimizer, checkpoint_dir=str(tmp_path), task=task)
    saver.save_checkpoint(0, metric=1.0)
    state = torch.load(tmp_path / "last.pth.tar", weights_only=False)
    resumed = new_task()
    resumed.setup_ema(decay=0.5)
    for suffix in ("", "_ema"):
        resumed.load_checkpoint_state(state["state_dict" + suffix], state["task_state" + suffix], ema=bool(suffix))
    assert resumed.step == task.step == 3
    for ema in (False, True):
        models = [each.get_eval_model(ema=ema).eval() for each in (task, resumed)]
        assert torch.equal(models[0](images), models[1](images))
    timm.create_model("lvvit_micro_patch4_32", num_classes=3).load_state_dict(state["state_dict"])


def test_smoothing_is_that_of_timms_argument():
    assert task({"hard": {}}, smoothing=0.3).get_trainable_module().objectives["hard"].smoothing == 0.3
    assert task({"hard": {}}).get_trainable_module().objectives["hard"].smoothing == 0.1


def test_what_a_task_lacks_is_said_when_it_is_built_or_called():
    with pytest.raises(EverytokenError, match="TokenModel"):
        task({"token_labeling": {}})(*data())
    with pytest.raises(EverytokenError, match="teacher"):
        task({"distillation": {}})(*data())
    with pytest.raises(EverytokenError, match=r"tl_align.*cutmix"):
        task({"tl_align": {}})
    with pytest.raises(EverytokenError, match=r"\[2, 4\].*mixup"):
        task({"hard": {}})(data()[0], torch.eye(4)[:2])


def test_objectives_and_mixers_that_have_been_built_can_be_given():
    model = TokenModel(timm.create_model("vit_nano_patch4_32", num_classes=4))
    given = TokenTask(model, {"hard": HardLabels(), "mine": Drloc(model, weight=0.3)}, CutMix(), verbose=False).train()
    named = task({"hard": {}, "drloc": {"weight": 0.3}}, name="vit_nano_patch4_32", mixing={"cutmix": {}})
    assert set(given(*data())) - {"mine/l1"} == set(named(*data())) - {"drloc/l1"}


def test_distributed_training_of_a_model_with_a_head_that_nobody_uses(tmp_path, monkeypatch):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/join", rank=0, world_size=1)
    try:
        one = task({"hard": {}, "drloc": {}}, name="lvvit_micro_patch4_32").prepare_distributed()
        losses = []
        for rank in (0, 1, 0):  # a trained weight without a gradient would fail in the second pass
            monkeypatch.setattr(torch.distributed, "get_rank", lambda *_, rank=rank: rank)
            one.step = 0
            result = one(*data())
            result["loss"].backward()
            losses.append(float(result["drloc/l1"].detach()))
    finally:
        torch.distributed.destroy_process_group()
    assert losses[0] == losses[2] != losses[1], "each process draws its own pairs"


def test_the_state_of_another_task_is_refused_unless_it_need_not_fit():
    name = "vit_nano_patch4_32"
    state = task({"drloc": {}}, name, token_classes=4).get_task_state()
    for other in (task({"drloc": {"variant": "ce"}}, name, token_classes=4), task({"hard": {}}, name)):
        before = copy.deepcopy(other.get_task_state())
        with pytest.raises(EverytokenError, match=r"other objectives or another token head: '(objectives|model)\..*"):
            other.load_task_state(state)
        assert all(torch.equal(value, before[name]) for name, value in other.get_task_state().items() if name != "step")
        other.load_task_state(state, strict=False)
    same = task({"drloc": {}}, name, token_classes=4)
    torch.nn.init.zeros_(same.get_trainable_module().model.token_head.weight)
    same.load_task_state(state)
    assert torch.equal(same.get_task_state()["model.token_head.weight"], state["model.token_head.weight"])

"""What a timm task knows of the training around it."""

import pytest
import timm
import torch

import everytoken  # noqa: F401
from everytoken.errors import EverytokenError
from everytoken.tasks.timm_task import TokenTask

SCHEDULE = {"drloc": {"released": "schedule", "warmup": 0.5}}


def task(objectives, **more):
    torch.manual_seed(0)
    model = timm.create_model("swin_nano_patch2_window4_32", num_classes=4, drop_path_rate=0.0)
    return TokenTask(model, objectives, verbose=False, **more).train()


def data():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 3])


def test_the_released_schedule_follows_the_steps_of_the_task():
    scheduled, plain = task(SCHEDULE, steps=4), task({"drloc": {}})
    for factor in (0.0, 0.5, 1.0, 0.5, 0.0, 0.0):  # grows over half of the four steps, then falls
        got, full = (float(t(*data())["drloc/l1"].detach()) for t in (scheduled, plain))
        assert full > 0
        assert got == pytest.approx(full * factor, abs=1e-6)


def test_a_schedule_without_the_number_of_steps_is_refused_and_the_number_may_come_later():
    one = task({"drloc": {"released": "all"}})
    with pytest.raises(EverytokenError, match=r"'drloc'.*steps=epochs \* len\(loader\)"):
        one(*data())
    one.steps = 10
    one(*data())
    assert one.progress == 0.1
    one.eval()
    one(*data())
    assert one.progress == 0.1, "evaluation is no training"


def test_a_resumed_task_goes_on_where_it_was():
    first, second = task(SCHEDULE, steps=4), task(SCHEDULE, steps=4)
    first(*data())
    second.load_task_state(first.get_task_state())
    assert second.progress == 0.25


def test_others_need_no_number_of_steps():
    assert float(task({"drloc": {}})(*data())["loss"].detach()) > 0

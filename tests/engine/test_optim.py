"""Schedules."""

import pytest
import torch

from everytoken.engine.optim import build_schedule
from everytoken.engine.options import OptimOptions


def test_linear_goes_straight_from_the_warm_up_line_to_the_end():
    """The rate at update t is t / w of the peak in warm-up, then min + (peak - min) (1 - t / T)."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=6e-5)
    options = OptimOptions(epochs=4, sched="linear", warmup_epochs=0.5, warmup_lr=0.0, min_lr=5e-6)
    schedule, updates = build_schedule(optimizer, options, updates_per_epoch=10)
    assert updates == 40
    for t in range(1, 41):
        schedule.step_update(t)
        expected = 6e-5 * t / 5 if t < 5 else 5e-6 + (6e-5 - 5e-6) * (1 - t / 40)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected), t

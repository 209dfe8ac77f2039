"""`torch.compile`: how many graphs a training step has, and that no batch makes more of them.

The backend counts graphs and runs them as they are, so nothing is compiled by a compiler.
"""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from everytoken.data.batch import Batch, normalise
from everytoken.keyed import StepKey
from everytoken.models import probe
from tests.engine.test_fake_gpu import MEAN, STD, host_batch, make_step

# One block per backbone: what is counted does not depend on how many follow.
BACKBONES = {
    "vit": ("vit_nano_patch4_32", {"depth": 1}),
    "lvvit": ("lvvit_micro_patch4_32", {"depth": 1}),
    "swin": ("swin_nano_patch4_window6_96", {"depths": (2, 1)}),
}
# (backbone, objectives, mixing, teacher), graphs of model and objectives together
STEPS = {
    "token labels, MixToken": (("lvvit", {"token_labeling": {}}, {"mixtoken": {}}, False), 1),
    "drloc": (("vit", {"hard": {}, "drloc": {}}, {}, False), 5),  # the break is three calls deep
    "TL-Align, Swin": (("swin", {"tl_align": {}}, {"cutmix": {}}, False), 1),
    "TransMix": (("vit", {"transmix": {}}, {"cutmix": {}}, False), 1),
    "teachers": (("vit", {"distillation": {}, "online_token": {}}, {"mixup": {}}, True), 1),
}


class Graphs:
    """A backend that counts."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, inputs):
        self.count += 1
        return module.forward


def build(backbone, *more):
    """(step, side of its images)"""
    name, smaller = BACKBONES[backbone]
    return make_step(name, *more, **smaller)


def batches(step, size):
    """Of two steps, mixed by different boxes."""
    step.grid = probe(step.model, (size, size), 3)
    for number in range(2):
        batch = host_batch(size)
        batch = replace(batch, images=normalise(batch.images, MEAN, STD), key=StepKey(1, number)).plan(step.grid)
        yield step.mixed(batch)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_graph_for_all_boxes_and_drawing_pairs_is_the_only_break(name):
    setup, expected = STEPS[name]
    step, size = build(*setup)
    ready = list(batches(step, size))
    mixer, step.mixer = step.mixer, None  # drawn on the host, before the step
    graphs = Graphs()
    compiled = torch.compile(step, backend=graphs)
    for batch in ready:
        compiled(batch)["loss"].backward()
        more = torch.__version__.startswith("2.9.") and expected > 1  # there, the break may divide one call more
        assert expected <= graphs.count <= expected + more
    reasons = " ".join(counters["graph_break"])
    assert len(counters["graph_break"]) == (expected > 1), reasons
    assert ("Drloc._draw" in reasons) == (expected > 1), reasons
    assert mixer is None or not all(torch.equal(ready[0].mix.mask, b.mix.mask) for b in ready[1:])


def test_torchcompile_is_one_graph_for_training_and_one_for_validation_with_its_smaller_last_batch():
    step, size = build(*STEPS["token labels, MixToken"][0])
    graphs = Graphs()
    step.model.compile(backend=graphs)
    for batch in batches(step, size):  # also asks the model for its grid
        step(batch)["loss"].backward()
    assert graphs.count == 1
    step.eval()
    for count in (4, 4, 3, 2):
        with torch.no_grad():
            assert len(step(Batch(torch.zeros(count, 3, size, size)))["output"]) == count
        assert graphs.count == 2

"""A batch's way to the device."""

from __future__ import annotations

import pytest
import torch

from everytoken.data.batch import Batch, Prefetcher, normalise
from everytoken.keyed import StepKey


def test_normalisation_equals_the_definition_on_the_device_in_the_asked_type():
    images = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    want = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    assert torch.allclose(normalise(images, mean, std), want, atol=1e-5)
    half = normalise(images, mean, std, torch.bfloat16, channels_last=True)
    assert half.dtype == torch.bfloat16
    assert half.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(half.float(), want, rtol=0.01, atol=0.01)
    assert images.dtype == torch.uint8


class Traveller:
    """Stands for a tensor, and notes where it was sent."""

    def __init__(self, where="cpu"):
        self.where = where

    def to(self, device, non_blocking=False):
        return Traveller((device, non_blocking))

    def pin_memory(self):
        return Traveller("pinned")


def test_a_batch_moves_with_all_its_parts_and_keeps_what_is_no_tensor():
    parts = ("labels", "placement", "indices", "targets", "maps", "token_target", "class_target", "mix")
    batch = Batch(Traveller(), keys=("a",), skipped=(("b", "c"),), key=StepKey(), **{p: Traveller() for p in parts})
    for moved, where in ((batch.to("cuda:1", True), ("cuda:1", True)), (batch.pin_memory(), "pinned")):
        assert all(getattr(moved, part).where == where for part in ("images", *parts))
        assert moved.keys == ("a",)
        assert moved.skipped == (("b", "c"),)
        assert moved.key == StepKey()


def test_the_prefetcher_gives_all_batches_normalised_and_in_order():
    batches = (Batch(torch.full((2, 3, 4, 4), k, dtype=torch.uint8)) for k in range(4))
    ready = Prefetcher(batches, "cpu", (0.0,) * 3, (1 / 255,) * 3)
    assert [batch.images[0, 0, 0, 0].item() for batch in ready] == pytest.approx([0, 1, 2, 3])

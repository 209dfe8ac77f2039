"""A batch's way to the device."""

from __future__ import annotations

import time

import pytest
import torch

from everytoken.data.batch import Batch, Prefetcher, normalise


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
    batch = Batch(*(Traveller() for _ in range(4)), ("a",), erased=Traveller(), maps=Traveller(), skipped=(("b", "c"),))
    for moved, where in ((batch.to("cuda:1", True), ("cuda:1", True)), (batch.pin_memory(), "pinned")):
        parts = (moved.images, moved.labels, moved.placement, moved.indices, moved.erased, moved.maps)
        assert all(part.where == where for part in parts)
        assert moved.keys == ("a",)
        assert moved.skipped == (("b", "c"),)


def test_the_prefetcher_gives_all_batches_and_measures_who_waits_for_whom():
    def slow(n, seconds):
        for k in range(n):
            time.sleep(seconds)
            zeros = torch.zeros(2, dtype=torch.int64)
            images = torch.full((2, 3, 4, 4), k, dtype=torch.uint8)
            yield Batch(images, zeros, torch.zeros(2, 2, 3), zeros, ("a", "b"))

    hungry = Prefetcher(slow(4, 0.03), "cpu", (0.0,) * 3, (1 / 255,) * 3)
    assert [batch.images[0, 0, 0, 0].item() for batch in hungry] == pytest.approx([0, 1, 2, 3])
    assert hungry.waited > 0.1
    assert hungry.waited > 4 * hungry.worked
    busy = Prefetcher(slow(4, 0.0), "cpu", (0.0,) * 3, (1 / 255,) * 3)
    for _ in busy:
        time.sleep(0.03)
    assert busy.worked > 4 * busy.waited

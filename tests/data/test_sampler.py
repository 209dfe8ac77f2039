"""Which samples make up which batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everytoken_lab.data.datasets import DataError
from everytoken_lab.data.loader import BatchSampler


@settings(max_examples=100, deadline=None)
@given(
    total=st.integers(1, 200),
    batch=st.integers(1, 17),
    world=st.integers(1, 6),
    repeats=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_every_sample_of_an_epoch_is_seen_exactly_once_over_all_ranks(total, batch, world, repeats, epoch):
    def steps(rank, **options):
        sampler = BatchSampler(total, batch, rank=rank, world=world, **options)
        sampler.epoch = epoch
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert all(batches)
        return batches

    samples = [r.sample for rank in range(world) for step in steps(rank, train=False) for r in step]
    assert sorted(samples) == list(range(total))
    if total < batch * world:
        with pytest.raises(DataError, match="do not fill one batch"):
            BatchSampler(total, batch, train=True, world=world)
        return
    ranks = [steps(rank, train=True, repeats=repeats) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1  # no rank waits for a batch that another does not have
    requests = [r for batches in ranks for step in batches for r in step]
    assert len(set(requests)) == len(requests) == total // (batch * world) * batch * world
    assert all(r.epoch == epoch for r in requests)
    assert all(len(step) == batch for batches in ranks for step in batches)
    if repeats == 1:
        assert len({r.sample for r in requests}) == len(requests)


@pytest.mark.parametrize("repeats", [1, 3])
def test_two_processes_share_the_steps_of_one(repeats):
    def steps(batch, rank, world):
        return list(BatchSampler(100, batch, train=True, seed=1, rank=rank, world=world, repeats=repeats))

    one = steps(16, 0, 1)
    for whole, left, right in zip(one, steps(8, 0, 2), steps(8, 1, 2), strict=True):
        assert sorted(whole) == sorted(left + right)


def test_epochs_have_different_orders_and_drop_different_samples():
    sampler = BatchSampler(50, 8, train=True, seed=0)
    kept = []
    for epoch in range(6):
        sampler.epoch = epoch
        kept.append([r.sample for step in sampler for r in step])
    assert len({tuple(k) for k in kept}) == 6
    assert len(set.union(*(set(range(50)) - set(k) for k in kept))) > 4

"""Which samples make up which batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everytoken.data.sampler import BatchSampler
from everytoken.data.sources import DataError


@settings(max_examples=150, deadline=None)
@given(
    total=st.integers(1, 200),
    batch=st.integers(1, 17),
    world=st.integers(1, 6),
    repeats=st.integers(1, 3),
    drop=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_sample_of_an_epoch_is_seen_exactly_once_over_all_ranks(total, batch, world, repeats, drop, epoch):
    def steps(rank, **options):
        sampler = BatchSampler(total, batch, rank=rank, world=world, **options)
        sampler.set_epoch(epoch)
        made = list(sampler)
        assert len(made) == len(sampler)
        assert all(made)
        return made

    seen = [r.sample for rank in range(world) for step in steps(rank, train=False) for r in step]
    assert sorted(seen) == list(range(total))
    if total < batch * world and (drop or total < world):
        with pytest.raises(DataError, match="Lower the batch size"):
            BatchSampler(total, batch, train=True, world=world, drop_last=drop)
        return
    ranks = [steps(rank, train=True, drop_last=drop, repeats=repeats) for rank in range(world)]
    assert len({len(made) for made in ranks}) == 1  # no rank waits for a batch that another does not have
    requests = [r for made in ranks for step in made for r in step]
    assert len(set(requests)) == len(requests)
    assert all(r.epoch == epoch for r in requests)
    if drop:
        assert all(len(step) == batch for made in ranks for step in made)
        assert len(requests) == total // (batch * world) * batch * world
    else:
        assert len(requests) == total
        sizes = [len(made[-1]) for made in ranks]
        assert max(sizes) - min(sizes) <= 1
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
        sampler.set_epoch(epoch)
        kept.append([r.sample for step in sampler for r in step])
    assert len({tuple(k) for k in kept}) == 6
    assert len(set.union(*(set(range(50)) - set(k) for k in kept))) > 4

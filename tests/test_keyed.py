from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everytoken import keyed

PARTS = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=6)), max_size=4)


@given(st.integers(0, 2**64), PARTS, PARTS)
def test_two_keys_give_the_same_stream_only_if_they_are_equal(seed, a, b):
    same_type = [type(x) for x in a] == [type(x) for x in b]
    equal = same_type and a == b
    assert (keyed.digest(seed, *a) == keyed.digest(seed, *b)) == equal


def test_the_numbers_of_a_key_do_not_change_between_processes_or_releases():
    # Written down once: a change here changes every run that is resumed with a newer release.
    assert keyed.digest(7, 3, "a/b.jpg", "augment").hex() == "0db28c8ccdc445fe6cfc930f72652014"
    assert keyed.generator(7, 3, "a/b.jpg", "augment").integers(0, 1000, 4).tolist() == [900, 385, 498, 99]


def test_the_generator_equals_numpys_philox_with_the_same_key():
    key = np.frombuffer(keyed.digest(1, "x"), dtype="<u8")
    ours, numpys = keyed.generator(1, "x"), np.random.Generator(np.random.Philox(key=key))
    assert np.array_equal(ours.random(1000), numpys.random(1000))


def test_streams_of_neighbouring_keys_look_uniform_and_independent():
    first = np.array(
        [keyed.generator(0, epoch, sample, "augment").random(2) for epoch in range(20) for sample in range(200)]
    )
    assert abs(first.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(first[:-1, 0], first[1:, 0])[0, 1]) < 0.06
    assert abs(np.corrcoef(first.T)[0, 1]) < 0.06
    assert len(np.unique(first)) == first.size


def test_numpy_integers_and_tensors_are_keys_like_python_integers_and_floats_are_refused():
    want = keyed.digest(1, 2)
    assert keyed.digest(np.int64(1), np.uint8(2)) == want
    assert keyed.digest(1, torch.tensor(2)) == want
    with pytest.raises(TypeError):
        keyed.digest(1, 2.0)


def test_a_file_name_that_is_not_unicode_is_a_key():
    assert keyed.digest(0, b"\xff.jpg".decode("utf-8", "surrogateescape")) != keyed.digest(0, ".jpg")


def test_torch_generators_are_keyed_too_and_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    a, b, c = (torch.rand(8, generator=keyed.torch_generator(5, k)) for k in ("mix", "mix", "drop"))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.random.get_rng_state())


def test_one_uniform_number_per_key():
    many = np.array([keyed.uniform(3, i) for i in range(4000)])
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.02


@pytest.mark.parametrize("change", [{"seed": 2}, {"step": 2}, {"rank": 2}, {"part": 2}])
def test_every_part_of_a_step_key_changes_its_draws_and_the_progress_does_not(change):
    def draws(key, purpose="mix"):
        return key.generator(purpose).random(), float(torch.rand(1, generator=key.torch_generator(purpose)))

    first = keyed.StepKey()
    assert all(a != b for a, b in zip(draws(first), draws(replace(first, **change)), strict=True))
    assert all(a != b for a, b in zip(draws(first), draws(first, "drloc"), strict=True))
    assert draws(first) == draws(replace(first, epoch=3.5, epochs=9))


def test_progress_is_the_part_of_the_epochs_that_is_done():
    assert keyed.StepKey(epoch=2.5, epochs=10).progress == 0.25
    assert keyed.StepKey(epoch=12, epochs=10).progress == 1

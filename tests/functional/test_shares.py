"""Shares against K-wide labels and dense matrices, written out slowly."""

import math

import pytest
import torch
from torch.nn import functional as F

from everytoken.functional import from_labels
from everytoken.functional import shares as S


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(3)


def box(h, w, y0, x0, y1, x1):
    mask = torch.ones(1, h, w)
    mask[:, y0:y1, x0:x1] = 0
    return mask


def test_a_patch_starts_with_the_part_of_it_that_shows_its_own_image():
    mask = box(32, 32, 4, 8, 20, 32)
    shares = S.patch_shares(mask, (4, 4))
    for i in range(4):
        for j in range(4):
            assert shares[0, i, j] == pytest.approx(
                mask[0, 8 * i : 8 * i + 8, 8 * j : 8 * j + 8].mean().item(), abs=1e-6
            )
    assert 0.49 < shares[0, 0, 1] < 0.51


@pytest.mark.parametrize(
    ("mask_size", "grid"), [((30, 21), (4, 5)), ((3, 7), (6, 5)), ((1, 1), (4, 4)), ((7, 7), (7, 7))]
)
def test_patch_shares_are_exact_on_any_pair_of_grids(mask_size, grid, rng):
    mask = torch.rand(2, *mask_size, generator=rng)
    times = [a * b // math.gcd(a, b) for a, b in zip(mask_size, grid, strict=True)]
    fine = mask.repeat_interleave(times[0] // mask_size[0], 1).repeat_interleave(times[1] // mask_size[1], 2)
    wanted = fine.view(2, grid[0], times[0] // grid[0], grid[1], times[1] // grid[1]).mean((2, 4))
    torch.testing.assert_close(S.patch_shares(mask, grid), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(S.patch_shares(mask, grid).mean((1, 2)), mask.mean((1, 2)), atol=1e-6, rtol=0)


def test_what_lies_outside_of_the_image_does_not_count_for_a_patch():
    mask = box(20, 20, 0, 10, 20, 20)
    shares = S.patch_shares(mask, (2, 2), (16 / 20, 16 / 20))
    torch.testing.assert_close(shares[0], torch.tensor([[10 / 16, 0.0], [10 / 16, 0.0]]), atol=1e-6, rtol=0)


def test_scalar_shares_say_what_k_wide_labels_say(rng):
    B, H, N, K = 3, 2, 10, 7
    own, partner = F.one_hot(torch.tensor([0, 1, 2]), K).float(), F.one_hot(torch.tensor([4, 5, 2]), K).float()
    r = torch.rand(B, N, generator=rng)
    labels = r[..., None] * own[:, None] + (1 - r[..., None]) * partner[:, None]
    for _ in range(4):
        attention = torch.randn(B, H, N, N, generator=rng).softmax(-1)
        labels = (torch.einsum("bhij,bjk->bik", attention, labels) / H + labels) / 2
        r = S.mean_shares(S.mixed_by_matrix(attention, r[..., None])[..., 0], r)
    torch.testing.assert_close(r[..., None] * own[:, None] + (1 - r[..., None]) * partner[:, None], labels)


def test_weights_of_any_sign_count_by_their_size(rng):
    matrix = torch.randn(2, 3, 5, 6, generator=rng)
    values = torch.rand(2, 6, 1, generator=rng)
    wanted = torch.zeros(2, 5, 1)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                size = matrix[b, h, i].abs()
                wanted[b, i] += (size / size.sum() * values[b, :, 0]).sum() / 3
    torch.testing.assert_close(S.mixed_by_matrix(matrix, values, stochastic=False), wanted)
    torch.testing.assert_close(S.row_normalised(matrix).sum(-1), torch.ones(2, 3, 5))
    torch.testing.assert_close(S.row_normalised(torch.zeros(2, 4)), torch.full((2, 4), 0.25))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
        ((7, 5), (2, 1), (2, 3, 3, 3), (1, 1)),
        ((3, 3), (2, 2), (2, 1, 2, 2), (2, 2)),
    ],
)
def test_a_convolution_mixes_shares_as_its_row_normalised_matrix(kernel, stride, padding, dilation, rng):
    weight = torch.randn(6, 2, *kernel, generator=rng)
    shares = torch.rand(2, 8, 9, generator=rng)
    each = weight.abs().sum(1)
    each = (each / each.sum((1, 2), keepdim=True)).mean(0)
    left, right, top, bottom = padding
    h = (8 + top + bottom - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
    w = (9 + left + right - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
    matrix = torch.zeros(h * w, 8 * 9)
    for i in range(h):
        for j in range(w):
            for a in range(kernel[0]):
                for b in range(kernel[1]):
                    y, x = i * stride[0] + a * dilation[0] - top, j * stride[1] + b * dilation[1] - left
                    if 0 <= y < 8 and 0 <= x < 9:
                        matrix[i * w + j, y * 9 + x] += each[a, b]
    matrix = matrix / matrix.sum(1, keepdim=True)
    got = S.convolved_shares(shares, S.kernel_of(weight), stride, padding, dilation)
    torch.testing.assert_close(got.flatten(1), shares.flatten(1) @ matrix.t(), atol=1e-6, rtol=0)


def test_merging_averages_the_cells_that_are_there():
    shares = torch.arange(15.0).view(1, 3, 5) / 15
    merged = S.merged_shares(shares)
    assert merged.shape == (1, 2, 3)
    assert merged[0, 0, 0] == pytest.approx((0 + 1 + 5 + 6) / 4 / 15)
    assert merged[0, 0, 2] == pytest.approx((4 + 9) / 2 / 15)
    assert merged[0, 1, 2] == pytest.approx(14 / 15)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_aligned_loss_is_the_cross_entropy_with_the_aligned_target(smoothing, rng):
    K = 9
    logits = torch.randn(4, K, generator=rng, requires_grad=True)
    own, partner = torch.tensor([1, 2, 3, 4]), torch.tensor([4, 2, 8, 0])
    r = torch.rand(4, generator=rng, requires_grad=True)
    soft = [F.one_hot(c, K) * (1 - smoothing) + smoothing / K for c in (own, partner)]
    target = r.detach()[:, None] * soft[0] + (1 - r.detach()[:, None]) * soft[1]
    wanted = F.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(wanted, logits)
    forms = [
        (own, partner, smoothing),
        (soft[0], soft[1], 0.0),
        (F.one_hot(own, K).float(), F.one_hot(partner, K).float(), smoothing),
        (from_labels(own, K), from_labels(partner, K), smoothing),
        (from_labels(own, K, smoothing), from_labels(partner, K, smoothing), 0.0),
    ]
    for a, b, s in forms:
        loss = S.aligned_cross_entropy(logits, a, b, r, s)
        torch.testing.assert_close(loss, wanted)
        got, through = torch.autograd.grad(loss, [logits, r], allow_unused=True)
        torch.testing.assert_close(got, grad)
        assert through is None


def test_token_targets_follow_the_tokens(rng):
    own, partner = from_labels(torch.tensor([1, 2]), 5), from_labels(torch.tensor([3, 4]), 5)
    grid = [
        t.apply(lambda x: x if x.dtype == torch.int64 else x.view(2, 1, 1, *x.shape[1:]).expand(2, 2, 3, *x.shape[1:]))
        for t in (own, partner)
    ]
    r = torch.rand(2, 2, 3, generator=rng)
    dense = S.aligned_target(grid[0], grid[1], r).dense()
    wanted = r[..., None] * own.dense()[:, None, None] + (1 - r[..., None]) * partner.dense()[:, None, None]
    torch.testing.assert_close(dense, wanted)
    with pytest.raises(ValueError, match="do not fit targets"):
        S.aligned_target(own, partner, r)


def test_presence_is_one_inside_an_image_under_convolution_and_fluctuates_under_attention(rng):
    kernel = torch.randn(3, generator=rng)
    matrix = torch.zeros(9, 9)
    for i in range(9):
        for k in range(3):
            if 0 <= i + k - 1 < 9:
                matrix[i, i + k - 1] = kernel[k]
    presence = S.row_normalised(matrix).sum(-2)
    torch.testing.assert_close(presence[2:-2], torch.ones(5))
    attention = (4 * torch.randn(2, 9, 9, generator=rng)).softmax(-1)
    presence = S.row_normalised(attention).sum(-2)
    torch.testing.assert_close(presence, attention.sum(-2))
    torch.testing.assert_close(presence.sum(-1), torch.full((2,), 9.0))
    assert presence.max() > 1.5
    assert presence.min() < 0.5


def test_similarity_names_the_source_of_unmixed_tokens(rng):
    own, partner = torch.rand(2, 6, 8, generator=rng), torch.rand(2, 6, 8, generator=rng)
    own[..., 4:] = 0
    partner[..., :4] = 0  # the two sources have nothing in common
    place = torch.rand(2, 6, generator=rng) > 0.5
    mixed = torch.where(place[..., None], own, partner)
    torch.testing.assert_close(S.similarity_shares(mixed, own, partner), place.float())
    torch.testing.assert_close(S.similarity_shares(-mixed, own, partner), torch.full((2, 6), 0.5))
    half = own / own.norm(dim=-1, keepdim=True) + partner / partner.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(S.similarity_shares(half, own, partner), torch.full((2, 6), 0.5))

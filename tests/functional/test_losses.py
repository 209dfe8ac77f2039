import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from everytoken.functional import (
    CompactTarget,
    blend,
    compact_cross_entropy,
    dense_soft_cross_entropy,
    distillation_loss,
    from_labels,
    from_scores,
    losses,
    participating,
)


def target_of(seed, B=2, middle=(3, 2), num_classes=11, U=4):
    """A target that has been smoothed and blended, so that classes repeat, with weights of all kinds."""
    g = torch.Generator().manual_seed(seed)
    both = []
    for _ in range(2):
        classes = torch.stack([torch.randperm(num_classes, generator=g)[:U] for _ in range(B)])
        classes[0, -1] = -1
        weight = torch.rand(B, *middle, generator=g)
        if middle and middle[-1] > 1:
            weight[..., -1] = 0  # the last column has no label
        both.append(from_scores(torch.randn(B, *middle, U, generator=g) * 3, classes, num_classes, weight))
    return blend(both[0].smooth(0.1), 0.3, both[1], 0.7)


def densely(logits, target, reduction="mean", weight=None):
    """The obvious version, in double precision."""
    weight = (target.weight if weight is None else weight).double()
    rows = -(target.dense().double() * logits.double().log_softmax(-1)).sum(-1)
    return {"none": rows, "sum": (rows * weight).sum(), "mean": (rows * weight).sum() / weight.sum()}[reduction]


def both_gradients(f, g, logits):
    one, two = logits.clone().requires_grad_(), logits.double().requires_grad_()
    f(one).sum().backward()
    g(two).sum().backward()
    return one.grad, two.grad


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(), (1,), (3, 2)]),
    st.sampled_from(["mean", "sum", "none"]),
    st.sampled_from([1.0, 30.0]),
)
def test_the_compact_loss_and_its_gradient_equal_the_dense_ones(seed, middle, reduction, scale):
    target = target_of(seed, middle=middle)
    logits = torch.randn(*target.shape, 11, generator=torch.Generator().manual_seed(seed)) * scale
    got = compact_cross_entropy(logits, target, reduction)
    torch.testing.assert_close(got.double(), densely(logits, target, reduction), rtol=1e-6, atol=1e-6)
    mine, theirs = both_gradients(
        lambda x: compact_cross_entropy(x, target, reduction), lambda x: densely(x, target, reduction), logits
    )
    assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


def test_the_gradient_passes_gradcheck():
    target = target_of(0)
    exact = CompactTarget(target.classes, target.mass.double(), target.background.double(), target.weight.double(), 11)
    logits = torch.randn(2, 3, 2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher = torch.randn(2, 3, 2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(lambda x: compact_cross_entropy(x, exact), logits.requires_grad_())
    assert torch.autograd.gradcheck(lambda x: dense_soft_cross_entropy(x, teacher, 2.0), logits)


@pytest.mark.parametrize("chunk", [1, 30, 11 * 6, 11 * 6 * 2 + 5, 10**6])
def test_chunks_do_not_change_the_result(monkeypatch, chunk):
    target = target_of(1, B=5)
    logits = torch.randn(5, 3, 2, 11, generator=torch.Generator().manual_seed(1))
    teacher = torch.randn(5, 3, 2, 11, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(losses, "CPU_CHUNK", chunk)
    torch.testing.assert_close(compact_cross_entropy(logits, target).double(), densely(logits, target))
    mine, theirs = both_gradients(
        lambda x: compact_cross_entropy(x, target) + dense_soft_cross_entropy(x, teacher),
        lambda x: densely(x, target) - (teacher.double().softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
        logits,
    )
    assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_reduced_in_single_precision(kind):
    target = target_of(2, num_classes=5000)
    logits = (torch.randn(2, 3, 2, 5000, generator=torch.Generator().manual_seed(3)) * 5).to(kind)
    got = compact_cross_entropy(logits, target)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), densely(logits, target), rtol=1e-6, atol=1e-6)
    mine, theirs = both_gradients(lambda x: compact_cross_entropy(x, target), lambda x: densely(x, target), logits)
    assert mine.dtype == kind
    torch.testing.assert_close(mine, theirs.to(kind), rtol=0.02, atol=1e-6)  # only the last rounding differs


def test_logits_of_any_layout_and_no_input_is_modified():
    target = target_of(4)
    base = torch.randn(2, 11, 3, 2, generator=torch.Generator().manual_seed(5))
    logits = base.permute(0, 2, 3, 1).requires_grad_()
    kept = base.clone(), target.mass.clone(), target.weight.clone()
    loss = compact_cross_entropy(logits, target)
    loss.backward()
    torch.testing.assert_close(loss.double(), densely(logits.detach(), target), rtol=1e-6, atol=1e-6)
    assert torch.equal(base, kept[0])
    assert torch.equal(target.mass, kept[1])
    assert torch.equal(target.weight, kept[2])


def test_hard_labels_equal_torchs_cross_entropy():
    logits, y = torch.randn(4, 9), torch.tensor([0, 3, 8, 3])
    torch.testing.assert_close(
        compact_cross_entropy(logits, from_labels(y, 9, 0.1)), F.cross_entropy(logits, y, label_smoothing=0.1)
    )


def test_tokens_without_a_label_do_not_count():
    target, logits = target_of(6), torch.randn(2, 3, 2, 11)
    without = target.weight == 0
    assert without.any()
    wild = torch.where(without[..., None], 1e4, logits).requires_grad_()
    torch.testing.assert_close(compact_cross_entropy(wild, target), compact_cross_entropy(logits, target))
    compact_cross_entropy(wild, target).backward()
    assert (wild.grad[without] == 0).all()


def test_a_batch_without_labels_costs_nothing():
    target = from_scores(torch.zeros(2, 3, 4), torch.full((2, 4), -1), 5, weight=torch.zeros(2, 3))
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = compact_cross_entropy(logits, target)
    loss.backward()
    assert loss == 0
    assert (logits.grad == 0).all()


def test_the_operators_keep_torchs_rules():
    target = target_of(7)
    logits = torch.randn(2, 6, 11, requires_grad=True)
    inputs = (logits, target.classes, target.mass.flatten(1, 2), target.background.flatten(1))
    torch.library.opcheck(losses.compact_rows, inputs)


def test_the_losses_compile_without_a_break():
    target = target_of(8)
    image = from_labels(torch.tensor([1, 2]), 7, 0.1)

    def step(cls, tok, teacher, image, target):
        loss = compact_cross_entropy(cls, image) + 0.5 * compact_cross_entropy(tok, target)
        return loss + dense_soft_cross_entropy(tok, teacher) + distillation_loss(cls, cls.detach() * 2, "hard")

    cls, tok, teacher = torch.randn(2, 7), torch.randn(2, 3, 2, 11), torch.randn(2, 3, 2, 11)
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        a, b = cls.clone().requires_grad_(), tok.clone().requires_grad_()
        loss = run(a, b, teacher, image, target)
        loss.backward()
        results.append((loss.detach(), a.grad, b.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_participation_keeps_that_part_of_every_images_tokens():
    chosen = participating(torch.Size((50, 7, 10)), 0.2, torch.Generator().manual_seed(0), "cpu")
    assert (chosen.sum((1, 2)) == 14).all()
    assert chosen.mean(0).min() > 0  # no token is always left out
    assert chosen.mean(0).max() < 0.6
    again = participating(torch.Size((50, 7, 10)), 0.2, torch.Generator().manual_seed(0), "cpu")
    assert torch.equal(chosen, again)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft_distillation_is_the_scaled_divergence(temperature):
    student, teacher = torch.randn(4, 9), torch.randn(4, 9)
    expected = F.kl_div(
        (student / temperature).log_softmax(-1), (teacher / temperature).softmax(-1), reduction="batchmean"
    )
    got = distillation_loss(student, teacher, "soft", temperature)
    torch.testing.assert_close(got, expected * temperature**2)


def test_hard_distillation_follows_the_teachers_best_class():
    student, teacher = torch.randn(2, 3, 9), torch.randn(2, 3, 9)
    expected = F.cross_entropy(student.view(6, 9), teacher.view(6, 9).argmax(-1))
    torch.testing.assert_close(distillation_loss(student, teacher, "hard"), expected)
    weight = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    one = F.cross_entropy(student[0, 0], teacher[0, 0].argmax(-1))
    torch.testing.assert_close(distillation_loss(student, teacher, "hard", weight=weight), one)


def test_a_teacher_gets_no_gradient():
    student, teacher = torch.randn(2, 9, requires_grad=True), torch.randn(2, 9, requires_grad=True)
    (dense_soft_cross_entropy(student, teacher) + distillation_loss(student, teacher)).backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_wrong_shapes_are_named():
    target = target_of(11)
    with pytest.raises(ValueError, match=r"\[2, 3, 2, 10\] do not fit"):
        compact_cross_entropy(torch.randn(2, 3, 2, 10), target)
    with pytest.raises(ValueError, match="differ in shape"):
        dense_soft_cross_entropy(torch.randn(2, 3), torch.randn(2, 4))
    with pytest.raises(ValueError, match="'soft' or 'hard'"):
        distillation_loss(torch.randn(2, 3), torch.randn(2, 3), "medium")
    with pytest.raises(ValueError, match="reduction"):
        compact_cross_entropy(torch.randn(2, 3, 2, 11), target, reduction="median")


def test_a_weight_per_image_counts_for_all_of_its_tokens():
    target = target_of(3)
    logits = torch.randn(2, 3, 2, 11, generator=torch.Generator().manual_seed(1))
    whole = torch.tensor([0.2, 0.7])[:, None, None].expand(2, 3, 2)
    for weight in (torch.tensor([0.2, 0.7]), torch.tensor([0.2, 0.7])[:, None, None], whole):
        got = compact_cross_entropy(logits, target, weight=weight)
        torch.testing.assert_close(got.double(), densely(logits, target, weight=whole))
        got = dense_soft_cross_entropy(logits, logits.flip(0), weight=weight)
        torch.testing.assert_close(got, dense_soft_cross_entropy(logits, logits.flip(0), weight=whole))


def test_a_masked_class_costs_nothing_where_the_target_is_zero():
    logits = torch.tensor([[1.0, -torch.inf, 0.5], [0.2, -torch.inf, -1.0]], requires_grad=True)
    labels = torch.tensor([0, 2])
    got = compact_cross_entropy(logits, from_labels(labels, 3))
    torch.testing.assert_close(got, F.cross_entropy(logits, labels))
    got.backward()
    assert torch.isfinite(logits.grad).all()
    assert not torch.isfinite(compact_cross_entropy(logits, from_labels(labels, 3, smoothing=0.1)))


def test_a_logit_that_is_not_a_number_is_never_hidden():
    logits = torch.tensor([[1.0, torch.nan, 0.5], [0.2, 0.1, -1.0]])
    for target in (from_labels(torch.tensor([0, 2]), 3), from_labels(torch.tensor([0, 2]), 3, smoothing=0.1)):
        rows = compact_cross_entropy(logits, target, "none")
        assert rows.isnan().tolist() == [True, False]

"""The training step: objectives and mixing by name, teachers, and the timm task."""

import copy
import warnings
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch

import everytoken  # noqa: F401
from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.functional import CompactTarget, from_labels
from everytoken.keyed import StepKey
from everytoken.mixing import build_mixer
from everytoken.models import TokenModel
from everytoken.objectives.drloc import Drloc
from everytoken.objectives.hard import HardLabels
from everytoken.objectives.registry import build_objectives
from everytoken.step import FrozenTeacher, TokenStep
from everytoken_lab.engine.options import ModelOptions, TrainOptions
from everytoken_lab.training.build import build_backbone

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 4}


def model(token_classes=None, name="vit_tiny_patch16_224", **kwargs) -> TokenModel:
    torch.manual_seed(0)
    return TokenModel(timm.create_model(name, **{**VIT, **kwargs}), token_classes)


def batch(n=4):
    g = torch.Generator().manual_seed(1)
    return Batch(torch.randn(n, 3, 32, 32, generator=g), torch.randint(0, 4, (n,), generator=g))


def test_hard_labels_are_added_when_nothing_else_teaches_the_class_token():
    assert list(build_objectives({"drloc": {}}, model())) == ["hard", "drloc"]
    assert list(build_objectives({"tl_align": {}}, model())) == ["tl_align"]
    assert list(build_objectives({"token_labeling": {"class_term": False}}, model(4))) == ["hard", "token_labeling"]
    online = {"online_token": {"class_target": "none"}}
    assert list(build_objectives(online, model(4))) == ["hard", "online_token"]
    assert list(build_objectives({}, model())) == ["hard"]


def test_the_papers_way_of_writing_the_token_weight_is_understood():
    objective = build_objectives({"token_labeling": {"beta": 0.3}}, model(4))["token_labeling"]
    assert objective.beta == 0.3
    assert objective.weight == 1.0


def test_smoothing_is_handed_to_those_that_have_it():
    assert build_objectives({"hard": {}}, model(), smoothing=0.25)["hard"].smoothing == 0.25
    assert build_objectives({"hard": {"smoothing": 0.0}}, model(), smoothing=0.25)["hard"].smoothing == 0.0


def test_several_mixers_take_turns_by_their_odds():
    mixer = build_mixer({"cutmix": {"odds": 3}, "mixup": {"alpha": 0.8}})
    rng = np.random.default_rng(0)
    soft = [mixer.draw(4, (32, 32), (4, 4), rng).soft for _ in range(400)]
    assert np.mean(soft) == pytest.approx(0.25, abs=0.07)
    assert build_mixer({}) is None


def test_a_step_is_repeatable_and_changes_with_its_key():
    step = TokenStep(model(), build_objectives({"drloc": {}}, model()), build_mixer({"mixtoken": {}})).train()
    first, again = (float(step(replace(batch(), key=StepKey(1, 5)))["loss"].detach()) for _ in range(2))
    other = float(step(replace(batch(), key=StepKey(1, 6)))["loss"].detach())
    assert first == again
    assert first != other


def test_evaluation_gives_the_plain_models_logits():
    step = TokenStep(model(), build_objectives({}, model()), build_mixer({"cutmix": {}})).eval()
    with torch.no_grad():
        assert torch.equal(step(batch())["output"], step.model.backbone(batch().images))


def test_a_copy_of_the_step_trains_its_own_heads():
    m = model()
    step = TokenStep(m, build_objectives({"drloc": {}}, m)).train()
    twin = copy.deepcopy(step)
    twin(batch())["loss"].backward()
    assert all(p.grad is None for p in step.parameters())
    assert any(p.grad is not None for n, p in twin.named_parameters() if n.startswith("objectives."))


def test_a_teacher_sees_the_images_in_its_own_normalisation_and_stays_out_of_the_state():
    other = model().eval()
    teacher = FrozenTeacher(other, ((0.5, 0.4, 0.3), (0.2, 0.2, 0.1)), ((0.1, 0.2, 0.3), (1.0, 0.5, 0.25)))
    pixels = torch.rand(2, 3, 32, 32)
    mean, std = torch.tensor((0.5, 0.4, 0.3)).view(3, 1, 1), torch.tensor((0.2, 0.2, 0.1)).view(3, 1, 1)
    own_mean, own_std = torch.tensor((0.1, 0.2, 0.3)).view(3, 1, 1), torch.tensor((1.0, 0.5, 0.25)).view(3, 1, 1)
    with torch.no_grad():
        wanted = other.backbone((pixels - own_mean) / own_std)
    assert torch.allclose(teacher((pixels - mean) / std, False).logits, wanted, atol=1e-5)
    passes = []
    seen = other.backbone.patch_embed.register_forward_hook(lambda *_: passes.append(1))
    both = teacher((pixels - mean) / std, True)
    assert len(passes) == 1
    seen.remove()
    assert torch.allclose(both.logits, wanted, atol=1e-5)
    assert torch.allclose(both.token_logits, other.cell_logits((pixels - own_mean) / own_std), atol=1e-5)
    student = model(4)
    step = TokenStep(student, build_objectives({"online_token": {}}, student), None, teacher).train()
    assert not any("teacher" in name for name in step.state_dict())
    step(batch())["loss"].backward()
    assert all(p.grad is None for p in other.parameters())


@pytest.mark.parametrize("wrong", [{"tokn": {}}, {"token_labeling": {"betta": 1}}])
def test_wrong_names_get_suggestions(wrong):
    with pytest.raises(EverytokenError, match="Did you mean"):
        build_objectives(wrong, model(4))


@pytest.mark.parametrize(("name", "rate"), [("swin_nano_patch2_window4_32", 0.0), ("swin_nano_patch2_window4_32", 0.3)])
def test_stochastic_depth_is_what_was_asked_for(name, rate):
    options = TrainOptions(model=ModelOptions(model=name, img_size=32, drop_path=rate))
    backbone, _ = build_backbone(options, 4)
    rates = [m.drop_prob for m in backbone.modules() if type(m).__name__ == "DropPath"]
    assert max(rates, default=0.0) == pytest.approx(rate)


def test_models_without_image_size_or_stochastic_depth_are_built_too():
    backbone, arguments = build_backbone(TrainOptions(model=ModelOptions(model="test_resnet", img_size=64)), 4)
    assert backbone.num_classes == 4
    assert "img_size" not in arguments
    with pytest.raises(EverytokenError, match="nonsense"):
        build_backbone(TrainOptions(model=ModelOptions(model="test_vit", model_kwargs={"nonsense": 1})), 4)


def test_processes_draw_other_pairs_other_participants_and_other_mixes():
    student = TokenModel(timm.create_model("vit_tiny_patch16_224", **VIT), 4)
    target = from_labels(torch.arange(4), 4)
    tokens = CompactTarget(
        target.classes,
        target.mass[:, None, None].expand(4, 4, 4, -1),
        *(t[:, None, None].expand(4, 4, 4) for t in (target.background, target.weight)),
        target.num_classes,
    )
    data = replace(batch(), token_target=tokens, class_target=target)
    drawn = [({"drloc": {}}, {}), ({"token_labeling": {"participation": 0.5}}, {}), ({"hard": {}}, {"cutmix": {}})]
    for objectives, mixing in drawn:
        step = TokenStep(student, build_objectives(objectives, student), build_mixer(mixing)).train()
        keys = (StepKey(rank=0), StepKey(rank=1), StepKey(part=1), StepKey(rank=1))
        losses = [float(step(replace(data, key=key))["loss"].detach()) for key in keys]
        assert len({*losses[:3]}) == 3
        assert losses[1] == losses[3]


class Sparse(torch.nn.Module):
    """Somebody's own objective: no base class, parameters of its own, wants to see the model."""

    def __init__(self, model, strength=1.0):
        super().__init__()
        self.strength, self.scale = strength, torch.nn.Parameter(torch.ones(model.num_features))

    def forward(self, view, batch):
        size = (view.grid * self.scale).abs().mean()
        return {"loss": self.strength * size, "size": size}


def test_an_objective_of_ones_own_is_named_by_its_import_path():
    m = model()
    step = TokenStep(m, build_objectives({"hard": {}, f"{__name__}:Sparse": {"strength": 2.0}}, m)).train()
    result = step(batch())
    torch.testing.assert_close(result["loss"], result["hard/class"] + 2 * result["Sparse/size"])
    result["loss"].backward()
    assert step.objectives["Sparse"].scale.grad is not None
    for wrong, why in (("nowhere.at_all:Sparse", "imported"), (f"{__name__}:Dense", "no class Dense")):
        with pytest.raises(EverytokenError, match=why):
            build_objectives({wrong: {}}, m)
    with pytest.raises(EverytokenError, match=r"no setting 'strenght'.*'strength'"):
        build_objectives({f"{__name__}:Sparse": {"strenght": 2.0}}, m)


def test_an_objective_without_a_loss_is_named():
    m = model()
    step = TokenStep(m, {"mine": torch.nn.Identity()}).train()
    step.objectives["mine"].forward = lambda view, batch: {"size": view.grid.mean()}
    with pytest.raises(EverytokenError, match=r"'mine'.*\"loss\""):
        step(batch())


def test_a_head_that_nothing_trains_is_frozen():
    lvvit = TokenModel(timm.create_model("lvvit_micro_patch4_32", num_classes=4))
    assert not TokenStep(lvvit, build_objectives({}, lvvit)).model.backbone.aux_head.weight.requires_grad
    used = TokenModel(timm.create_model("lvvit_micro_patch4_32", num_classes=4), token_classes=4)
    assert TokenStep(used, build_objectives({}, used)).model.backbone.aux_head.weight.requires_grad


def test_distilling_through_a_token_that_the_model_lacks_is_an_error_that_names_models_which_have_it():
    objectives = build_objectives({"hard": {}, "distillation": {"through": "distillation"}}, model())
    with pytest.raises(EverytokenError, match=r"VisionTransformer has no distillation token.*lvvit_s_distilled"):
        TokenStep(model(), objectives)


def test_lvvit_learns_from_a_teacher_through_a_token_of_its_own():
    small = {**VIT, "patch_size": None, "stem_strides": (2, 1, 1, 4), "stem_kernels": (3, 3, 3, 4), "stem_width": 8}
    student = model(name="lvvit_s_distilled", **small)
    objectives = build_objectives({"hard": {}, "distillation": {"through": "distillation"}}, student)
    norm = ((0.5,) * 3, (0.5,) * 3)
    step = TokenStep(student, objectives, build_mixer({"mixtoken": {}}), FrozenTeacher(model(), norm, norm)).train()
    result = step(batch())
    result["loss"].backward()
    trained = {name for name, p in student.backbone.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"head.weight", "head_dist.weight", "dist_token"} <= trained
    assert {f"distillation/{term}" for term in ("class",)} <= set(result)
    step.eval()
    with torch.no_grad():  # the mean of both heads, as DeiT
        features = student.backbone.forward_features(batch().images)
        both = student.backbone.head(features[:, 0]) + student.backbone.head_dist(features[:, 1])
        torch.testing.assert_close(step(batch())["output"], both / 2)


def test_a_teacher_that_no_objective_wants_is_not_asked():
    class Counting(FrozenTeacher):
        asked = 0

        def __call__(self, images, cells):
            self.asked += 1
            return super().__call__(images, cells)

    norm = ((0.5,) * 3, (0.5,) * 3)
    for wants in (False, True):
        teacher = Counting(model(), norm, norm)
        settings = {"hard": {}, **({"distillation": {}} if wants else {})}
        step = TokenStep(model(), build_objectives(settings, model()), build_mixer({"attentivecutmix": {}}), teacher)
        step.train()(batch())
        assert teacher.asked == wants


def _rank(rank, folder, wrapped, answers):
    """Two passes of one of two processes: gradients of the backbone and of drloc's MLP, and warnings."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/join", rank=rank, world_size=2)
    m = model()
    drloc = Drloc(m)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(rank))
    labels = torch.tensor([0, 1, 2, 3])
    parallel = torch.nn.parallel.DistributedDataParallel
    step = parallel(TokenStep(m, {"hard": HardLabels(), "drloc": drloc}) if wrapped else m).train()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for number in range(2):
            if wrapped:
                loss = step(Batch(images, labels, key=StepKey(0, number, rank)))["loss"]
            else:
                view = step(images)
                loss = torch.nn.functional.cross_entropy(view.logits, labels) + drloc(view)["loss"]
            loss.backward()
    gradients = [[p.grad.tolist() for p in part.parameters()] for part in (m, drloc)]
    answers.put((rank, *gradients, [str(warning.message) for warning in caught]))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapped", [True, False])
def test_two_processes_train_one_drloc_network_if_it_is_wrapped_with_the_model_and_warn_if_not(
    tmp_path, forkserver, wrapped
):
    answers = forkserver.SimpleQueue()
    ranks = [forkserver.Process(target=_rank, args=(rank, tmp_path, wrapped, answers)) for rank in range(2)]
    for process in ranks:
        process.start()
    (_, *first), (_, *second) = sorted((answers.get() for _ in ranks), key=lambda answer: answer[0])
    for process in ranks:
        process.join()
    assert first[0] == second[0]
    assert (first[1] == second[1]) is wrapped
    for *_, warned in (first, second):
        assert [text.partition(" so ")[0] for text in warned if "Drloc" in text] == (
            [] if wrapped else ["Drloc has parameters and runs outside of DistributedDataParallel and FSDP,"]
        )


def test_without_a_key_every_batch_is_mixed_anew():
    torch.manual_seed(0)
    step = TokenStep(model(), build_objectives({}, model()), build_mixer({"cutmix": {}}))
    images = torch.randn(4, 3, 32, 32)
    ratios = {float(step.mixed(Batch(images)).mix.ratio[0]) for _ in range(5)}
    assert len(ratios) > 3
    keyed = {float(step.mixed(Batch(images, key=StepKey(1))).mix.ratio[0]) for _ in range(3)}
    assert len(keyed) == 1

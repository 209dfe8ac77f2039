"""Released weights by their tags: found, downloaded and read by timm's own path, from a server on this machine."""

import argparse
import dataclasses
import fractions
import functools
import http.server
import threading

import pytest
import timm
import torch
from timm.models import _registry

import everytoken  # noqa: F401
from everytoken.errors import EverytokenError
from everytoken.models.weights import read_weights
from everytoken_lab.models.open import open_model, open_weights

TINY = {
    "lvvit_s": {"embed_dim": 24, "depth": 2, "num_heads": 2, "stem_width": 8},
    "t2t_vit_14": {"embed_dim": 24, "depth": 2, "num_heads": 2, "token_dim": 8},
    "t2t_vit_t_14": {"embed_dim": 24, "depth": 2, "num_heads": 2, "token_dim": 8},
}
FORMS = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "arch": "lvvit", "state_dict": state, "args": argparse.Namespace(lr=1e-3)},
    "state_dict_ema": lambda state: {
        "state_dict": {name: torch.zeros_like(value) for name, value in state.items()},
        "state_dict_ema": state,
    },
    "module": lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(folder, address): a web server, as far as a download needs one."""
    folder = tmp_path_factory.mktemp("site")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def moved(site, monkeypatch, tmp_path):
    """move(tag): let the address of a tag lead to the server; files are kept in a cache of the test's own."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def move(full_name):
        config = _registry._model_pretrained_cfgs[full_name]
        file = config.url.rpartition("/")[2]
        there = dataclasses.replace(config, url=f"{site[1]}/{file}")
        monkeypatch.setitem(_registry._model_pretrained_cfgs, full_name, there)
        monkeypatch.setitem(_registry._model_pretrained_cfgs, full_name.partition(".")[0], there)  # its default
        return site[0] / file

    return move


def trained(name, **arguments):
    """A model whose every number is its own."""
    torch.manual_seed(len(name))
    model = timm.create_model(name, **arguments)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.1, 1)
    return model.eval()


RELEASED = sorted(name for name in timm.list_pretrained() if name.startswith(("lvvit_", "t2t_vit_")))


def test_all_released_files_have_a_tag():
    names = {name.partition(".")[0] for name in RELEASED}
    assert len(RELEASED) == 18
    assert names == {"lvvit_t", "lvvit_s", "lvvit_m", "lvvit_l", *(f"t2t_vit_{n}" for n in (7, 10, 12, 14, 19, 24))} | {
        f"t2t_vit_t_{n}" for n in (14, 19, 24)
    }


@pytest.mark.parametrize("name", RELEASED)
def test_a_tag_says_what_the_weights_are(name):
    config = timm.get_pretrained_cfg(name)
    size = int(name.rpartition("_")[2]) if name.endswith(("_384", "_448", "_512")) else 224
    assert config.input_size == (3, size, size)
    assert config.url.startswith(f"{config.origin_url}/releases/download/")
    assert "lvvit" not in name or name.startswith("lvvit_t") or f"-{size}-" in config.url
    assert config.license
    assert config.paper_ids.startswith("arXiv:")
    with torch.device("meta"):
        model = timm.create_model(name, depth=1)
    assert model.pretrained_cfg["tag"] == name.partition(".")[2]
    assert model.patch_embed.img_size == (size, size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", TINY)
def test_files_of_every_released_form_come_through_timms_download(model, form, moved):
    name = f"{model}.{timm.get_pretrained_cfg(model).tag}"
    source = trained(model, **TINY[model])
    torch.save(FORMS[form](source.state_dict()), moved(name))
    for asked in (name, model):  # the plain name takes the same tag
        loaded = timm.create_model(asked, pretrained=True, **TINY[model]).eval()
        image = torch.rand(1, 3, 224, 224)
        torch.testing.assert_close(loaded(image), source(image))
        assert all(torch.equal(loaded.state_dict()[key], value) for key, value in source.state_dict().items())


def test_other_classes_sizes_and_channels_are_timms_business(moved):
    source = trained("lvvit_s", **TINY["lvvit_s"])
    torch.save(source.state_dict(), moved("lvvit_s.tl_in1k"))
    other = timm.create_model("lvvit_s", pretrained=True, num_classes=5, img_size=160, in_chans=1, **TINY["lvvit_s"])
    assert other(torch.rand(1, 1, 160, 160)).shape == (1, 5)
    assert torch.equal(other.blocks[1].mlp.fc1.weight, source.blocks[1].mlp.fc1.weight)
    assert torch.equal(other.pos_embed[:, 0], source.pos_embed[:, 0])
    torch.testing.assert_close(other.patch_embed.conv1.weight, source.patch_embed.conv1.weight.sum(1, keepdim=True))


def test_a_file_without_a_token_head_gives_a_model_without_one(moved):
    source = trained("lvvit_s", token_classes=0, **TINY["lvvit_s"])
    torch.save(source.state_dict(), moved("lvvit_s.tl_in1k"))
    assert timm.create_model("lvvit_s", pretrained=True, **TINY["lvvit_s"]).aux_head is None


def test_a_file_of_another_model_is_refused(moved):
    torch.save(trained("t2t_vit_14", **TINY["t2t_vit_14"]).state_dict(), moved("lvvit_s.tl_in1k"))
    with pytest.raises(RuntimeError, match="Missing key"):
        timm.create_model("lvvit_s", pretrained=True, **TINY["lvvit_s"])


def test_the_real_lvvit_t_opens_by_its_name_and_tells_which_weights_it_has(moved):
    source = trained("lvvit_t")
    torch.save({"state_dict": source.state_dict(), "args": argparse.Namespace()}, moved("lvvit_t.tl_in1k"))
    opened = open_model("timm:lvvit_t")
    assert opened.source == "timm:lvvit_t.tl_in1k"
    assert (opened.info.crop_pct, opened.info.img_size) == (0.9, (224, 224))
    assert opened.num_classes == 1000
    assert opened.model.uses_own_head  # as released, it has learnt the same classes
    start = timm.create_model("lvvit_t", num_classes=3, img_size=64)
    report = open_weights("timm", "lvvit_t").load(start)
    assert torch.equal(start.norm.weight, source.norm.weight)
    assert {line.split(" ")[0] for line in report.left_out} == {
        f"{head}.{part}" for head in ("head", "aux_head") for part in ("weight", "bias")
    }


def test_the_namespace_of_a_training_script_is_read_and_other_classes_are_not(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(1)}, "args": argparse.Namespace(lr=1)}, tmp_path / "a.pth")
    assert read_weights(tmp_path / "a.pth") == {"a": torch.ones(1)}
    torch.save({"state_dict": {"a": torch.ones(1)}, "args": fractions.Fraction(1, 2)}, tmp_path / "b.pth")
    with pytest.raises(EverytokenError, match="more than plain tensors"):
        read_weights(tmp_path / "b.pth")

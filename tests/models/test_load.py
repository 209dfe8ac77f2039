"""Loading whole models: other sizes, foreign weights, heads that were never trained."""

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from everytoken.errors import EverytokenError
from everytoken.mixing import MixToken
from everytoken.models import TokenModel
from everytoken.models.load import Description, classifier_size, load_model, with_own_head

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
    loaded = load_model(foreign(name, num_classes=7), architecture=name, img_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    assert loaded.description.img_size == (height, width)
    assert loaded.model(torch.zeros(1, 3, height, width)).logits.shape == (1, 7)
    again = timm.create_model(name, **loaded.description.arguments)  # its arguments make it again
    assert again(torch.zeros(1, 3, height, width)).shape == (1, 7)


def test_weights_without_a_classifier_are_refused(foreign):
    with pytest.raises(EverytokenError, match=r"head\.weight.*noise"):
        load_model(foreign("test_vit", leave_out=("head.",)), architecture="test_vit")


def test_the_number_of_classes_is_read_from_the_classifier(foreign):
    state = timm.create_model("test_vit", num_classes=7).state_dict()
    assert classifier_size("test_vit", state) == 7
    assert classifier_size("test_vit", {"blocks.0.attn.qkv.weight": torch.zeros(1)}) is None


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

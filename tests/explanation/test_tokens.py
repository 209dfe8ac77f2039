"""What tokens say: the token head's answer, or the classifier's at every cell."""

import timm
import torch

from everytoken.models import TokenModel
from everytoken_lab.explanation.model import token_probabilities

from .conftest import tiny_vit


def test_a_model_with_a_token_head_is_asked_there_and_another_by_its_classifier():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32)
    headed, plain = TokenModel(tiny_vit(), 5).eval(), TokenModel(tiny_vit()).eval()
    said, from_head = token_probabilities(headed, x)
    assert from_head
    assert said.shape == (2, 8, 8, 5)
    with torch.no_grad():
        torch.testing.assert_close(said, headed(x).token_logits.softmax(-1))
        said, from_head = token_probabilities(plain, x)
        assert not from_head
        torch.testing.assert_close(said, plain.cell_logits(x).softmax(-1))


def test_lvvit_brings_its_token_head():
    model = TokenModel(timm.create_model("lvvit_t", img_size=64, depth=1, num_classes=4), 4).eval()
    assert token_probabilities(model, torch.randn(1, 3, 64, 64))[1]

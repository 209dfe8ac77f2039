"""Inference by ONNX Runtime gives what the network gives, or the network itself is used."""

import pytest
import timm
import torch
from torch import nn

from everytoken.models import TokenModel
from everytoken_lab.annotators.annotator import CellScores
from everytoken_lab.models.onnx import faster


@pytest.fixture(scope="module", autouse=True)
def _runtime():
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "vit_nano_patch4_32", "lvvit_micro_patch4_32"])
def test_the_cells_of_a_network_are_those_of_pytorch_for_any_batch_size(name):
    torch.manual_seed(0)
    size = 32 if name.endswith("32") else 64
    network = CellScores(TokenModel(timm.create_model(name, num_classes=7))).eval()
    forward = faster(network, torch.randn(3, 3, size, size))
    assert forward is not network
    for count in (1, 5):
        images = torch.randn(count, 3, size, size).contiguous(memory_format=torch.channels_last)
        with torch.inference_mode():
            torch.testing.assert_close(forward(images), network(images), rtol=1e-3, atol=1e-4)


def test_a_network_that_was_put_into_another_module_stays_in_evaluation_mode():
    network = TokenModel(timm.create_model("test_efficientnet", num_classes=7)).eval()
    outer, images = CellScores(network), torch.randn(3, 3, 64, 64)  # a new module is in training mode
    forward = faster(outer, images)
    assert forward is not outer
    assert outer.training
    assert not any(module.training for module in network.modules())
    with torch.inference_mode():
        torch.testing.assert_close(forward(images), network.cell_logits(images), rtol=1e-3, atol=1e-4)


class Remembers(nn.Module):
    """Its graph has the number of images of the first batch in it."""

    def forward(self, images):
        return images.reshape(2, -1, 3).mean(2) if images.shape[0] == 2 else images.flatten(1)


class Fails(nn.Module):
    def forward(self, images):
        return torch.from_numpy(images.numpy() * 2) if images.sum().item() else images


@pytest.mark.parametrize("network", [Remembers(), Fails()])
def test_a_network_that_cannot_be_exported_is_used_as_it_is(network):
    assert faster(network.eval(), torch.ones(3, 3, 4, 4)) is network

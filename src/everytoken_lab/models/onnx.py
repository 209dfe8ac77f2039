"""A classifier in an ONNX file that `export` wrote, run by onnxruntime; it answers like any other token model.

The file's metadata hold the description that weights written here have: classes, size, normalisation, calibration. Its
outputs are `logits` [B, K] and, if it was exported with them, `cells` [B, h, w, C]. There are no gradients, so what
needs them (training, attribution, attacks) cannot use it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError
from everytoken.mixing.mix import Mix
from everytoken.models.token_model import TokenModel, TokenView
from everytoken_lab.models.inference import open_session


class OnnxModel(TokenModel):
    """An ONNX file with the calls of a `TokenModel`.

    Attributes:
        metadata: of the file.
        size: (height, width) of its input.
        num_classes: outputs of its class head.
    """

    def __init__(self, path: Path) -> None:
        nn.Module.__init__(self)
        try:
            self.session = open_session(str(path))
        except EverytokenError:  # it is not installed
            raise
        except Exception as error:  # onnxruntime's errors have no common class
            raise EverytokenError(f"{path} is not a readable ONNX file: {str(error).splitlines()[0]}") from error
        self.metadata = dict(self.session.get_modelmeta().custom_metadata_map)
        shapes = {value.name: value.shape for value in (*self.session.get_inputs(), *self.session.get_outputs())}
        if not {"images", "logits"} <= set(shapes):
            raise EverytokenError(
                f"{path} was not exported by everytoken: it has {', '.join(shapes)} instead of images and logits."
            )
        self.source = str(path)
        self.size = (int(shapes["images"][2]), int(shapes["images"][3]))
        self.num_classes = int(shapes["logits"][1])
        self.outputs = [name for name in ("logits", "cells") if name in shapes]
        self.backbone = nn.Identity()
        self.token_head, self.aligner, self.uses_own_head = None, None, False
        self.empty = nn.Parameter(torch.empty(0), requires_grad=False)  # says which device images should be on

    def forward(self, images: Tensor, mix: Mix | None = None) -> TokenView:
        """Images [B, 3, H, W] -> TokenView without token features."""
        logits, *cells = self._run(images)
        height, width = cells[0].shape[1:3] if cells else (0, 0)
        return TokenView(
            logits, images.new_zeros(len(images), height, width, 0), token_logits=cells[0] if cells else None
        )

    def class_and_cell_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """See `TokenModel.class_and_cell_logits`."""
        if "cells" not in self.outputs:
            raise EverytokenError(f"{self.source} answers for whole images only. Export it with cells=True.")
        logits, cells = self._run(images)
        return logits, cells

    def cell_logits(self, images: Tensor) -> Tensor:
        """See `TokenModel.cell_logits`."""
        return self.class_and_cell_logits(images)[1]

    def _run(self, images: Tensor) -> list[Tensor]:
        arrays = self.session.run(self.outputs, {"images": images.detach().float().cpu().numpy()})
        return [torch.from_numpy(array).to(images.device) for array in arrays]

"""ONNX: networks written to it, run by ONNX Runtime, and files that `export` wrote opened like any other token model.

    forward = faster(module, images)      # images: an example batch
    logits = forward(images)              # the same as module(images), within 1e-3

On the CPU, convolutional networks run two to four times as fast as in PyTorch's eager mode, transformers no faster
(benchmarks/inference.py). There are no gradients, so training, attribution and attacks cannot use it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.errors import EverytokenError, need, no_telemetry
from everytoken.files import read_bytes
from everytoken.mixing.mix import Mix
from everytoken.models.token_model import TokenModel, TokenView

log = logging.getLogger(__name__)
_TOLERANCE = 1e-3  # of the largest logit
_LARGEST = 1 << 20  # side of an image, or number of classes


def faster(module: nn.Module, example: Tensor) -> Callable[[Tensor], Tensor]:
    """A faster `module.forward` for inference, or the module itself.

    Args:
        module: in evaluation mode; images [B, 3, H, W] -> one tensor whose first dimension is B.
        example: at least three images of the size that will come; later batches may have any number of them.
    """
    installed = importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx")
    if example.device.type != "cpu" or not installed:
        return module
    try:
        session = open_session(export_onnx(module, example[:2]))

        def forward(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run(None, {"images": images.contiguous().numpy()})[0])

        with torch.inference_mode():
            expected, answer = module(example), forward(example)
        torch.testing.assert_close(answer, expected, rtol=0, atol=_TOLERANCE * float(expected.abs().max()))
    except Exception as error:  # an operator without a translation, a graph that depends on the data
        log.debug("ONNX Runtime is not used: %s: %s", type(error).__name__, error)
        return module
    return forward


def open_session(model: bytes | str) -> Any:
    """An ONNX Runtime session on the CPU with as many threads as torch, of a file or its content."""
    onnxruntime: Any = need("onnxruntime", "export", "an ONNX file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # it prints names that are in the file; what is wrong is raised
    return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])


def export_onnx(module: nn.Module, example: Tensor, outputs: Sequence[str] = ("logits",)) -> bytes:
    """The module as an ONNX file with one input, `images`, of any batch size, and `outputs`.

    Torch's older exporter, where it still exists, takes a second for a network for which the new one takes ten.
    """
    no_telemetry()  # torch's exporter imports onnxruntime
    content: Any = io.BytesIO()  # torch says it takes a path, and takes this too
    modes = {part: part.training for part in module.modules()}
    module.eval()  # otherwise torch would leave all parts in the mode of the outermost module
    axes = {name: {0: "batch"} for name in ("images", *outputs)}
    how: dict[str, Any] = {"input_names": ["images"], "output_names": list(outputs)}
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        try:
            torch.onnx.export(module, (example.clone(),), content, dynamo=False, dynamic_axes=axes, **how)
        except Exception:
            how |= {"dynamic_shapes": ({0: torch.export.Dim("batch")},), "verbose": False}
            program: Any = torch.onnx.export(module, (example.clone(),), dynamo=True, **how)
            return bytes(program.model_proto.SerializeToString())
        finally:
            for part, training in modes.items():
                part.training = training
    return bytes(content.getvalue())


def sealed(program: bytes) -> bytes:
    """An ONNX file with one more entry of metadata at its end, the SHA-256 of what is before it."""
    entry = b"\n\x06sha256\x12\x40" + hashlib.sha256(program).hexdigest().encode()  # StringStringEntryProto
    return program + bytes((14 << 3 | 2, len(entry))) + entry  # field 14 of ModelProto is repeated


def read_sealed(path: Path) -> bytes:
    """An ONNX file of `export`, if it is as it was written. One with a loop, which might not end, was not."""
    content = read_bytes(path)
    if content != sealed(content[: -len(sealed(b""))]):
        raise EverytokenError(f"{path} is damaged, or `everytoken export` did not write it. Export it again.")
    if b"\x22\x04Loop" in content or b"\x22\x04Scan" in content:  # op_type, field 4 of NodeProto
        raise EverytokenError(f"{path} has loops, which no model has that everytoken exports.")
    return content


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
            self.session = open_session(read_sealed(path))
        except EverytokenError:  # it is not installed
            raise
        except Exception as error:  # onnxruntime's errors have no common class
            raise EverytokenError(f"{path} is not a readable ONNX file: {str(error).splitlines()[0]}") from error
        self.metadata = dict(self.session.get_modelmeta().custom_metadata_map)
        shapes = {value.name: value.shape for value in (*self.session.get_inputs(), *self.session.get_outputs())}
        if not {"images", "logits"} <= set(shapes):
            found = f"it has {', '.join(shapes)} instead of images and logits"
            raise EverytokenError(f"{path} was not exported by everytoken: {found}.")
        self.source, self.outputs = str(path), [name for name in ("logits", "cells") if name in shapes]
        sides = [*shapes["images"][1:], *shapes["logits"][1:]]
        if not all(isinstance(side, int) and 0 < side <= _LARGEST for side in sides) or len(sides) != 4:
            raise EverytokenError(f"{path} was not exported by everytoken: its images or logits have other shapes.")
        self.size, self.num_classes = (sides[1], sides[2]), sides[3]
        self.backbone = nn.Identity()
        self.token_head, self.aligner, self.uses_own_head = None, None, False
        self.empty = nn.Parameter(torch.empty(0), requires_grad=False)  # says which device images should be on

    def forward(self, images: Tensor, mix: Mix | None = None) -> TokenView:
        """Images [B, 3, H, W] -> TokenView without token features."""
        logits, *cells = self._run(images)
        features = images.new_zeros(len(images), *(cells[0].shape[1:3] if cells else (0, 0)), 0)
        return TokenView(logits, features, token_logits=cells[0] if cells else None)

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
        try:
            arrays = self.session.run(self.outputs, {"images": images.detach().float().cpu().numpy()})
            tensors = [torch.from_numpy(array).to(images.device) for array in arrays]
        except Exception as error:  # onnxruntime's errors have no common class
            raise EverytokenError(f"{self.source} cannot be run: {' '.join(str(error).split())[:200]}") from error
        ranks = [tensor.ndim for tensor in tensors]
        if tensors[0].shape != (len(images), self.num_classes) or ranks != [2, 4][: len(ranks)]:
            raise EverytokenError(f"{self.source} answers with other shapes than it says. Export it again.")
        return tensors

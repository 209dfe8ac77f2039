"""ONNX: networks written to it and run by ONNX Runtime.

    forward = faster(module, images)      # images: an example batch
    logits = forward(images)              # the same as module(images), within 1e-3

On the CPU, convolutional networks run two to four times as fast as in PyTorch's eager mode, transformers no faster
(benchmarks/inference.py). There are no gradients, so training, attribution and attacks cannot use it.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn

from everytoken.errors import need, no_telemetry

log = logging.getLogger(__name__)
_TOLERANCE = 1e-3  # of the largest logit


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
    options.log_severity_level = 4  # what is wrong is raised
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

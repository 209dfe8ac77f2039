"""Annotators by name: `timm:NAME`, `registry:NAME`, `self:RUN`, `python:module:function`; `fit` is in its own file."""

from __future__ import annotations

from collections.abc import Callable

from everytoken.annotators.annotator import Annotator, AnnotatorError
from everytoken.annotators.networks import from_registry, from_run, from_timm
from everytoken.annotators.own_function import from_python
from everytoken.errors import did_you_mean

Builder = Callable[[str, tuple[int, int] | None, str], Annotator]

ANNOTATORS: dict[str, Builder] = {
    "timm": from_timm,
    "registry": from_registry,
    "self": from_run,
    "python": from_python,
}
KINDS = (
    "timm:NAME (any timm classifier), registry:efficientnet_lite0|1|2 (ImageNet weights from the package index), fit "
    "(train one on this data set), self:RUN (the token head of a model trained here), python:module:function"
)


def build_annotator(spec: str, size: tuple[int, int] | None = None, checkpoint: str = "") -> Annotator:
    """The annotator that `spec` names.

    Args:
        spec: kind and name, with a colon between.
        size: (height, width) of its input; None: its own.
        checkpoint: weights file or run folder, for `timm:`.
    """
    kind, _, name = spec.partition(":")
    if kind not in ANNOTATORS:
        near = did_you_mean(kind, [*ANNOTATORS, "fit"])
        raise AnnotatorError(f"there is no annotator {spec!r}.{near} There are: {KINDS}.")
    if not name:
        raise AnnotatorError(f"--annotator {kind}: needs a name after the colon. There are: {KINDS}.")
    return ANNOTATORS[kind](name, size, checkpoint)

"""`everytoken export`: a model as others use it."""

from __future__ import annotations

from dataclasses import dataclass

from everytoken_lab.cli._parse import Source, check_source, values_of
from everytoken_lab.evaluation import ExportOptions
from everytoken_lab.schema import say
from everytoken_lab.terminal import print_notes


@dataclass(frozen=True, kw_only=True)
class ExportCommand(ExportOptions):
    """Write a folder that others use without this package: for timm and the Hugging Face Hub, or ONNX.

    Every file is compared with the model on images that the run held out before it takes its place, and a model card
    says what the model was trained on, its result, and how to use it.

    Examples:
        everytoken export runs/first
        everytoken export runs/first --to timm onnx --out flowers
        everytoken export runs/first --to hf --out flowers --license apache-2.0
        everytoken export registry:efficientnet_lite0 --to onnx --cells
    """

    source: Source
    out: str = ""
    """The folder to write; default: `export` in the run."""


def main(options: ExportCommand) -> None:
    check_source(options.source)
    from everytoken_lab.evaluation.exporting import export

    result = export(options.source, options.out or None, **values_of(options, ExportOptions))
    print_notes(result.notes)
    for name, difference in result.differences.items():
        say(f"{result.folder / name}: differs by {difference:.1e} from the model, on {result.checked_on}")
    say(f"{result.folder / 'README.md'}: the model card")

"""`everytoken explain`: pictures of what a model sees."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from everytoken.cli._parse import parse
from everytoken.cli.labels_files import read_names
from everytoken.errors import EverytokenError


@dataclass(frozen=True)
class Explain:
    """Draw what a model sees in images: what its tokens say, and which places speak for which class.

    Examples:
        everytoken explain runs/first photos/val/cat/1.jpg photos/val/dog/7.jpg --out seen
        everytoken explain runs/first photos/train/cat/*.jpg --labels maps --out seen
        everytoken explain runs/first cat.jpg --compare runs/plain --class cat --class dog --out seen
        everytoken explain registry:efficientnet_lite0 cat.jpg --out seen
        everytoken explain runs/first cat.jpg dog.jpg --mix --out seen
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder, a weights file, timm:NAME (pretrained weights) or registry:efficientnet_lite0|1|2."""
    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE ...")]
    """Image files."""
    out: Path
    """Folder for the pictures and explain.json."""
    class_: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="class", metavar="NAME|INDEX")
    ] = ()
    """A class to explain; can be given several times. Default: the two that the model finds most likely."""
    method: Literal["auto", "attention", "rollout", "cam"] = "auto"
    """attention: gradient-weighted attention relevance. rollout: attention rollout. cam: Grad-CAM. auto: attention for
    transformers with a class token, else cam."""
    labels: Path | None = None
    """A store of score maps: the annotator's map beside what the tokens say, and where they differ."""
    compare: str = ""
    """Another model, to stand beside the first on the same images and classes."""
    mix: bool = False
    """Mix the two images given (a box of the second in the first) and follow the labels through the model."""
    mix_part: float = 0.4
    """mix: the second image's part of the area."""
    seed: int = 0
    """mix: where the box lies."""
    model: str = ""
    """timm model name, for weights that do not say it themselves."""
    checkpoint: str = ""
    """With timm:NAME: own weights instead of pretrained ones."""
    compare_checkpoint: str = ""
    """The same for --compare timm:NAME."""
    untrained: bool = False
    """With timm:NAME: random weights, to see that a method works; the pictures say so."""
    img_size: int = 0
    """Another input size; position embeddings are resized. 0: the model's own."""
    names: Path | None = None
    """Text file with one class name per line, for weights that do not know them."""
    device: str = ""
    """cpu, cuda, mps; default: the best there is."""


def main(argv: list[str], prog: str) -> int:
    """Parse, explain, print the names of the files."""
    options = parse(Explain, prog, argv)
    from everytoken.engine.distributed import pick_device
    from everytoken.explanation.run import Wanted, explain_images, explain_mix
    from everytoken.explanation.subject import load_subject
    from everytoken.maps import Maps

    device, names = pick_device(options.device), read_names(options.names)
    sources = [(options.source, options.checkpoint, options.model)]
    if options.compare:
        sources.append((options.compare, options.compare_checkpoint, ""))
    if options.untrained and not any(source.startswith("timm:") for source, _, _ in sources):
        raise EverytokenError(f"--untrained goes with timm:NAME; {options.source} brings its weights.")
    subjects = [
        load_subject(
            source, checkpoint, model, options.img_size, names, options.untrained and source.startswith("timm:"), device
        )
        for source, checkpoint, model in sources
    ]
    for subject in subjects:
        if subject.remark:
            print(f"{subject.name}: {subject.remark}", file=sys.stderr)
    if options.mix:
        written = explain_mix(subjects, options.images, options.out, options.mix_part, options.seed)
    else:
        store = None if options.labels is None else Maps(options.labels, partial=True)
        wanted = Wanted(options.class_, options.method, store)
        written = explain_images(subjects, options.images, options.out, wanted)
    for path in written:
        print(path)
    return 0

"""Prints the table of timm's modules in models.md: python docs/make_models_table.py (a test compares it, see there)."""

import re

import timm
import torch
from timm.models import model_entrypoint

from everytoken.models import FAMILIES, TokenModel, UnsupportedModelError, family_of_name
from everytoken.models.families import NO_GRID

HEADER = "| module of timm | names | token view | MixToken | TL-Align |\n|---|---|---|---|---|"


def modules() -> dict[str, list[str]]:
    """Module -> its models, the modules with most models first."""
    found: dict[str, list[str]] = {}
    for name in timm.list_models():
        entry = model_entrypoint(name).__module__
        if entry.startswith("timm."):
            found.setdefault(entry.rsplit(".", 1)[-1], []).append(name)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), item[0])))


def known(module: str, names: list[str]) -> str:
    """The columns that need no model."""
    family = FAMILIES.get(module)
    if family is None:
        return f"| `{module}` | {len(names)} | no: {NO_GRID.get(module, 'nobody has described its layout yet')} |"
    mixes = "yes" if family.embed else "no"
    return f"| `{module}` | {len(names)} | {family.title} | {mixes} |"


def aligned(names: list[str]) -> str:
    """TL-Align of up to three of the module's models, built without weights."""
    answers = []
    for name in names[:: -(-len(names) // 3)]:
        try:
            with torch.device("meta"):
                TokenModel(timm.create_model(name)).align()
            answers.append("yes")
        except UnsupportedModelError as error:
            layer = re.search(r"does not know (?:how|where) (\w+)", str(error))
            answers.append(f"no rule for `{layer[1]}`" if layer else f"no: {error}")
    count = answers.count("yes")
    if count in (0, len(answers)):
        return answers[0]
    return f"{count} of {len(answers)}"


def main() -> None:
    print(HEADER)
    for module, names in modules().items():
        row = known(module, names)
        print(f"{row} {aligned(names)} |" if module in FAMILIES else f"{row} no | no |", flush=True)
    every = [name for names in modules().values() for name in names]
    print(f"\n{sum(family_of_name(name) is not None for name in every):,} of timm's {len(every):,} names.")


if __name__ == "__main__":
    main()

"""Write the reference: the API from its docstrings, the commands from their parsers, the recipes from their headers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pkgutil
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import everytoken
import everytoken_lab
from everytoken import functional
from everytoken_lab import cli
from everytoken_lab.engine.recipe import header, recipe_names, recipe_text

GROUPS = {  # title: packages that the names come from
    "Models": ("models",),
    "Objectives": ("objectives", "step", "timm_task"),
    "Mixing": ("mixing",),
    "Score maps and batches": ("maps", "data", "functional"),
    "Errors": ("errors",),
}
RECIPES = {  # title: beginnings of names; the first that fits
    "Small data": ("small_",),
    "Fine-tuning": ("finetune", "transfer_"),
    "Segmentation": ("segment_",),
    "Detection": ("detect_",),
    "ImageNet, from scratch": ("",),
}


def write(folder: Path) -> None:
    """Make the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "commands").mkdir(parents=True)
    (folder / "api.rst").write_text(api(), encoding="utf-8")
    (folder / "functional.rst").write_text(functions(), encoding="utf-8")
    (folder / "recipes.md").write_text(recipes(), encoding="utf-8")
    (folder / "commands.md").write_text(commands(), encoding="utf-8")
    for name, what in cli.COMMANDS.items():
        text = "\n".join(command_page(name, what))
        (folder / "commands" / f"{name}.md").write_text(text, encoding="utf-8")


# --- the API


def api() -> str:
    """The stable names, by what they are for."""
    names = [name for name in everytoken.__all__ if name != "__version__"]
    lines = [_title("Python API"), _rst(everytoken.__doc__), ""]
    for title, packages in GROUPS.items():
        lines += [_title(title, "-")]
        for name in list(names):
            home = getattr(everytoken, name).__module__.removeprefix("everytoken.")
            if any(home == package or home.startswith(f"{package}.") for package in packages):
                names.remove(name)
                lines += _documented("everytoken", name)
    lines += [_title("Commands as functions: everytoken_lab", "-")]
    lines += [line for name in everytoken_lab.__all__ for line in _documented("everytoken_lab", name)]
    if names:
        raise ValueError(f"docs/make_reference.py puts these names into no group: {names}")
    return "\n".join(lines)


def functions() -> str:
    """Every function and class of everytoken.functional, by module."""
    lines = [_title("everytoken.functional"), _rst(functional.__doc__), ""]
    for info in pkgutil.iter_modules(functional.__path__):
        path = f"everytoken.functional.{info.name}"
        module = vars(importlib.import_module(path))
        names = [
            name for name, value in module.items() if getattr(value, "__module__", None) == path and name[0] != "_"
        ]
        lines += [_title(info.name, "-")]
        lines += [line for name in names for line in _documented(path, name)]
    return "\n".join(lines)


def _documented(module: str, name: str) -> list[str]:
    kind = "class" if inspect.isclass(getattr(importlib.import_module(module), name)) else "function"
    members = ["   :members:", "   :undoc-members:"] if kind == "class" else []
    return [f".. auto{kind}:: {module}.{name}", *members, ""]


def _title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n"


def _rst(doc: str | None) -> str:
    """A module's docstring, without its first line."""
    lines = inspect.cleandoc(doc or "").splitlines()
    prepare_docstring(None, "module", "", None, None, lines)
    return "\n".join(lines)


def prepare_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show indented code as code: after a paragraph, and under "Example:" where there is no prompt."""
    done: list[str] = []
    for i, line in enumerate(lines):
        after = next((other for other in lines[i + 1 :] if other), "")
        indented = after.startswith("    ")
        if line in ("Example:", "Examples:") and indented and not after.lstrip().startswith((">>>", "- ")):
            done += [f"{line}:", ""]
            continue
        paragraph = line and not line.startswith(" ") and i + 1 < len(lines) and not lines[i + 1]
        done.append(line)
        if paragraph and indented and not line.endswith("::"):
            done += ["", "::"]
    lines[:] = done


# --- the commands


def commands() -> str:
    """The page above the pages of the commands."""
    lines = ["# Commands", ""]
    for title, group in cli.GROUPS.items():
        rows = [f"| [`everytoken {name}`](commands/{name}.md) | {_markdown(what)} |" for name, what in group.items()]
        lines += [f"| {title} | |", "|---|---|", *rows, ""]
    toc = ["```{toctree}", ":hidden:", *(f"commands/{name}" for name in cli.COMMANDS), "```"]
    return "\n".join([*lines, *toc, ""])


def command_page(name: str, what: str) -> Iterator[str]:
    """A command, or the commands that it has."""
    yield f"# everytoken {name}\n"
    yield f"{_markdown(what[0].upper() + what[1:])}.\n"
    for words in cli.options_of_commands():
        if words.split()[0] == name:
            yield f"## everytoken {words}\n" if words != name else ""
            yield f"```text\n{help_of(words)}\n```\n"


def help_of(words: str) -> str:
    """What `everytoken WORDS --help` prints, 100 columns wide."""
    text = io.StringIO()
    width = mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1")
    with width, contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        cli.main([*words.split(), "--help"])
    return text.getvalue().strip()


def _markdown(text: str) -> str:
    """Plain text: what Markdown would take for its own is escaped, code in backticks stays."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if i % 2 else re.sub(r"([\\*_<>\[\]|{}$~#])", r"\\\1", part) for i, part in enumerate(parts))


# --- the recipes


def recipes() -> str:
    """All recipes in full, with what their headers say."""
    names = recipe_names()
    lines = [
        "# Recipes",
        "",
        "A recipe is a YAML file that names model, data handling, objectives and schedule. `everytoken train DATA",
        "--recipe NAME` uses it, a flag overrides one of its values, and `everytoken recipes NAME > mine.yaml` makes a",
        "copy to edit.",
        'What a header calls "expected" is the paper\'s number unless it says that it was run by us.',
        "",
    ]
    for title, beginnings in RECIPES.items():
        chosen = [name for name in names if name.startswith(beginnings)]
        names = [name for name in names if name not in chosen]
        lines += [f"## {title}", ""]
        for name in chosen:
            settings = recipe_text(name).split("\n\n", 1)[-1].strip()
            head = "\n".join(f"- {_markdown(line.lstrip('# '))}" for line in header(name).splitlines())
            lines += [f"### {name}", "", head, "", "```yaml", settings, "```", ""]
    return "\n".join(lines)

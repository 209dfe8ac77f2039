"""The command line. One short file per command: a dataclass of options, whose docstrings are the help, and a function.

`everytoken --help` imports nothing heavy; a command's module is imported when the command is called.
To add a command, add a line to GROUPS and a module of that name with ``main(options) -> int | None``; a module with
commands of its own has `COMMANDS`, functions by name, in its place.
"""

from __future__ import annotations

import importlib
import inspect
import io
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everytoken.errors import EverytokenError, did_you_mean, install_command, no_telemetry
from everytoken.files import disk_error
from everytoken_lab.schema import say

GROUPS: dict[str, dict[str, str]] = {  # in the order of use
    "Begin": {
        "demo": "see it work on real images in a few minutes",
        "doctor": "find problems in images, labels and this machine before training",
    },
    "Train": {
        "train": "train a classifier on every token, from scratch or from trained weights",
        "annotate": "give every image of a dataset a score map: labels for every cell",
        "maps": "look at, check, import and export stores of score maps",
        "recipes": "list and print recipes",
        "models": "list the supported backbones; of one: parameters, multiply-adds, token grid, throughput here",
    },
    "Use": {
        "eval": "accuracy of a trained model, with a table of classes",
        "predict": "predict the classes of unlabelled images, and where the objects are",
        "export": "write a model for timm and the Hugging Face Hub or ONNX, with a model card",
    },
    "Understand": {
        "report": "one page about runs: result, comparison, curves, classes, sample predictions",
        "explain": "pictures of what a model sees: its tokens, the regions that support a class, mixed images",
        "robust": "one table of shifted data, corruptions and attacks; two models compared",
        "transfer": "fine-tune on several datasets (CIFAR, Flowers, Cars, your own) and tabulate",
    },
    "Other tasks": {
        "segment": "train, evaluate and use segmenters: a class for every pixel",
        "detect": "train, evaluate and use detectors: boxes and masks of objects",
    },
}
COMMANDS = {name: what for group in GROUPS.values() for name, what in group.items()}
_NO_MEMORY = re.compile("can't allocate memory|start new thread|bad_alloc|failed to map")  # of torch, Python and Linux
EXAMPLES = (
    "everytoken train photos                 # one folder per class; everything else is decided",
    "everytoken predict runs/photos new.jpg  # what is it?",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    if argv is None:
        signal.signal(signal.SIGINT, _interrupt)
    argv = list(sys.argv[1:] if argv is None else argv)
    show_log()
    no_telemetry()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files need not be Unicode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from everytoken_lab.machine import keep_freed_memory

        keep_freed_memory()
        if argv[:1] in (["-V"], ["--version"]):
            from everytoken import __version__

            say(f"everytoken {__version__}")
            return 0
        name = _choose("everytoken", GROUPS, argv, EXAMPLES)
        return (_run_module(name, argv[1:], f"everytoken {name}") if name else 0) or 0
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # `everytoken models | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if signal.getsignal(signal.SIGINT) is _leave:  # some packages turn Ctrl-C into an error of their own
            return _interrupted()
        told = _told(error)
        if told is None:
            raise
        code: int | None = getattr(told, "exit_code", None)
        if code is not None:  # a run that was asked to stop, and has said so
            return code
        say(f"everytoken: {told}", file=sys.stderr)
        return 2


def _interrupt(*_: object) -> None:
    """Ctrl-C; a second one does not wait until everything is put away. (Processes of loaders end by themselves.)"""
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


def _leave(*_: object) -> None:
    os._exit(130)


def _interrupted() -> int:
    say("everytoken: interrupted", file=sys.stderr)
    return 130


def _told(error: Exception) -> EverytokenError | None:
    """An error for people, also of what the machine refuses: a full disk, memory, a missing package; None: a bug."""
    if isinstance(error, EverytokenError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return disk_error(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return EverytokenError("out of memory. Use a smaller --batch-size, fewer --workers, or a machine with more.")
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("everytoken"):
        return EverytokenError(f"{error.name} is not installed. Install: {install_command('lab')}")
    loader = sys.modules.get("everytoken_lab.data.loader")
    if loader is not None and isinstance(error, RuntimeError):  # torch's, when a process of the loader dies
        told: EverytokenError | None = loader.worker_error(error)
        return told
    return None


def show_log() -> None:
    """Print what the library logs, as plain lines; warnings go to stderr. Once per process."""
    for log in map(logging.getLogger, ("everytoken", "everytoken_lab")):
        if not any(isinstance(handler, _Lines) for handler in log.handlers):
            log.addHandler(_Lines())
            log.setLevel(logging.INFO)


class _Lines(logging.Handler):
    """Prints to whatever stdout and stderr are at that moment, so that redirected output gets the lines too."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        say(self.format(record), file=stream)


def _functions(name: str) -> dict[str, Callable[[Any], int | None]]:
    """The functions of a command by the word that follows its name; "" where none does."""
    module = importlib.import_module(f"everytoken_lab.cli.{name}")
    return module.COMMANDS if hasattr(module, "COMMANDS") else {"": module.main}


def _run_module(name: str, argv: list[str], prog: str) -> int | None:
    from everytoken_lab.cli._parse import call, examples, options_of

    functions = _functions(name)
    if "" in functions:
        return call(functions[""], argv, prog)
    configs = {word: options_of(function) for word, function in functions.items()}
    about = {word: (inspect.getdoc(config) or "").splitlines()[0] for word, config in configs.items()}
    word = _choose(prog, {"": about}, argv, [examples(config)[0] for config in configs.values()])
    return call(functions[word], argv[1:], f"{prog} {word}") if word else 0


def _choose(prog: str, groups: Mapping[str, Mapping[str, str]], argv: list[str], examples: Sequence[str]) -> str:
    """The command that the first word names; "" where the list of commands was printed instead."""
    name = (argv or ["--help"])[0]
    if name in ("-h", "--help", "help"):
        say(_overview(prog, groups, examples))
        return ""
    commands = [command for group in groups.values() for command in group]
    if name not in commands:
        raise EverytokenError(f"no command '{prog} {name}'.{did_you_mean(name, commands)} See `{prog} --help`.")
    return name


def options_of_commands() -> dict[str, type]:
    """ "train", "maps info" and so on -> the dataclass of the command's options."""
    from everytoken_lab.cli._parse import options_of

    found = ((name, word, function) for name in COMMANDS for word, function in _functions(name).items())
    return {f"{name} {word}".strip(): options_of(function) for name, word, function in found}


def _overview(prog: str, groups: Mapping[str, Mapping[str, str]], examples: Sequence[str]) -> str:
    width = max(len(name) for group in groups.values() for name in group)
    lines = [f"usage: {prog} COMMAND [OPTIONS]", "", *(f"  {line}" for line in examples), ""]
    for title, group in groups.items():
        lines += [title] if title else []
        lines += [*(f"  {name:<{width}}  {what}" for name, what in group.items()), ""]
    lines += [f"`{prog} COMMAND --help` explains a command, with examples."]
    if prog == "everytoken":
        lines = ["Train image classifiers on folders of photos, and vision transformers on every token.", "", *lines]
    return "\n".join(lines)

"""The front door: help, versions, wrong words."""

import errno
import json
import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest

from everytoken_lab.cli import COMMANDS, main, options_of_commands
from everytoken_lab.cli._parse import _options, parse
from everytoken_lab.cli.eval import EvalCommand


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"\n  {command} " in out


@pytest.mark.parametrize(("name", "config"), options_of_commands().items())
def test_help_begins_with_examples_and_explains_every_option(name, config, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: everytoken {name}")
    assert lines[2] == "Examples:"
    assert lines[3].startswith(f"    everytoken {name}")
    assert all(len(line) <= 100 for line in lines if not line.startswith("    "))
    assert all(any(f"--{flag}" in line for line in lines) for flag, _ in _options(config))
    assert not any(f"(default: {os.getcwd()}" in line for line in lines)


def test_no_help_imports_torch_or_timm():
    code = (
        "import contextlib, sys\n"
        "from everytoken_lab.cli import main, options_of_commands\n"
        "for name in options_of_commands():\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main([*name.split(), '--help'])\n"
        "    print(name, *({'torch', 'timm'} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == list(options_of_commands())


def test_without_the_hook_tyro_itself_says_what_is_wrong():
    code = "import sys, tyro._errors\nsys.modules['tyro._errors'] = None\n"
    code += "from everytoken_lab.cli import main\nsys.exit(main(['recipes', '--nonsensical']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--nonsensical" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["eval"], ["predict", "a.jpg"], ["export"]])
def test_a_missing_model_is_named_before_torch_is_imported(words):
    code = (
        "import sys; from everytoken_lab.cli import main\n"
        f"print(main([{words[0]!r}, 'nowhere', *{words[1:]!r}]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr == "everytoken: there is no run folder or weights file at nowhere\n"


def test_help_shows_the_values_of_the_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--recipe", "small_96", "--help"])
    assert "lvvit_pico_patch8_96" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval"], "MODEL must be given, as in: everytoken eval runs/photos"),
        (["annotate", "photos"], "--out and --annotator must be given, as in: everytoken annotate photos --out maps"),
        (["annotate", "photos", "--out", "maps"], "--annotator must be given"),
        (["annotate", "--resize", "big"], "--resize must be one of squash, letterbox, center, got 'big'"),
        (["eval", "a", "b", "-b", "x"], "--batch-size must be an integer, got 'x'"),
        (["train", "a", "--lr", "high"], "--lr must be a number, got 'high'"),
        (["train", "a", "--epochs=ten"], "--epochs must be an integer, got 'ten'"),
        (["train", "photos", "more"], "unrecognized: more"),
        (["train", "--epochs"], "--epochs needs a value"),
        (["models", "lvvit_t", "--img-sise", "64"], "unrecognized option --img-sise. Did you mean '--img-size'"),
        (["train", "photos", "--wieghts", "3"], "unrecognized option --wieghts. Did you mean '--weights'"),
        (["train", "photos", "--image_size", "3"], "unrecognized option --image-size. Did you mean '--img-size'"),
        (["modles"], "Did you mean 'models'"),
        (["recipes", "smal_96"], "Did you mean 'small_96'"),
        (["models", "lvvit_x"], "Did you mean 'lvvit'"),
        (["models", "crossvit_tiny_240", "--seconds", "0"], "no token view"),
        (["models", "lvvit_t", "--seconds", "0", "--set", "dpeth=2"], "dpeth"),
    ],
)
def test_what_is_wrong_with_the_words_is_one_sentence(words, sentence, capsys):
    assert main(words) == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "amp"), [([], None), (["--amp"], True), (["--no-amp"], False), (["--amp", "False"], False)]
)
def test_a_switch_that_may_be_left_open_can_be_turned_on_and_off(words, amp):
    assert parse(EvalCommand, "everytoken eval", ["model", *words]).amp is amp


def test_python_dash_m_works_and_prints_the_version():
    done = subprocess.run(
        [sys.executable, "-m", "everytoken_lab", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("everytoken ")


def test_recipes_are_listed_filtered_and_printed(capsys, tmp_path):
    assert main(["recipes"]) == 0
    everything = capsys.readouterr().out
    assert "lvvit_s_token" in everything
    assert main(["recipes", "small*"]) == 0
    some = capsys.readouterr().out
    assert "small_96_token" in some
    assert "lvvit_s_token" not in some
    assert main(["recipes", "small_96"]) == 0
    text = capsys.readouterr().out
    assert "\nmodel:" in text
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["recipes", str(tmp_path / "mine.yaml")]) == 0
    assert capsys.readouterr().out == text


def test_models_lists_families_and_names(capsys):
    assert main(["models"]) == 0
    assert "LV-ViT" in capsys.readouterr().out
    assert main(["models", "lvvit"]) == 0
    assert {"lvvit_t", "lvvit_s", "lvvit_m", "lvvit_l"} <= set(capsys.readouterr().out.split())
    assert main(["models", "*_32"]) == 0
    assert {"vit_nano_patch4_32", "lvvit_micro_patch4_32"} <= set(capsys.readouterr().out.split())


def test_model_prints_what_it_costs(capsys):
    assert (
        main(["models", "lvvit_t", "--json", "--batch-size", "1", "--seconds", "0.01", "--img-size", "64", "96"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert facts["token grid"] == "4 x 6"
    assert facts["prefix tokens"] == 1
    assert any(key.startswith("training on") for key in facts)


def test_model_takes_arguments_of_the_architecture(capsys):
    words = ["models", "lvvit_t", "--seconds", "0", "--img-size", "64", "--set", "num_classes=10", "--json"]
    sizes = ["--set", "depth=2", "--set", "stem_kernels=[16]", "--set", "stem_strides=[16]", "--set", "token_classes=0"]
    assert main([*words, *sizes]) == 0
    facts = json.loads(capsys.readouterr().out)
    blocks = 2 * (4 * 240**2 + 240 + 2 * 3 * 240**2 + 4 * 240 + 4 * 240)
    outside = 3 * 16**2 * 240 + 240 + 240 + 17 * 240 + 2 * 240 + 240 * 10 + 10
    assert facts["parameters"] == blocks + outside
    assert facts["brings a token head"] == "no"


def test_what_the_machine_refuses_is_one_sentence(monkeypatch, capsys):
    for error, text in (
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "no space left"),
        (OSError(errno.EMFILE, "Too many open files"), "ulimit"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "/x/y"),
        (MemoryError(), "memory"),
    ):
        monkeypatch.setattr("everytoken_lab.cli._run_module", Mock(side_effect=error))
        assert main(["train", "x"]) == 2
        message = capsys.readouterr().err.strip()
        assert text in message
        assert len(message.splitlines()) <= 2
    monkeypatch.setattr("everytoken_lab.cli._run_module", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError):
        main(["train", "x"])


def test_a_package_that_turns_ctrl_c_into_an_error_of_its_own_interrupts_too(monkeypatch, capsys):
    def run(*_):
        with pytest.raises(KeyboardInterrupt):
            signal.getsignal(signal.SIGINT)(signal.SIGINT, None)  # as Ctrl-C does
        raise RuntimeError("SchemaError: KeyboardInterrupt")

    monkeypatch.setattr("everytoken_lab.cli._run_module", run)
    monkeypatch.setattr(sys, "argv", ["everytoken", "train", "x"])
    before = signal.getsignal(signal.SIGINT)
    try:
        assert main() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "everytoken: interrupted\n"

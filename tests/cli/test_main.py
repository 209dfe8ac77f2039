"""The front door: help, versions, wrong words."""

import errno
import json
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest

from everytoken_lab.cli import COMMANDS, main, options_of_commands
from everytoken_lab.cli._help import options_of


def test_help_lists_every_command_without_importing_torch():
    code = "import sys; from everytoken_lab.cli import main; main(['--help']); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("False")
    for command in COMMANDS:
        assert f"\n  {command} " in out


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        sys.exit(main([command, "--help"]))
    assert stop.value.code in (0, None)
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "config"), options_of_commands().items())
def test_help_begins_with_examples_and_says_nothing_twice(name, config, capsys):
    with pytest.raises(SystemExit):
        main([*name.split(), "--help-all"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith(f"usage: everytoken {name}")
    assert lines[2].startswith(f"  everytoken {name}")
    assert "(default: '')" not in text
    assert "--output" not in text
    every = [flag for option in options_of(config) for flag in option.flags]
    assert all(any(re.match(rf"  (-\w, )?{flag}|  --\[no-\]{flag[2:]}", line) for line in lines) for flag in every)
    assert not any(re.match(r"  --(?!\[)\S+, --no-", line) for line in lines)
    for option in options_of(config):
        assert option.help, f"{name} {option.name} is not explained"


@pytest.mark.parametrize(("command", "words"), [("eval", "MODEL [DATA] ["), ("doctor", "[DATA|MAPS|RUN ...] [")])
def test_the_usage_shows_which_words_may_be_left_out(command, words, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: everytoken {command} {words}OPTIONS]")


@pytest.mark.parametrize("command", ["train", "segment train", "detect train"])
def test_help_of_training_fits_three_screens_and_the_rest_is_in_help_all(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    pages = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([*command.split(), flag])
        pages[flag] = capsys.readouterr().out
        assert max(map(len, pages[flag].splitlines())) <= 120
    assert len(pages["--help"].splitlines()) <= 120
    assert "--epochs" in pages["--help"]
    assert "--bad-loss-limit" not in pages["--help"]
    assert "--bad-loss-limit" in pages["--help-all"]
    assert "--help-all" in pages["--help"]


@pytest.mark.parametrize("config", [c for c in options_of_commands().values() if hasattr(c, "COMMON")])
def test_the_options_that_help_shows_first_exist(config):
    known = {option.name for c in options_of_commands().values() if hasattr(c, "COMMON") for option in options_of(c)}
    assert set(config.COMMON) <= known


def test_help_shows_the_values_of_the_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--recipe", "small_96", "--help"])
    assert "lvvit_pico_patch8_96" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["eval"], "MODEL is missing, as in: everytoken eval runs/photos"),
        (["annotate", "photos"], "--out and --annotator are missing, as in: everytoken annotate photos --out maps"),
        (["annotate", "photos", "--out", "maps"], "--annotator is missing"),
        (["annotate", "--resize", "big"], "--resize is 'big'; it can be 'squash', 'letterbox', 'center'"),
        (["eval", "a", "b", "--table", "x"], "--table is 'x', which is no whole number"),
        (["train", "a", "--lr", "high"], "--lr is 'high', which is no number"),
        (["train", "photos", "more"], "there is no place for more"),
        (["train", "--epochs"], "--epochs needs a value"),
    ],
)
def test_what_is_wrong_with_the_words_is_one_sentence(words, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert sentence in message
    assert len(message.splitlines()) == 1


def test_out_is_the_word_for_results():
    assert all(option.name != "output" for config in options_of_commands().values() for option in options_of(config))


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("everytoken ")


def test_python_dash_m_works():
    done = subprocess.run(
        [sys.executable, "-m", "everytoken_lab", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("everytoken ")


def test_a_wrong_command_gets_a_suggestion(capsys):
    assert main(["modles"]) == 2
    assert "'models'" in capsys.readouterr().err


def test_a_wrong_flag_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["models", "lvvit_t", "--img-sise", "64"])
    assert stop.value.code == 2
    assert "--img-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "first"), [("--wieghts", "--weights?"), ("--epoch", "--epochs"), ("--image_size", "--img-size")]
)
def test_the_likeliest_flag_is_suggested_first(flag, first, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "photos", flag, "3"])
    assert stop.value.code == 2
    assert f"there is no option {flag.replace('_', '-')}. Did you mean {first}" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"maps", "segment", "detect"}))
def test_every_command_names_an_option_that_it_does_not_have(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--nonsensical"])
    assert stop.value.code == 2
    assert "there is no option --nonsensical." in capsys.readouterr().err


def test_wrong_values_are_still_explained(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["models", "lvvit_t", "--seconds", "many"])
    assert stop.value.code == 2
    assert "--seconds" in capsys.readouterr().err


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
    assert main(["recipes", "smal_96"]) == 2
    assert "small_96" in capsys.readouterr().err


def test_models_lists_families_and_names(capsys):
    assert main(["models"]) == 0
    assert "LV-ViT" in capsys.readouterr().out
    assert main(["models", "lvvit"]) == 0
    assert {"lvvit_t", "lvvit_s", "lvvit_m", "lvvit_l"} <= set(capsys.readouterr().out.split())
    assert main(["models", "*_32"]) == 0
    assert {"vit_nano_patch4_32", "lvvit_micro_patch4_32"} <= set(capsys.readouterr().out.split())
    assert main(["models", "nothing-like-this"]) == 2


def test_model_prints_what_it_costs(capsys):
    assert (
        main(["models", "lvvit_t", "--json", "--batch-size", "1", "--seconds", "0.01", "--img-size", "64", "96"]) == 0
    )
    facts = json.loads(capsys.readouterr().out)
    assert facts["token grid"] == "4 x 6"
    assert facts["prefix tokens"] == 1
    assert any(key.startswith("training on") for key in facts)


def test_model_takes_arguments_of_the_architecture(capsys):
    words = ["models", "lvvit_t", "--seconds", "0", "--img-size", "64", "--num-classes", "10", "--json"]
    sizes = ["--set", "depth=2", "--set", "stem_kernels=[16]", "--set", "stem_strides=[16]", "--set", "token_classes=0"]
    assert main([*words, *sizes]) == 0
    facts = json.loads(capsys.readouterr().out)
    blocks = 2 * (4 * 240**2 + 240 + 2 * 3 * 240**2 + 4 * 240 + 4 * 240)
    outside = 3 * 16**2 * 240 + 240 + 240 + 17 * 240 + 2 * 240 + 240 * 10 + 10
    assert facts["parameters"] == blocks + outside
    assert facts["brings a token head"] == "no"
    assert main([*words, "--set", "dpeth=2"]) == 2
    assert "dpeth" in capsys.readouterr().err


def test_an_unknown_or_unsupported_model_is_explained(capsys):
    assert main(["models", "lvvit_x"]) == 2
    assert "lvvit_" in capsys.readouterr().err
    assert main(["models", "crossvit_tiny_240", "--seconds", "0"]) == 2
    assert "no token view" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--max-pixels", "1000"], ["--max-pixels=1e3"]])
def test_every_command_takes_a_limit_of_pixels(flag, photos, capsys, monkeypatch):
    monkeypatch.setenv("EVERYTOKEN_MAX_PIXELS", "")  # restored afterwards
    assert main(["doctor", str(photos), *flag, "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert any("more than the limit of 1000" in text for finding in findings for text in finding["examples"])


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

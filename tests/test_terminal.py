"""The command on a terminal: help that fits, colours where they are wanted, progress in place, completion."""

import os
import pty
import re
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from tiny import write_tiny

from ftrain.cli import main
from ftrain.recipe import TABLES, shipped

COMMAND = [sys.executable, "-m", "ftrain.cli"]
UNSET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "NO_COLOR", "TERM", "COLUMNS")
ENV = {key: value for key, value in os.environ.items() if key not in UNSET} | {"TERM": "xterm"}


def on_a_terminal(*words, env=None):
    """(exit code, what is seen) of the command with a terminal for output and errors."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([*COMMAND, *words], stdout=theirs, stderr=theirs, env={**ENV, **(env or {})})
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    os.close(ours)
    return process.wait(60), seen.decode(errors="replace").replace("\r\n", "\n")


# --- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], *([name] for name in main.commands)], ids=str)
def test_help_fits_and_has_an_example(words):
    text = CliRunner().invoke(main, [*words, "--help"], prog_name="ftrain").output
    assert max(map(len, text.splitlines())) <= 80
    examples = [line.split() for line in text.splitlines() if line.startswith("  ") and "ftrain" in line]
    assert any(words == example[1 : 1 + len(words)] for example in examples)
    for example in examples:  # they are commands that there are
        arguments = example[example.index("train") if "torchrun" in example else 1 :]
        main.commands[arguments[0]].make_context(arguments[0], [word.strip('"') for word in arguments[1:]])


def test_every_option_says_what_it_is_for():
    for command in main.commands.values():
        assert command.short_help and len(command.get_short_help_str()) < 60
        for parameter in command.params:
            assert isinstance(parameter, click.Argument) or parameter.help


def test_help_names_the_shipped_recipes_and_the_exit_codes():
    text = CliRunner().invoke(main, ["--help"]).output
    assert all(name in text for name in shipped()) and "wrong" in text


@pytest.mark.parametrize(
    ("option", "keys"),
    [("--steps", ["train.steps"]), ("--seq-len", ["data.seq_len"]), ("--recipe", ["fp8.recipe"]),
     ("--every", ["checkpoint.every", "validation.every"]), ("--train.seed", ["train.seed"])],
)  # fmt: skip
def test_a_key_that_is_given_as_an_option(option, keys):
    result = CliRunner().invoke(main, ["train", "debug", option, "5"])
    assert result.exit_code == 2
    assert " or ".join(f"--set {key}=VALUE" for key in keys) in result.output


def test_a_key_without_its_table():
    result = CliRunner().invoke(main, ["train", "debug", "--set", "steps=5"])
    assert result.exit_code == 2 and "(did you mean train.steps=5?)" in result.output


# --- completion -----------------------------------------------------------------------------------------------------


def completed(*words):
    env = {
        "_FTRAIN_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["ftrain", *words]),
        "COMP_CWORD": str(len(words)),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        result = CliRunner().invoke(main, [], prog_name="ftrain")
    return [line.partition(",")[2] for line in result.output.splitlines()]


def test_a_shell_completes_commands_recipes_and_keys():
    assert completed("in") == ["inspect-sharding"]
    assert completed("train", "llama3-") == [name for name in shipped() if name.startswith("llama3-")]
    assert completed("train", "debug", "--set", "train.st") == ["train.steps="]
    assert completed("train", "debug", "--set", "optimizer.name=") == ["optimizer.name=adamw", "optimizer.name=sgd"]
    assert completed("train", "debug", "--set", "train.compile=t") == ["train.compile=true"]
    assert len(completed("train", "debug", "--set", "")) > 10 * len(TABLES) / 2
    assert completed("train", "./my") == ["./my"]  # the shell then looks for files


def test_completion_needs_no_torch():
    script = "import sys; from ftrain.cli import complete_recipe, complete_set; complete_recipe(None, None, 'd'); "
    script += "complete_set(None, None, 'tr'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


# --- colours --------------------------------------------------------------------------------------------------------

ESCAPE = "\x1b["


def test_errors_are_red_on_a_terminal_and_plain_where_no_colours_are_wanted():
    code, seen = on_a_terminal("train", "no-such-recipe")
    assert code == 2 and seen.startswith(f"{ESCAPE}31m") and "no-such-recipe" in seen
    for env in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        code, plain = on_a_terminal("train", "no-such-recipe", env=env)
        assert ESCAPE not in plain and plain == re.sub(r"\x1b\[\d*m", "", seen)
    assert ESCAPE in on_a_terminal("train", "no-such-recipe", env={"NO_COLOR": ""})[1]  # empty is not set
    piped = subprocess.run([*COMMAND, "train", "no-such-recipe"], capture_output=True, text=True, env=ENV)
    assert piped.stderr == plain


# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_is_in_place_on_a_terminal_and_a_log_has_no_such_thing(tmp_path):
    tiny = write_tiny(tmp_path)
    code, seen = on_a_terminal("train", tiny, env={"COLUMNS": "60"})
    assert code == 0 and "6/6  loss" in seen
    for line in seen.split("\n"):
        assert max(map(len, line.split("\r"))) <= 80
        assert all(len(part) < 60 for part in line.split("\r") if "loss" in part and "tok/s" in part)
    assert seen.count("\r") >= 6
    piped = subprocess.run([*COMMAND, "train", tiny], capture_output=True, text=True, env=ENV)
    assert piped.returncode == 0 and piped.stderr == ""
    assert "6/6  loss" in piped.stdout and "\r" not in piped.stdout and ESCAPE not in piped.stdout


def test_quiet_leaves_nothing_on_a_terminal(tmp_path):
    assert on_a_terminal("train", write_tiny(tmp_path), "--quiet") == (0, "")

"""The documentation runs: Python blocks as they are, TOML blocks as recipes, commands as far as their options."""

import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import tomli_w

from ftrain import load_recipe
from ftrain.cli import main
from ftrain.recipe import TABLES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, *languages):
    return [text for language, text in BLOCK.findall(page.read_text()) if language in languages]


def having(*languages):
    pages = [page for page in PAGES if blocks(page, *languages)]
    return pytest.mark.parametrize("page", pages, ids=[page.name for page in pages])


@having("python")
def test_python_blocks_run_one_after_another(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for text in blocks(page, "python"):
        exec(compile(text, str(page), "exec"), names)


@having("toml")
def test_toml_blocks_are_parts_of_recipes(page, tmp_path):
    """Each is read over the debug recipe."""
    base = tomllib.loads((ROOT / "recipes" / "debug.toml").read_text())
    for text in blocks(page, "toml"):
        tables = tomllib.loads(text)
        assert set(tables) <= set(TABLES), text
        path = tmp_path / "recipe.toml"
        path.write_text(tomli_w.dumps({**base, **{name: {**base.get(name, {}), **tables[name]} for name in tables}}))
        load_recipe(path)


@having("console", "bash", "sh")
def test_commands_have_the_options_that_are_shown(page):
    for text in blocks(page, "console", "bash", "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            try_command(line)


def test_commands_have_the_options_that_their_help_shows():
    for command in (main, *main.commands.values()):
        lines = [line.strip() for line in command.help.splitlines()]
        examples = [line for line in lines if line.startswith("ftrain ")]
        assert examples, command.name
        for line in examples:
            try_command(line)


def try_command(line):
    """Parse a line of a shell as far as ftrain's options and recipe; other programs' lines are left alone."""
    words = shlex.split(line.removeprefix("$ "), comments=True)
    if not words or words[0] != "ftrain" or words[1:2] == ["--help"]:
        return
    context = main.commands[words[1]].make_context(words[1], words[2:])
    name, overrides = context.params["recipe"], context.params["overrides"]
    if not os.path.exists(name) and "/" not in name:
        load_recipe(name, overrides)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#]*)(?:#[^)]*)?\)", page.read_text()):
            assert not target or (page.parent / target).exists(), f"{page.name} links to {target}"

"""What of the site is made from the package when the site is built: MkDocs calls the functions named `on_`.

on_config         the navigation gets the API's modules and the notebooks
on_files          a page for each of them, and for the changelog and the guide to contributing
on_page_markdown  fills the marks `<!-- made: NAME -->` of a page, and puts pictures inside it, where they follow the
                  page from light to dark

Nothing here is written to the repository, so none of it can be out of date.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
import typing
from html import escape
from pathlib import Path

import click
from mkdocs.structure.files import File

import ftrain
from ftrain import models
from ftrain.cli import main
from ftrain.recipe import TABLES, shipped
from ftrain.recipe.strict import expected, keys, show

ROOT = Path(__file__).parent.parent
# What serves the command alone. A module that is not named here has a page.
OF_THE_COMMAND = {
    "cli": "the command line",
    "export": "export-hf",
    "interrupt": "signals",
    "kernels": "used where they run",
    "launch": "who a rank is",
    "loop": "what happens between two steps",
    "machine": "what this machine has",
    "marks": "names of phases",
    "metrics": "where a run's numbers go",
    "page": "how pages look",
    "progress": "lines on a terminal",
    "resume": "where a run starts",
    "saving": "what a run saves",
    "spawn": "local ranks",
    "throughput": "tokens per second",
    "timeline": "train --profile",
    "trainer": "train, validate and export-hf",
}


def on_config(config):
    reference = next(item["Reference"] for item in config.nav if "Reference" in item)
    place = next(i for i, item in enumerate(reference) if "API" in item)
    reference[place] = {"API": ["api.md", *({name: f"api/{name}.md"} for name in modules())]}
    if found := notebooks():
        place = next(i for i, item in enumerate(config.nav) if "Guides" in item)
        config.nav.insert(place + 1, {"Notebooks": [f"notebooks/{path.stem}.md" for path in found]})
    return config


def on_files(files, config):
    made = {f"api/{name}.md": module_page(name) for name in modules()}
    made |= {f"{name.lower()}.md": (ROOT / f"{name}.md").read_text() for name in ("CHANGELOG", "CONTRIBUTING")}
    for path in notebooks():
        made |= notebook(path)
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    for mark, make in MADE.items():
        markdown = markdown.replace(f"<!-- made: {mark} -->", make() if mark in markdown else "")
    markdown = markdown.replace("```console\n", "```sh\n")  # its highlighter takes a line without a prompt for output
    return re.sub(r"!\[([^]]*)\]\((pictures/[\w-]+\.svg)\)", picture, markdown)


# --- recipes ----------------------------------------------------------------------------------------------------


def recipe_tables() -> str:
    """Every key of every table: what it may be, its default, its meaning."""
    parts = []
    for name, table in TABLES.items():
        hints = typing.get_type_hints(table)
        rows = [
            (
                f"`{key}`",
                cell(expected(hints[key], field.metadata)),
                "" if field.default is None else code(show(field.default)),
                prose(field.metadata["doc"]),
            )
            for key, field in keys(table).items()
        ]
        parts.append(
            f"## [{name}] {{#{name}}}\n\n{paragraph(table)}\n\n" + grid(("key", "takes", "default", "is"), rows)
        )
    return "\n".join(parts)


def shipped_recipes() -> str:
    """The files of recipes/ as they are."""
    return "\n".join(f"### {name}\n\n{fenced('toml', toml(name))}" for name in shipped())


def toml(name: str) -> str:
    """The text of a shipped recipe."""
    return (ROOT / "recipes" / f"{name}.toml").read_text()


# --- the command ------------------------------------------------------------------------------------------------


def commands() -> str:
    """The help of `ftrain` and of each of its commands, as click has it."""
    context = main.make_context("ftrain", [], resilient_parsing=True)
    formatter = context.make_formatter()
    main.format_epilog(context, formatter)
    parts = [command_help(main, "ftrain"), fenced("text", textwrap.dedent(formatter.getvalue()))]
    for name in main.list_commands(context):
        parts.append(f"## ftrain {name} {{#{name}}}\n\n{command_help(main.commands[name], f'ftrain {name}', context)}")
    return "\n".join(parts)


def command_help(command: click.Command, name: str, parent: click.Context | None = None) -> str:
    """Usage, meaning, examples and options of one command."""
    context = command.make_context(name, [], resilient_parsing=True)
    meaning, _, examples = inspect.cleandoc(command.help).partition("\b\n")
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [fenced("text", usage), meaning.strip() + "\n"]
    if examples:
        parts.append(fenced("console", as_comments(examples)))
    records = [param.get_help_record(context) for param in command.get_params(context)]
    rows = [(code(names), prose(meaning)) for names, meaning in filter(None, records) if meaning]
    return "\n".join([*parts, grid(("option", "does"), rows)])


def as_comments(examples: str) -> str:
    """Help indents the commands that a line of prose announces; in a shell's block that line is a comment."""
    lines = textwrap.dedent(examples).splitlines()
    return "\n".join(
        line.strip() if line.strip().startswith(COMMANDS) else f"# {line}" for line in lines if line.strip()
    )


COMMANDS = ("ftrain ", "torchrun ")

# --- the API ----------------------------------------------------------------------------------------------------


def modules() -> list[str]:
    """Every module that a program calls: all of the package but what serves the command alone."""
    top = [name for _, name, _ in pkgutil.iter_modules(ftrain.__path__) if name not in OF_THE_COMMAND | {"models": ""}]
    families = [f"models.{name}" for _, name, _ in pkgutil.iter_modules(models.__path__)]
    return [f"ftrain.{name}" for name in sorted([*top, *families])]


def module_page(name: str) -> str:
    """The page of one module. A function that a file of its own name holds would be taken for that file there."""
    module = importlib.import_module(name)
    hidden = [public for public in getattr(module, "__all__", ()) if home(module, public) == f"{name}.{public}"]
    more = [
        f"::: {name}.{public}.{public}\n    options: {{show_root_heading: true, heading_level: 2}}\n"
        for public in hidden
    ]
    return f"# {name}\n\n" + "\n".join([f"::: {name}\n", *more])


def home(module, name: str) -> str | None:
    """The module that defines a name of another one."""
    return getattr(getattr(module, name), "__module__", None)


def exported_names() -> str:
    """What `import ftrain` gives, each with its first line."""
    rows = []
    for name in ftrain.__all__:
        value, (module, attribute) = getattr(ftrain, name), ftrain._WHERE[name]
        link = f"(api/{module}.md)" if attribute is None else f"[{module}.{attribute}]"
        rows.append((f"[`ftrain.{name}`]{link}", prose(paragraph(value))))
    return grid(("name", "is"), rows)


def module_list() -> str:
    """The modules with the first line of each."""
    rows = []
    for name in modules():
        path = ROOT / Path(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        rows.append((f"[`{name}`](api/{name}.md)", prose(first(ast.get_docstring(ast.parse(file.read_text()))))))
    return grid(("module", "holds"), rows)


# --- notebooks and pictures ---------------------------------------------------------------------------------------


def notebooks() -> list[Path]:
    """The notebooks, in the order of their names."""
    return sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def notebook(path: Path) -> dict[str, str | bytes]:
    """A notebook as a page, with the outputs that it was saved with, and the files of its pictures."""
    from nbconvert import MarkdownExporter

    body, resources = MarkdownExporter().from_filename(str(path), {"output_files_dir": f"{path.stem}_files"})
    title, _, rest = body.lstrip().partition("\n")
    for other in notebooks():  # from notebook to notebook, as pages
        rest = rest.replace(f"]({other.name})", f"]({other.stem}.md)")
    page = f"{title}\n\n[The notebook]({path.name}), to run and to change.\n{rest}"
    return {f"notebooks/{path.stem}.md": page} | {
        f"notebooks/{name}": data for name, data in resources["outputs"].items()
    }


def picture(match: re.Match) -> str:
    """An SVG file inside its page, on lines without a gap, as HTML in Markdown has to be."""
    text, file = match.groups()
    svg = re.sub(r"\n\s*", "\n", (ROOT / "docs" / file).read_text().strip())
    return f'<figure class="picture" role="img" aria-label="{text}">\n{svg}\n</figure>'


# --- Markdown -----------------------------------------------------------------------------------------------------


def grid(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def prose(text: str) -> str:
    """Text for a cell in which nothing is markup."""
    parts = cell(text).split("`")  # every other one is code already
    parts[::2] = [re.sub(r"[<>{}*_]", lambda match: f"&#{ord(match[0])};", part) for part in parts[::2]]
    return "`".join(parts)


def code(text: str) -> str:
    """Code for a cell. As HTML: between backticks a bar could not be escaped."""
    return f"<code>{escape(text)}</code>".replace("|", "&#124;").replace("*", "&#42;").replace("_", "&#95;")


def fenced(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text.strip()}\n```\n"


def paragraph(thing) -> str:
    """The first paragraph of a docstring."""
    return first(inspect.getdoc(thing))


def first(doc: str) -> str:
    """The first paragraph of a text."""
    return " ".join(doc.split("\n\n")[0].split())


MADE = {
    "recipe tables": recipe_tables,
    "shipped recipes": shipped_recipes,
    "commands": commands,
    "exported names": exported_names,
    "modules": module_list,
}

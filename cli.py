"""The `ftrain` command: parse, call ftrain, print. Nothing heavy is imported until a command runs."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from textwrap import wrap
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from click.shell_completion import CompletionItem

    from ftrain.launch import World
    from ftrain.recipe import Recipe

ABOUT = """
\b
RECIPE is the path of a TOML file or the name of a shipped recipe:
  {shipped}

\b
Exit codes:
  0    fine
  1    the run failed
  2    the recipe or the usage is wrong
  3    on one of several ranks: another rank was lost
  130  stopped by SIGINT, after a save; 143: by SIGTERM
"""


class Group(click.Group):
    """The command itself: its help says which recipes there are."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ftrain.recipe import shipped

        self.epilog = ABOUT.format(shipped="\n  ".join(wrap(", ".join(shipped()), 76)))
        super().format_epilog(ctx, formatter)


class Command(click.Command):
    """A command to which keys of the recipe are not options: one who tries is told how to give them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            keys = [key for key in recipe_keys() if name in (key, key.partition(".")[2])]
            if not keys:
                raise
            ways = " or ".join(f"--set {key}=VALUE" for key in keys)
            raise click.UsageError(
                f"No such option '{error.option_name}'. A key of the recipe: {ways}.", ctx
            ) from error


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ftrain")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Train Llama-family language models, on one core or many GPUs, with fp8 where it pays.

    \b
    A small model, in minutes on two cores, and its loss on held-out text:
      ftrain train debug --out runs/debug
      ftrain validate debug --checkpoint runs/debug
    What a large run would do, without running it:
      ftrain inspect-sharding llama3-8b --world-size 64
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        ctx.color = False


def recipe_keys() -> dict[str, dataclasses.Field]:
    """Every "table.key" of a recipe, and its declaration."""
    from ftrain.recipe import TABLES
    from ftrain.recipe.strict import keys

    return {f"{table}.{name}": field for table, cls in TABLES.items() for name, field in keys(cls).items()}


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> "list[CompletionItem]":
    """For a shell: the shipped recipes that begin so, or files."""
    from click.shell_completion import CompletionItem

    from ftrain.recipe import shipped

    names = [CompletionItem(name) for name in shipped() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def complete_set(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """For a shell: the keys of a recipe, and the values of a key that has a few."""
    key, equals, value = incomplete.partition("=")
    keys = recipe_keys()
    if not equals or key not in keys:
        return [f"{name}=" for name in keys if name.startswith(key)]
    choices = ("true", "false") if keys[key].type is bool else keys[key].metadata["choices"]
    return [f"{key}={choice}" for choice in choices if choice.startswith(value)]


recipe_argument = click.argument("recipe", shell_complete=complete_recipe)
set_option = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    shell_complete=complete_set,
    help="Override a key of the recipe, such as train.steps=100. Repeatable.",
)
nproc_option = click.option(
    "--nproc",
    type=click.IntRange(min=1),
    metavar="N",
    help="Start N ranks on this machine. Default: as torchrun says, or 1.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@main.command(cls=Command, short_help="Train RECIPE, or go on where it was stopped.")
@recipe_argument
@set_option
@nproc_option
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Write recipe, metrics, checkpoints and a plot there.",
)
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--profile", is_flag=True, help="Draw what one step does, and when, in DIR/timeline.html.")
def train(
    recipe: str, overrides: tuple[str, ...], nproc: int | None, out: str | None, quiet: bool, profile: bool
) -> None:
    """Train RECIPE to its end. With --out DIR, the same command goes on where it was stopped.

    \b
    ftrain train debug --out runs/debug
    ftrain train llama3-8b --nproc 8 --set train.steps=5000 --out runs/8b
    ftrain train debug --nproc 2 --set train.steps=5 --profile --out runs/profile
    torchrun --nproc-per-node 8 -m ftrain.cli train llama3-8b --out runs/8b
    """
    options = option("--out", out) + ["--quiet"] * quiet + ["--profile"] * profile
    with speaking() as world:
        if start_ranks(world, nproc, "train", recipe, overrides, options):
            return
        opened = open_recipe("train", recipe, overrides, world)
        from ftrain import trainer  # and with it torch, which a mistake in the recipe need not wait for

        trainer.train(opened, out=out, quiet=quiet, profile=profile, world=world)


@main.command(cls=Command, short_help="Loss on held-out text, or proof that RECIPE is right.")
@recipe_argument
@set_option
@nproc_option
@click.option("--checkpoint", type=click.Path(), metavar="DIR", help="A checkpoint, or a run's folder: its newest one.")
@click.option("--parity", is_flag=True, help="Compare a batch's loss and gradients with a plain float32 reference.")
@json_option
def validate(
    recipe: str, overrides: tuple[str, ...], nproc: int | None, checkpoint: str | None, parity: bool, as_json: bool
) -> None:
    """Evaluate a checkpoint on the held-out data of RECIPE; with --parity, prove that RECIPE computes right.

    \b
    ftrain validate debug --checkpoint runs/debug
    ftrain validate debug --checkpoint runs/debug --json
    ftrain validate debug --parity --nproc 2 --set fp8.recipe=tensorwise
    """
    options = option("--checkpoint", checkpoint) + ["--parity"] * parity + ["--json"] * as_json
    with speaking() as world:
        if start_ranks(world, nproc, "validate", recipe, overrides, options):
            return
        opened = open_recipe("validate", recipe, overrides, world)
        from ftrain import parity as comparison
        from ftrain import trainer

        if parity:
            result = comparison.parity(opened, checkpoint=checkpoint, world=world)
            if world.rank == 0:
                click.echo(json.dumps(result) if as_json else in_colour(comparison.text(result)))
            sys.exit(0 if result["passed"] else 1)
        result = trainer.validate(opened, checkpoint=checkpoint, world=world)
        if world.rank == 0:
            click.echo(json.dumps(result) if as_json else validation_text(result))


def validation_text(result: dict) -> str:
    """What `validate` prints without --json."""
    return (
        f"held-out loss {result['loss']:.4f} nats per token, perplexity {result['perplexity']:.2f}\n"
        f"over {result['tokens']} tokens, after {result['step']} steps "
        f"({result['checkpoint'] or 'initial values: no --checkpoint was given'})"
    )


@main.command("export-hf", cls=Command, short_help="A checkpoint as transformers reads it.")
@recipe_argument
@set_option
@nproc_option
@click.option(
    "--checkpoint",
    type=click.Path(),
    metavar="DIR",
    required=True,
    help="A checkpoint, or a run's folder: its newest one.",
)
@click.option("--out", type=click.Path(file_okay=False), metavar="DIR", required=True, help="The folder to write.")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of the tensors. Default: as they were trained."
)
@json_option
def export_hf(
    recipe: str,
    overrides: tuple[str, ...],
    nproc: int | None,
    checkpoint: str,
    out: str,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Write a checkpoint of RECIPE as a Hugging Face one: config.json, .safetensors, tokenizer.

    \b
    ftrain export-hf debug --checkpoint runs/debug --out runs/debug-hf
    ftrain export-hf llama3-8b --checkpoint runs/8b --out 8b-hf --dtype bfloat16
    """
    options = option("--checkpoint", checkpoint) + option("--out", out) + option("--dtype", dtype)
    options += ["--json"] * as_json
    with speaking() as world:
        if start_ranks(world, nproc, "export-hf", recipe, overrides, options):
            return
        opened = open_recipe("export-hf", recipe, overrides, world)
        import torch

        from ftrain import trainer

        kind = None if dtype is None else getattr(torch, dtype)
        result = trainer.export_hf(opened, checkpoint=checkpoint, out=out, dtype=kind, world=world)
        if world.rank == 0:
            told = f"{result['checkpoint']}, after {result['step']} steps, is in {out} in {result['dtype']}"
            click.echo(json.dumps(result) if as_json else told)


@main.command("inspect-sharding", cls=Command, short_help="How RECIPE lies on any number of ranks.")
@recipe_argument
@set_option
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Lay it out on N ranks. Default: the fewest that [parallel] describes.",
)
@click.option(
    "--rank", type=click.IntRange(min=0), metavar="N", help="Give rank N's parts, bytes and memory. Default: rank 0's."
)
@click.option("--group", default="*", metavar="GLOB", help="List only parameters whose path matches.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page for a browser.")
@json_option
def inspect_sharding(
    recipe: str,
    overrides: tuple[str, ...],
    world_size: int | None,
    rank: int | None,
    group: str,
    html: str | None,
    as_json: bool,
) -> None:
    """Show how RECIPE lies on any number of ranks: parameters, collectives, memory. Needs none of them.

    \b
    ftrain inspect-sharding llama3-8b --world-size 64
    ftrain inspect-sharding llama3-70b --world-size 128 --group "*.w_up" --json
    ftrain inspect-sharding llama3-405b --world-size 16384 --html layout.html
    """
    with contextlib.ExitStack() as opened:
        opened.enter_context(speaking())
        from ftrain.page import writing

        write = opened.enter_context(writing(html, "--html")) if html is not None else None
        from ftrain import report
        from ftrain.recipe import RecipeError

        try:
            found = report.inspect(recipe, overrides, world_size=world_size, rank=rank)
        except RecipeError as error:
            if write:
                write(report.problems_as_html(recipe, world_size, error.problems))
            if not as_json:
                raise
            click.echo(json.dumps({"recipe": recipe, "world_size": world_size, "problems": error.problems}))
            sys.exit(2)
        if write:
            write(report.as_html(found, group))
        if as_json:
            click.echo(json.dumps(report.as_json(found, group)))
        else:
            click.echo(f"the report is in {html}" if write else report.render(found, group))


def in_colour(text: str) -> str:
    """A text of `parity` with its verdict in green or red; click leaves colours out where they are not wanted."""
    first, newline, rest = text.partition("\n")
    for word, colour in (("passed", "green"), ("FAILED", "red")):
        if first.endswith(word):
            first = first.removesuffix(word) + click.style(word, fg=colour, bold=True)
    return first + newline + rest


def open_recipe(command: str, name: str, overrides: tuple[str, ...], world: "World") -> "Recipe":
    """The recipe, checked against the number of ranks there are. Raises RecipeError."""
    from ftrain.launch import check_world
    from ftrain.recipe import RecipeError, check, load_recipe

    several = world.world_size if world.world_size > 1 else None
    recipe = load_recipe(name, overrides, world_size=several)
    words = [command, name, *(f"--set {override}" for override in overrides)]
    if too_few := check_world(recipe.parallel, world, " ".join(words)):
        raise RecipeError([too_few])
    if problems := check(recipe, world.world_size):
        raise RecipeError(problems)
    return recipe


def option(name: str, value: str | None) -> list[str]:
    """The words that give an option; none where it was not given."""
    return [] if value is None else [name, value]


def start_ranks(
    world: "World", nproc: int | None, command: str, recipe: str, overrides: tuple[str, ...], options: list[str]
) -> bool:
    """With --nproc of more than one: run the same command as that many ranks, and end as they do."""
    if nproc is None or nproc == world.world_size:
        return False
    from ftrain.launch import LaunchError
    from ftrain.spawn import spawn

    if world.world_size > 1:
        raise LaunchError(
            f"--nproc {nproc}, but this is already rank {world.rank} of {world.world_size}, as RANK and "
            "WORLD_SIZE say: use --nproc or torchrun, not both."
        )
    sets = [word for override in overrides for word in ("--set", override)]
    code = spawn(nproc, [sys.executable, "-m", "ftrain.cli", command, *sets, *options, "--", recipe], os.environ)
    if code:
        sys.exit(code)
    return True


@contextlib.contextmanager
def speaking() -> "Iterator[World]":
    """Yield this process's World, and turn what goes wrong inside into one message and an exit code."""
    from ftrain.launch import World, world_from_env

    world = World()
    try:
        world = world_from_env(os.environ)
        yield world
    except (Exception, KeyboardInterrupt) as error:
        code, message, unexpected = explain(error, world.rank)
        who = f"rank {world.rank}: " if world.world_size > 1 and (world.rank or code != 2) else ""
        if code == 2 and world.rank != 0:
            time.sleep(10)  # rank 0 most likely says the same, and has ended us by then
        if unexpected:
            traceback.print_exception(unexpected)
        if message:
            click.echo(click.style("ftrain:", fg="red", bold=True) + f" {who}{message}", err=True)
        sys.stdout.flush()
        if world.world_size > 1 and "torch" in sys.modules:
            os._exit(code)  # an orderly exit may wait for peers that are gone
        sys.exit(code)


def explain(error: BaseException, rank: int) -> tuple[int, str | None, BaseException | None]:
    """(exit code, message for the user, error whose traceback is worth showing) for what ended a command."""
    from ftrain.errors import FtrainError
    from ftrain.launch import LOST_PEER, is_lost_peer

    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "stopped by SIGINT." if rank == 0 else None, None
    lost = is_lost_peer(error)
    if isinstance(error, FtrainError) and (error.exit_code == LOST_PEER or not lost):
        return error.exit_code, None if rank and error.by_rank_0 else f"{error.opening}{error}", error.unexpected
    if lost:  # before the first step, or after the last
        return LOST_PEER, "another rank was lost", None
    return 1, f"{type(error).__name__}: {error}", error


if __name__ == "__main__":
    main(prog_name="ftrain")

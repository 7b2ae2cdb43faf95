"""The `ftrain` command: parse, call ftrain, print. Nothing heavy is imported until a command runs."""

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ftrain")
def main():
    """Train Llama-family language models as pure functions, on one core or many GPUs, with fp8 where it pays."""


if __name__ == "__main__":
    main(prog_name="ftrain")

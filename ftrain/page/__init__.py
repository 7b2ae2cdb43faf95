"""Pages that are one file: style, script and data are inside, and nothing is asked of the network.

style.css    the look, light and dark, narrow and wide       report.js, timeline.js    what a page does when touched
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ftrain.errors import FtrainError

# A browser that obeys this would refuse to load anything, should a page ever ask for it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


class PageError(FtrainError, ValueError):
    """A page that cannot be written, in a sentence."""


def page(title: str, body: str, *, script: str | None = None, data: Any = None) -> str:
    """A whole HTML document.

    body: HTML. script: the name of a file beside this one; it finds `data`, of plain values, as the JSON in #data.
    """
    here = files(__name__)
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{(here / 'style.css').read_text(encoding='utf-8')}</style>",
        body,
    ]
    if data is not None:
        # "<" would end the element, or open a comment in it, if a text held "</script>" or "<!--".
        text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        parts.append(f'<script type="application/json" id="data">{text}</script>')
    if script is not None:
        parts.append(f"<script>\n{(here / script).read_text(encoding='utf-8')}</script>")
    return "\n".join([*parts, "</html>", ""])


def framed(document: str, summary: str) -> str:
    """A document inside a page of someone else's, such as a notebook, whose styles it neither sees nor touches.

    summary: a sentence for viewers that leave frames out.
    """
    return (
        f"<p>{escape(summary)}</p>"
        f'<iframe title="{escape(summary)}" srcdoc="{escape(document)}" '
        'style="width:100%;height:640px;border:1px solid #8888;border-radius:8px;resize:vertical"></iframe>'
    )


@contextlib.contextmanager
def writing(path: str | os.PathLike, option: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a text to `path`, whole or not at all. If it is not called nothing is left.

    option: what the user gave the path with, for messages. Raises PageError at once where the file could not be
    written, so that no work is done for nothing.
    """
    asked, path = path, Path(path).resolve()  # a link stays a link
    if path.exists() and not path.is_file():
        raise PageError(f"{option} {asked}: is no file that can be written over.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def cannot(error: OSError) -> PageError:
        return PageError(f"{option} {asked}: cannot be written ({error.strerror or error}).")

    try:
        file = open(temporary, "w", encoding="utf-8")
    except OSError as error:
        raise cannot(error) from error

    def write(text: str) -> None:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise cannot(error) from error

    try:
        yield write
    finally:
        file.close()
        temporary.unlink(missing_ok=True)

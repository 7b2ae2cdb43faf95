"""ftrain's docstrings as Markdown: a line `name: meaning` inside one is an item of a list (an extension of griffe)."""

import re

import griffe

# "batch: a dict ...", "loss, tokens: ...", "`step`: ...": names, a colon and what they mean
ITEM = re.compile(r"^((?:`?\*{0,2}[a-z_][\w.]*(?:\([^)]*\))?`?)(?:, `?[A-Za-z_][\w.]*`?)*): (\S.*)$")


def as_markdown(doc: str) -> str:
    """Paragraphs whose lines begin with `name: ` become lists, and columns stay columns."""
    return "\n\n".join(listed(part) for part in doc.split("\n\n"))


def listed(paragraph: str) -> str:
    """One paragraph of a docstring."""
    lines = paragraph.split("\n")
    if lines[0].startswith("    "):  # code
        return paragraph
    if sum("   " in line.strip() for line in lines) > 1:  # columns
        return "\n".join(["```text", *lines, "```"])
    if not any(ITEM.match(line) for line in lines):
        return paragraph
    out: list[str] = []
    inside = False
    for line in lines:
        begins = not out or inside or out[-1].endswith((".", ":"))  # elsewhere a colon is one of a sentence
        if begins and (match := ITEM.match(line)):
            if out and not inside:
                out.append("")
            out.append(f"- **{match[1].strip('`')}**: {match[2]}")
            inside = True
        elif inside and (line.startswith(" ") or not out[-1].endswith((".", ";", ":"))):
            out.append("  " + line.strip())
        else:
            if inside:
                out.append("")
            out.append(line)
            inside = False
    return "\n".join(out)


class Docstrings(griffe.Extension):
    """Rewrites the docstring of everything that is loaded."""

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

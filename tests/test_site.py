"""The site: it builds strictly, asks the network for nothing, and leaves out no key, command, option or public name."""

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser

import ftrain
from ftrain.cli import main
from ftrain.recipe import TABLES, shipped
from ftrain.recipe.strict import keys

ROOT = Path(__file__).parent.parent
MISSING = [
    name for name in ("mkdocs", "material", "mkdocstrings_handlers", "nbconvert") if not importlib.util.find_spec(name)
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the site needs the docs extra: {', '.join(MISSING)} missing"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. A link that leads nowhere, or a name that nothing documents, would end the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    return folder


class Reader(HTMLParser):
    """What a page says, what it loads, and the ids of its elements."""

    def __init__(self, path: Path):
        super().__init__()
        self.text, self.loads, self.ids = "", [], set()
        self.feed(path.read_text())

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids.add(attrs.get("id"))
        self.loads += [attrs[name] for name in ("src", "srcset", "data", "poster") if attrs.get(name)]
        if tag == "link":
            self.loads.append(attrs["href"])


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        outside = [url for url in Reader(page).loads if re.match(r"(https?:)?//", url)]
        assert not outside, f"{page.name} loads {outside}"
    for style in site.rglob("*.css"):
        found = re.findall(r"""(?:url\(|@import)\s*['"]?((?:https?:)?//[^'")]*)""", style.read_text())
        assert not found, f"{style.name} loads {found}"


SEARCH = """new Promise(done => {
  const box = document.querySelector(".md-search__input");
  box.focus();
  box.value = "rowwise";
  box.dispatchEvent(new KeyboardEvent("keyup"));
  const look = () => {
    const found = document.querySelectorAll(".md-search-result__item").length;
    found ? done(found) : setTimeout(look, 50);
  };
  look();
})"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, to search in a browser")
def test_the_search_finds_where_the_site_is_opened_as_files(site, tmp_path):
    with Browser(tmp_path) as browser:
        browser.open(site / "design.html")
        count = browser.value(SEARCH)
        assert count > 1
        outside = [text for text in browser.complaints() if not text.startswith(("asks for file:", "asks for data:"))]
        assert not outside


def test_every_key_and_every_shipped_recipe_is_on_the_page_of_recipes(site):
    page = Reader(site / "recipes.html")
    words = set(page.text.split("\n"))
    for name, table in TABLES.items():
        assert name in page.ids
        for key, field in keys(table).items():
            assert key in words, f"{name}.{key}"
            assert " ".join(field.metadata["doc"].split()) in page.text, f"the meaning of {name}.{key}"
    for name in shipped():
        assert (ROOT / "recipes" / f"{name}.toml").read_text().strip() in page.text, name


def test_every_command_and_option_is_on_the_page_of_the_command_line(site):
    page = Reader(site / "cli.html")
    for name, command in main.commands.items():
        assert name in page.ids and f"ftrain {name}" in page.text
        for param in command.params:
            for option in (text for text in param.opts if text.startswith("-")):
                assert option in page.text, f"{name} {option}"


def test_every_public_name_is_on_the_pages_of_the_api(site):
    index = Reader(site / "api.html")
    for name in ftrain.__all__:
        assert f"ftrain.{name}" in index.text, name
    for page in (site / "api").glob("ftrain.*.html"):
        module = importlib.import_module(page.stem)
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        public = getattr(module, "__all__", [name for name in own if name[0] != "_"])
        found = Reader(page).ids
        for name in public:
            # the second: a function of a file of its own name
            assert found & {f"{page.stem}.{name}", f"{page.stem}.{name}.{name}"}, f"{page.stem}.{name}"
            if inspect.isfunction(value := getattr(module, name)) or inspect.isclass(value):
                assert value.__doc__, f"{page.stem}.{name} has no docstring"

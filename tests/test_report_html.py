"""The page of inspect-sharding: what it says is what --json says; in a browser, that it works and where it fits."""

import json
import math
import re
from html import unescape
from html.parser import HTMLParser
from importlib.resources import files
from itertools import product
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from click.testing import CliRunner

from ftrain.cli import main
from ftrain.report import as_html, as_json, inspect
from ftrain.report.render import size
from ftrain.sharding import Spec, local_slices

UNEVEN = (
    "model.vocab_size=290",
    "fp8.recipe=tensorwise",
    "parallel.tensor=2",
    "parallel.replicate=2",
    "data.global_batch_size=12",
)  # on 12 ranks: replicate 2 x tensor 2 x shard 3


class Parsed(HTMLParser):
    """A page: its tags with their attributes, and the text under each class or id."""

    VOID = ("meta", "input", "rect", "path")

    def __init__(self, document: str):
        super().__init__()
        self.tags, self.text, self._open = [], {}, []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag not in self.VOID:
            names = [*attrs.get("class", "").split(), *([attrs["id"]] if "id" in attrs else [])]
            self._open.append((tag, names))
            for name in names:
                self.text.setdefault(name, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open and self._open[-1][0] == tag, f"</{tag}> ends {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data):
        for _, names in self._open:
            for name in names:
                self.text[name][-1] += data

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


@pytest.fixture(scope="module")
def uneven():
    return inspect("debug", UNEVEN, world_size=12)


def holds(row, rank, mesh):
    """What the page says of a parameter and a rank."""
    spec = Spec(tuple(tuple(axes) for axes in row["stored"]))
    parts = local_slices(tuple(row["shape"]), spec, mesh, rank)
    if any(part.start == part.stop for part in parts):
        return f"rank {rank} holds nothing of it"
    said = []
    for name, part, axes, n in zip(("rows", "columns"), parts, row["stored"], row["shape"], strict=False):
        span = f"{part.start}–{part.stop - 1}" if part.stop - part.start > 1 else f"{part.start}"
        said += [f"{name} {span} of {n}"] if axes else []
    return f"rank {rank} holds {', '.join(said) or 'all of it'}"


# --- the page as it stands ------------------------------------------------------------------------------------------


def test_the_data_is_what_json_prints(tmp_path):
    words = ["inspect-sharding", "debug", "--world-size", "12", *(w for o in UNEVEN for w in ("--set", o))]
    file = tmp_path / "report.html"
    result = CliRunner().invoke(main, [*words, "--html", str(file), "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    parsed = Parsed(file.read_text())
    [data] = parsed.text["data"]
    found = json.loads(data)
    assert {k: v for k, v in found.items() if k != "parameters"} == {
        k: v for k, v in printed.items() if k != "parameters"
    }
    by_path = {row["path"]: row for row in printed["parameters"]}
    assert sum(row["count"] for row in found["parameters"]) == len(by_path)
    for row in found["parameters"]:
        first = re.sub(r"\.(\d+)-\d+\.", r".\1.", row["path"])
        assert {**row, "path": first, "count": 1} == by_path[first]
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_seen_is_the_data(uneven):
    document = as_html(uneven)
    parsed, found = Parsed(document), as_json(uneven, fold=True)
    assert parsed.text["holds"] == [holds(row, 0, uneven.run.mesh_shape) for row in found["parameters"]]
    assert [item["data-path"] for item in parsed.all("li") if "data-path" in item] == [
        row["path"] for row in found["parameters"]
    ]
    for part in found["memory"]["parts"]:
        assert part["what"] in parsed.text["memory"][0] and size(part["at_peak"]) in parsed.text["memory"][0]
    for kind in found["collectives"]:
        assert kind["purpose"] in parsed.text["wire"][0] and size(kind["fp8"]["moved"]) in parsed.text["wire"][0]
    sums = [
        sum(kind[name]["moved"] for kind in found["collectives"] if kind[name]) for name in ("high_precision", "fp8")
    ]
    assert (
        f"{size(sums[0])} in bf16; {size(sums[1])} with fp8, {1 - sums[1] / sums[0]:.0%} less" in parsed.text["wire"][0]
    )
    assert all(note in parsed.text["problems"][0] for note in found["notes"])
    ranks = sorted(int(cell["data-rank"]) for cell in parsed.all("button"))
    assert ranks == list(range(12))


def test_everything_has_a_name_and_nothing_comes_from_elsewhere(uneven):
    parsed = Parsed(as_html(uneven))
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in parsed.tags:
        assert not {"src", "href", "action", "data", "poster"} & set(attrs), (tag, attrs)
        if "aria-labelledby" in attrs:
            assert attrs["aria-labelledby"] in ids
        if attrs.get("role") in ("radio", "radiogroup", "img", "group"):
            assert attrs["aria-label"]
    assert dict(parsed.tags)["html"]["lang"] == "en"
    assert [cell["tabindex"] for cell in parsed.all("button")].count("0") == 1  # one stop of the Tab key
    assert "url(" not in (style := (files("ftrain.page") / "style.css").read_text()) and "@import" not in style


def test_a_page_of_16384_ranks_is_small():
    found = inspect("llama3-405b", ("parallel.tensor=8",), world_size=16384)
    document = as_html(found)
    assert len(document) < 100_000
    parsed = Parsed(document)
    assert len(parsed.all("button")) == 64 and len(parsed.text["holds"]) == 12
    # What ranks hold differs by their place on shard alone, and all of it is there.
    assert sum(holding.ranks for holding in found.holdings) == 16384
    at = [holding.first for holding in found.holdings]
    assert at[1:] == [holding.last + 1 for holding in found.holdings[:-1]] and len(at) == 4


def test_holdings_are_what_every_rank_holds(uneven):
    for rank in (0, 3, 5, 10):
        rows = inspect("debug", UNEVEN, world_size=12, rank=rank).rows
        place = uneven.run.mesh_shape.coordinate(rank)["shard"]
        [mine] = [holding for holding in uneven.holdings if holding.first <= place <= holding.last]
        for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            assert sum(getattr(row, name) for row in rows) == getattr(mine, name)
    assert len(uneven.holdings) == 2


@pytest.mark.parametrize(
    "overrides, world", [((), 1), (("fp8.recipe=none",), 2), ((), 100), (("parallel.tensor=4",), 4)]
)
def test_any_layout_has_a_page(overrides, world):
    found = inspect("debug", (*overrides, f"data.global_batch_size={2 * world}"), world_size=world)
    parsed = Parsed(as_html(found))
    cells = len(parsed.all("button"))
    assert (cells == 0) if world == 1 else cells <= 64
    assert parsed.text["holds"] == [
        holds(row, 0, found.run.mesh_shape) for row in as_json(found, fold=True)["parameters"]
    ]


def test_problems_are_on_the_page_and_the_exit_code_is_2(tmp_path):
    file = tmp_path / "report.html"
    words = ["inspect-sharding", "debug", "--world-size", "3", "--set", "optimizer.lr=-1", "--html", str(file)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and "optimizer.lr" in result.stderr
    parsed = Parsed(file.read_text())
    problems = json.loads(parsed.text["data"][0])["problems"]
    assert len(problems) > 1 and all(problem in parsed.text["problems"][0] for problem in problems)


def test_a_name_is_text_whatever_is_in_it(tmp_path):
    name = tmp_path / "<script>alert(1)</script><!--&amp;.toml"
    name.parent.mkdir(parents=True, exist_ok=True)
    file = tmp_path / "report.html"
    assert CliRunner().invoke(main, ["inspect-sharding", str(name), "--html", str(file)]).exit_code == 2
    parsed = Parsed(file.read_text())
    assert len(parsed.all("script")) == 1  # the data
    assert json.loads(parsed.text["data"][0])["recipe"] == str(name)
    assert str(name) in parsed.text["problems"][0]


@pytest.mark.parametrize("file", ["/nowhere/report.html", "/dev/null", "/proc/report.html"])
def test_a_file_that_cannot_be_written_is_said_before_the_work(file):
    # A recipe that does not exist would be the next thing to be said.
    result = CliRunner().invoke(main, ["inspect-sharding", "no-such-recipe", "--html", file])
    assert result.exit_code == 2
    assert result.output.startswith(f"ftrain: --html {file}: ") and result.output.count("\n") == 1


def test_an_older_page_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    file = tmp_path / "report.html"
    file.write_text("the old one")
    link = tmp_path / "link.html"
    link.symlink_to(file)

    def interrupted(*_):
        assert file.read_text() == "the old one"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ftrain.report.as_html", interrupted)
        assert CliRunner().invoke(main, ["inspect-sharding", "debug", "--html", str(link)]).exit_code == 130
    assert sorted(tmp_path.iterdir()) == [link, file] and file.read_text() == "the old one"
    assert CliRunner().invoke(main, ["inspect-sharding", "debug", "--html", str(link)]).exit_code == 0
    assert link.is_symlink() and file.read_text().startswith("<!doctype html>")


def test_a_notebook_shows_it_in_a_frame(uneven):
    shown = uneven._repr_html_()
    [frame] = Parsed(re.sub(r"srcdoc=\"[^\"]*\"", "", shown)).all("iframe")
    assert frame["title"].startswith("debug on 12 ranks: ")
    assert repr(uneven) == f"<Inspection of {frame['title']}>"
    assert unescape(re.search(r'srcdoc="([^"]*)"', shown)[1]) == as_html(uneven)


def contrast(one: str, other: str) -> float:
    """WCAG 2.1, 1.4.3: from 1 to 21."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_can_be_told_apart_in_light_and_in_dark():
    style = (files("ftrain.page") / "style.css").read_text()
    schemes = [
        dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ]
    assert len(schemes) == 2 and schemes[0].keys() == schemes[1].keys()
    for colours in schemes:
        for ground in ("page", "card"):
            for text in ("text", "soft", "rank", "warn", "bad"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert contrast(colours["on-rank"], colours["rank"]) >= 4.5
        for mark in ("rank", "high", *(f"c{i}" for i in range(1, 10))):
            assert contrast(colours[mark], colours["card"]) >= 3, mark


# --- in a browser ---------------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory, uneven):
    folder = tmp_path_factory.mktemp("pages")
    big = inspect("llama3-405b", ("parallel.tensor=8",), world_size=16384)
    for name, found in (("uneven", uneven), ("big", big), ("one", inspect("debug"))):
        (folder / f"{name}.html").write_text(as_html(found))
    return folder


def said(browser):
    return browser.value("[...document.querySelectorAll('.holds')].map(e => e.textContent)")


@needs_browser
@pytest.mark.parametrize("name", ["uneven", "big", "one"])
def test_it_fits_a_phone_and_a_desk_in_light_and_in_dark(browser, pages, name):
    grounds = set()
    for width, dark in product((320, 360, 1200), (False, True)):
        browser.open(pages / f"{name}.html", width=width, dark=dark)
        assert browser.value("document.documentElement.scrollWidth") == width
        # Nothing is cut off inside either.
        wide = (
            "[...document.querySelectorAll('main *')].filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1)"
        )
        assert browser.value(f"{wide}.map(e => e.outerHTML.slice(0, 80))") == []
        grounds.add((dark, browser.value("getComputedStyle(document.body).backgroundColor")))
        assert browser.complaints() == []
    assert len(grounds) == 2


@needs_browser
def test_the_script_knows_what_every_rank_holds(browser, pages, uneven):
    browser.open(pages / "uneven.html")
    rows, mesh = as_json(uneven, fold=True)["parameters"], uneven.run.mesh_shape
    for rank in range(12):
        browser.value(f"show({rank})")
        assert said(browser) == [holds(row, rank, mesh) for row in rows]
        at = ", ".join(f"{axis} {place}" for axis, place in mesh.coordinate(rank).items())
        assert browser.value("document.getElementById('at').textContent") == at
        cells = browser.value("[...document.querySelectorAll('[aria-checked=true]')].map(e => e.dataset.rank)")
        assert cells == [str(rank)]
    found = inspect("llama3-405b", ("parallel.tensor=8",), world_size=16384)
    rows, mesh = as_json(found, fold=True)["parameters"], found.run.mesh_shape
    browser.open(pages / "big.html")
    for rank in (0, 7, 1023, 1024, 13311, 13312, 16031, 16032, 16383):
        browser.value(f"show({rank})")
        assert said(browser) == [holds(row, rank, mesh) for row in rows]


@needs_browser
def test_a_rank_is_picked_with_mouse_finger_and_keyboard(browser, pages):
    def shown():
        return browser.value("shown")

    browser.open(pages / "uneven.html", width=360)
    browser.tap("[data-rank='5']")
    assert shown() == 5
    browser.hover("[data-rank='8']")
    assert shown() == 8
    browser.value("document.querySelector('[data-rank=\"0\"]').focus()")
    for key, rank in (("ArrowRight", 2), ("ArrowDown", 3), ("ArrowLeft", 1), ("End", 5), ("Home", 0)):
        browser.key(key)
        assert shown() == rank, key
    browser.value("document.getElementById('rank').select()")
    browser.type("11")
    assert shown() == 11 and said(browser)[0].startswith("rank 11 ")
    browser.value("document.getElementById('rank').select()")
    browser.type("12")  # there is none
    assert shown() == 11
    browser.value("document.activeElement.blur()")
    assert browser.value("document.getElementById('rank').value") == "11"
    # The last row of the embedding lies with the last place on tensor and shard of the same replica.
    browser.tap("[data-path='embedding'] .strip", across=0.999)
    assert shown() == 11
    browser.tap("[data-path='embedding'] .strip", across=0.001)
    assert shown() == 6
    [here] = browser.value("[...document.querySelectorAll('.bars .here p')].map(e => e.textContent)")
    assert here.startswith("shard 0–1: 8 ranks")


@needs_browser
def test_paths_are_found_though_layers_share_an_entry(browser, pages):
    browser.open(pages / "uneven.html")
    entries = "[...document.querySelectorAll('.entries > li')].filter(e => !e.hidden).map(e => e.dataset.path)"
    everything = browser.value(entries)
    for query, expected in (
        ("layers.2.wq", ["layers.0-3.wq"]),
        ("layers.4.wq", []),
        ("*norm", ["layers.0-3.attention_norm", "layers.0-3.mlp_norm", "norm"]),
        ("layers.?.w?", [f"layers.0-3.w{x}" for x in "kovq"]),
        ("EMBED", ["embedding"]),
        ("layers.0-3.wk", ["layers.0-3.wk"]),
        ("(", []),
        (" ", everything),
    ):
        browser.value("document.getElementById('find').select()")
        browser.type(query)
        assert sorted(browser.value(entries)) == sorted(expected), query
        told = browser.value("document.getElementById('found').textContent")
        assert told.startswith("12 entries" if query == " " else f"{len(expected)} of 12")


@needs_browser
def test_it_can_be_read_without_its_script(browser, pages, tmp_path):
    plain = re.sub(r"<script>.*?</script>", "", (pages / "uneven.html").read_text(), flags=re.S)
    assert plain != (pages / "uneven.html").read_text()
    (tmp_path / "plain.html").write_text(plain)
    browser.open(tmp_path / "plain.html", width=360)
    texts = said(browser)
    browser.open(pages / "uneven.html", width=360)
    assert said(browser) == texts
    held = "[...document.querySelectorAll('.held')].map(e => Number(e.getAttribute('width')))"
    assert all(math.isfinite(width) for width in browser.value(held))


def test_pages_travel_with_the_package():
    assert {path.name for path in Path(str(files("ftrain.page"))).iterdir()} >= {"style.css", "report.js"}

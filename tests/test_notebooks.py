"""The notebooks run from top to bottom, and what they show in the repository is what a run gives."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from notebooks import normalised, run

PATHS = sorted((Path(__file__).parent.parent / "docs" / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000
MACHINE_PATH = re.compile(r"(?<![\w./])/(?:home|root|tmp|usr|opt|work|mnt|var|Users)/\w")

each = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def words(notebook):
    """What the cells print, without numbers and spaces: those depend on the machine and on Python's own library.

    Nor warnings, such as Matplotlib's that it looks for fonts for the first time.
    """
    printed = [output for output in outputs(notebook) if output.get("name") != "stderr"]
    texts = [output.text if "text" in output else sorted(output.data) for output in printed]
    return [re.sub(r"(?:[\d\s.,e+-]|nan|inf)+", " ", text) if isinstance(text, str) else text for text in texts]


@each
def test_what_is_shown_is_a_clean_run_of_any_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert normalised(notebook) == notebook, "not written by `make notebooks`"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "not run from top to bottom"
    for output in outputs(notebook):
        assert output.output_type != "error" and output.get("name") != "stderr", output
        assert not MACHINE_PATH.search(str(output)), output
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.slow
@each
def test_a_notebook_runs_and_says_the_same(path):
    notebook = nbformat.read(path, as_version=4)
    assert words(run(notebook)) == words(notebook)


def test_a_cell_that_fails_or_hangs_ends_the_run():
    fails = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run(fails)
    hangs = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("while True: pass")])
    with pytest.raises(CellTimeoutError):
        run(hangs, seconds=3)

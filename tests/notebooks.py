"""Runs notebooks from top to bottom in a kernel of this Python: `make notebooks` writes docs/notebooks anew.

What is written does not say when, how fast or where it ran, so a notebook that did not change is the same file.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient

SECONDS = 120  # that one cell may take


def run(notebook: nbformat.NotebookNode, seconds: float = SECONDS) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run on one thread, in a folder that is gone afterwards.

    Raises CellExecutionError for a cell that raises, and CellTimeoutError for one that takes more than `seconds`.
    """
    result = nbformat.from_dict(notebook)
    with tempfile.TemporaryDirectory() as folder:
        kernel = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # not what is installed: ipykernel's, of this Python
            transport="ipc",  # no ports, and no other user listens
            connection_file=os.path.join(folder, "kernel.json"),
        )
        client = NotebookClient(
            result,
            km=kernel,
            timeout=seconds,
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        # A profile of one's own, such as startup files, is no part of a notebook.
        alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "IPYTHONDIR": os.path.join(folder, ".ipython")}
        try:
            client.execute(env={**os.environ, **alone})
        finally:
            run_sync(kernel.shutdown_kernel)(now=True)
    return result


def normalised(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Without what differs between two runs or two machines: times, versions, and metadata of editors."""
    result = nbformat.from_dict(notebook)
    result.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in result.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = {}
    return result


def main(paths: list[str]) -> None:
    for path in paths:
        notebook = normalised(run(nbformat.read(path, as_version=4)))
        nbformat.write(notebook, path)
        print(f"{path}: {os.path.getsize(path) / 1000:.0f} kB")


if __name__ == "__main__":
    folder = Path(__file__).parent.parent / "docs" / "notebooks"
    main(sys.argv[1:] or sorted(map(str, folder.glob("*.ipynb"))))

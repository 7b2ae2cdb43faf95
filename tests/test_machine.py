"""A run that cannot fit in this machine is told so before it takes any memory."""

import pytest
import torch

from ftrain import Run, machine, tree
from ftrain.machine import memory_bytes, too_large
from ftrain.recipe import RecipeError
from ftrain.step import init_state

CPU = torch.device("cpu")


def test_a_containers_limit_counts_where_it_is_less(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "LIMITS", ())
    whole = memory_bytes(CPU)
    assert whole > 1 << 28
    for text, expected in (("max", whole), ("4096", 4096), (str(2 * whole), whole)):
        (tmp_path / "limit").write_text(text + "\n")
        monkeypatch.setattr(machine, "LIMITS", (tmp_path / "limit", tmp_path / "none"))
        assert memory_bytes(CPU) == expected


def test_ranks_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda device: 8 << 30)
    assert too_large(4 << 30, CPU, 2) is None
    said = too_large(5 << 30, CPU, 2)
    assert "of the 2 ranks here take 10.0 GiB" in said and "has 8.0 GiB" in said and "parallel.shard" in said
    assert too_large(5 << 30, torch.device("cuda", 0), 2) is None  # a GPU is a rank's own
    assert "this GPU has 8.0 GiB" in too_large(9 << 30, torch.device("cuda", 0), 2)
    assert too_large(1 << 60, torch.device("meta"), 1) is None


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_what_is_needed_is_what_a_state_takes(tiny, monkeypatch, optimizer):
    run = Run(tiny(f"optimizer.name={optimizer}"))
    state = init_state(run.init().params, run.optimizer)
    leaves = tree.leaves((state.params, state.opt_state))
    need = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    monkeypatch.setattr(machine, "memory_bytes", lambda device: need)
    run.init()
    monkeypatch.setattr(machine, "memory_bytes", lambda device: need - 1)
    with pytest.raises(RecipeError, match="parameters and optimizer state take"):
        run.init()

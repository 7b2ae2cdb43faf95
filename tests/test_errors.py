"""Errors that are meant for a user: one class, which the command turns into a sentence and an exit code."""

import pkgutil
import signal
from importlib import import_module

import pytest

import ftrain
from ftrain.checkpoint import CheckpointError
from ftrain.cli import explain
from ftrain.launch import LOST_PEER
from ftrain.recipe import RecipeError
from ftrain.trainer import RunFailed, Stopped


def test_every_error_class_of_ftrain_is_one():
    modules = [import_module(info.name) for info in pkgutil.walk_packages(ftrain.__path__, "ftrain.")]
    ours = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__.startswith("ftrain")
    }
    assert {error.__name__ for error in ours} >= {"RecipeError", "DataError", "HfError", "ShardingError", "RunFailed"}
    assert all(issubclass(error, ftrain.FtrainError) for error in ours)


OUT_OF_DISK = OSError("the disk is full")


@pytest.mark.parametrize(
    ("error", "code", "said", "unexpected"),
    [
        (RecipeError(["train.steps = 0: expected more."]), 2, "train.steps = 0: expected more.", None),
        (CheckpointError("cannot save step 3"), 1, "cannot save step 3", None),
        (RunFailed("in step 3: nan"), 1, "the run failed in step 3: nan", None),
        (RunFailed("in step 3", unexpected=OUT_OF_DISK), 1, "the run failed in step 3", OUT_OF_DISK),
        (RunFailed("in step 3: lost", lost_peer=True), LOST_PEER, "the run failed in step 3: lost", None),
        (OUT_OF_DISK, 1, "OSError: the disk is full", OUT_OF_DISK),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_the_command_says_an_error_and_ends_with_its_code(error, code, said, unexpected):
    assert explain(error, rank=1) == (code, said, unexpected)


def test_one_rank_says_that_all_were_stopped():
    stopped = Stopped(signal.SIGTERM, "stopped after step 3, as asked")
    assert explain(stopped, rank=0) == (143, "stopped after step 3, as asked", None)
    assert explain(stopped, rank=1) == (143, None, None)

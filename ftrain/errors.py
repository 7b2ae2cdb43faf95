"""The one class of all errors that are meant for a user."""


class FtrainError(Exception):
    """What cannot be done, or went wrong, in a sentence (or one a line) for the user. Every such class is one of these.

    exit_code: with which the command ends: 2 for a mistake in recipe, data or usage, 1 for a run that failed.
    opening: what the command says before the message.
    by_rank_0: all ranks raise it alike, so one of them says it.
    unexpected: the error behind it, where that is none of these and its traceback is worth showing.
    """

    exit_code = 2
    opening = ""
    by_rank_0 = False
    unexpected: Exception | None = None

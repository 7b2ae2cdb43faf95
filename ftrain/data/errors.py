"""The one exception for data that cannot be used."""

from ftrain.errors import FtrainError


class DataError(FtrainError, ValueError):
    """What is wrong with the data or its settings, in a sentence that names the file, line or key."""

"""A process that tokenises units: `python -m ftrain.data.worker RULES`, started by tokenising.py.

Reads a line of JSON for each unit and answers with one; ends when its input does, so also when its parent dies.
"""

import json
import signal
import sys
from pathlib import Path

from .cache import write_part
from .errors import DataError
from .sources import Slice
from .tokenising import Rules, encode_unit
from .tokenizer import Tokenizer, TokenizerSpec
from .tokenizer_json import open_tokenizer


def main() -> None:
    """Tokenise what is asked for on stdin, by the rules of the one argument, until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends this process
    spec, field, held_out = json.loads(sys.argv[1])
    rules = Rules(TokenizerSpec(*spec), field, held_out)
    tokenizer = open_tokenizer(rules.tokenizer)
    for line in sys.stdin:
        print(json.dumps(answer(line, rules, tokenizer)), flush=True)


def answer(line: str, rules: Rules, tokenizer: Tokenizer) -> dict:
    """Do the unit of one line: {} when its part is written, or {"error": a sentence}."""
    path, slices = json.loads(line)
    unit = tuple(Slice(*slice_) for slice_ in slices)
    try:
        write_part(Path(path), encode_unit(unit, rules, tokenizer), tokenizer.dtype)
    except DataError as error:
        return {"error": str(error)}
    return {}


if __name__ == "__main__":
    main()

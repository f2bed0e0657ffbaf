"""The program of a rank of horovod.run: calls the function, and writes the outcome. Argument: the directory."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from allred import launcher_variables
from allred.client.call import REMEDY, unpack
from allred.compat.horovodrun.function import outcome_of_error, outcome_of_result, write_outcome
from allred.errors import InputError


def main(directory: str) -> None:
    """Run the program."""
    rank = launcher_variables.rank(os.environ) or 0
    try:
        function, args, kwargs = _load(directory)
        outcome = outcome_of_result(rank, function(*args, **kwargs))
    except BaseException as error:
        write_outcome(directory, outcome_of_error(rank, error))
        raise
    write_outcome(directory, outcome)


def _load(directory: str) -> Any:
    """Return the function, its positional and its keyword arguments. Raises InputError if they cannot be loaded."""
    try:
        paths, parts = pickle.loads(Path(directory, "call").read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"horovod.run: {error}; the directory must be shared by all hosts") from None
    sys.path += [path for path in paths if path not in sys.path]
    try:
        return unpack(parts)
    except (AttributeError, ModuleNotFoundError) as error:
        raise InputError(f"horovod.run: the function cannot be loaded on a rank ({error}); {REMEDY}") from error


if __name__ == "__main__":
    main(sys.argv[1])

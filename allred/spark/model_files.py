"""A model in a directory: its parameters in params.safetensors, and its predict function, pickled by value."""

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from allred.errors import CheckpointError

_PARAMS, _PREDICT = "params.safetensors", "predict.pkl"


def write(directory: Path, predict: Callable[..., Any], params: Mapping[str, Any]) -> None:
    """Write the files. Replaces an existing model, not atomically: there are two files. Raises CheckpointError."""
    import cloudpickle

    arrays = {name: np.ascontiguousarray(value) for name, value in params.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(arrays, directory / f".{_PARAMS}")
        (directory / f".{_PREDICT}").write_bytes(cloudpickle.dumps(predict))
        for name in (_PARAMS, _PREDICT):
            os.replace(directory / f".{name}", directory / name)
    except OSError as error:
        raise CheckpointError(f"the model cannot be written to {directory}: {error.strerror or error}") from None


def read(directory: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the predict function and the parameters. Raises CheckpointError."""
    try:
        predict = pickle.loads((Path(directory) / _PREDICT).read_bytes())
        return predict, load_file(Path(directory) / _PARAMS)
    except OSError as error:
        raise CheckpointError(
            f"there is no model in {directory} ({error.strerror or error}): map_fun writes it with ctx.export_model, "
            "to a directory that all executors share"
        ) from None

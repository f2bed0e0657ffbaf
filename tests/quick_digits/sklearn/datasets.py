"""`load_digits` as in scikit-learn; tests/unit/test_digits_from_files.py compares them."""

import pathlib
import sys
import types

import numpy as np

_FILE = "sklearn/datasets/data/digits.csv.gz"


def load_digits(*, return_X_y=False):  # noqa: N803  (the name in scikit-learn)
    [file, *_] = (path for folder in sys.path if (path := pathlib.Path(folder, _FILE)).exists())
    table = np.loadtxt(file, delimiter=",")
    data, target = table[:, :-1], table[:, -1].astype(int)
    return (data, target) if return_X_y else types.SimpleNamespace(data=data, target=target)

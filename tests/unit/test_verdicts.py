"""What is said of ranks that differ, or of gradients that are not finite: pure functions of what all ranks know."""

import re

import ml_dtypes
import numpy as np
import pytest

from allred.data.loader import LoaderArguments
from allred.fusion import Plan, Tensor
from allred.modes.detect import drift, finite
from allred.modes.detect.batch_arguments import difference

A, B = ("parameter", "a"), ("parameter", "b")
LR, COUNT = ("setting", "lr"), ("state", "global_step")
ONE, TWO, THREE = "float32 (3,) aa", "float32 (3,) bb", "float32 (3,) cc"


def said(tables, step=400, equal_at=300, outside=()):
    return drift.verdict(tables, step, equal_at, list(outside) or [0] * len(tables), range(len(tables)))


def test_nothing_differs():
    assert said([{A: ONE, LR: "0.1"}] * 4) == ""
    assert said([{}, {}]) == ""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([ONE, ONE, TWO], "parameter 'a' differs on rank 2."),
        ([TWO, ONE, ONE], "parameter 'a' differs on rank 0."),
        ([ONE, TWO], "parameter 'a' differs on rank 1."),  # of equally many the first is taken for right
        ([ONE, TWO, ONE, THREE, ONE], "parameter 'a' differs on ranks 1,3."),
        ([ONE, ONE, None], "parameter 'a' is missing on rank 2."),
    ],
)
def test_the_ranks_that_differ_from_most_are_named(values, words):
    tables = [{B: ONE} if value is None else {A: value, B: ONE} for value in values]
    text = said(tables)
    assert text.startswith(
        f"the ranks have drifted apart after step 300 and before step 400: {words} Something changed"
    )
    assert "'b'" not in text


def test_verdicts_show_numbers_with_their_values():
    tables = [{LR: "0.1", COUNT: "7"}, {LR: "0.1", COUNT: "8"}, {LR: "0.2", COUNT: "7"}]
    assert "the optimizer's lr is 0.1 on ranks 0-1, 0.2 on rank 2; the optimizer's state 'global_step' is 7" in said(
        tables
    )


def test_the_rest_is_counted():
    tables = [{("parameter", str(i)): text for i in range(9)} for text in (ONE, TWO)]
    text = said(tables)
    assert "'2' differs on rank 1; and 6 more. " in text
    assert "'3'" not in text


@pytest.mark.parametrize(
    ("table", "options", "remedy"),
    [
        ({A: TWO}, {"equal_at": 0}, "before step 400: .* broadcast"),
        ({A: TWO}, {}, "Something changed them"),
        ({LR: "0.3"}, {"equal_at": 0}, "the same optimizer settings"),
        ({COUNT: "9"}, {"equal_at": 0}, "broadcast"),
        (
            {LR: "0.3", COUNT: "9"},
            {"outside": (0, 2)},
            r"outside of this wrapper \(0 on rank 0, 2 on rank 1\); let all",
        ),
    ],
)
def test_the_remedy_fits(table, options, remedy):
    usual = {A: ONE, LR: "0.1", COUNT: "7"}
    assert re.search(remedy, said([usual, {**usual, **table}], **options))


def test_not_finite_names_tensors_ranks_and_counts_the_rest():
    many = {str(i): "it is nan" for i in range(5)}
    text = finite.verdict([{}, many, {"1": "it is inf"}], range(3))
    assert text == (
        "gradients are not finite: '0' on rank 1 (it is nan); '1' on ranks 1-2 (it is nan); "
        "'2' on rank 1 (it is nan); and 2 more"
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 64, 65])
def test_what_is_not_flagged_as_large_cannot_overflow_in_a_sum(dtype, ranks):
    dtype = np.dtype(dtype)
    tensors = Plan((Tensor("w", (3,), dtype),), 1)
    largest = float(ml_dtypes.finfo(dtype).max)
    limit = next(2.0**e for e in range(1100) if finite.scan(tensors, [np.array([0, -(2.0**e), 1], dtype)], ranks))
    below = np.nextafter(limit, 0) if dtype == np.float64 else limit * (1 - float(ml_dtypes.finfo(dtype).eps) / 2)
    assert not finite.scan(tensors, [np.array([0, 1, below], dtype)], ranks)
    assert below * ranks <= largest / 2
    assert limit * ranks * 8 > largest  # and it is not flagged without need
    assert finite.scan(tensors, [np.array([0, 1, limit], dtype)], ranks) == finite.LARGE
    assert finite.scan(tensors, [np.array([0, np.inf, 1], dtype)], ranks) == finite.NONFINITE


def described(function="batches", **values):
    return LoaderArguments(function, tuple({"rows": 100, "seed": 0, **values}.items()))


TRAIN, OTHER, EVAL, STREAM = described(), described(seed=1), described(rows=9), described("stream")


@pytest.mark.parametrize(
    ("everyone", "words"),
    [
        ([[TRAIN], [TRAIN]], ""),
        ([[TRAIN], []], ""),
        ([[], []], ""),
        ([[EVAL, TRAIN], [TRAIN], [], [TRAIN, EVAL]], ""),
        ([[TRAIN], [OTHER], [TRAIN]], "seed=0 on ranks 4,6, seed=1 on rank 5"),
        ([[], [TRAIN], [described(rows=9, seed=1)]], "rows=100 on rank 5, rows=9 on rank 6; seed=0 on rank 5, seed=1"),
        ([[TRAIN, EVAL], [EVAL, OTHER]], "seed=0 on rank 4, seed=1 on rank 5. Samples would be skipped"),
        ([[TRAIN, EVAL], [OTHER]], "batches(rows=100, seed=0), batches(rows=9, seed=0) on rank 4; batches(rows=100, "),
        ([[TRAIN], [STREAM]], "batches(rows=100, seed=0) on rank 4; stream(rows=100, seed=0) on rank 5"),
    ],
)
def test_arguments_of_batches_differ_unless_one_ranks_are_among_the_others(everyone, words):
    said = difference(everyone, range(4, 4 + len(everyone)))
    assert words in said
    assert bool(said) == bool(words)

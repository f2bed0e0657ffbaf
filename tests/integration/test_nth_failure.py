"""Some runs of tests/faults: one call of the C library fails. `make test-nth` makes all of them."""

import shutil

import pytest
from harness import ROOT, python

RUNNER = ROOT / "tests/faults/nth_failure.py"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_call_that_fails_ends_in_success_or_one_clear_error():
    result = python(RUNNER, "--sample", timeout_s=240)
    assert (result.code, result.err) == (0, ""), result.text

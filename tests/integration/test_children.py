"""Ranks that are children of multiprocessing, which ends forked ones by os._exit."""

import json
import marshal
import pathlib
import re

import pytest
from harness import BIN, run

from allred.timeline.rank_file import _chunks

PROGRAM = pathlib.Path(__file__).parent / "children_program.py"
GOOD = ["end", "end_with_callback", "shut_down", "thread", "child_of_rank"]
BAD = {
    "fails": (1, "failed with exit code 1: KeyError: 'no such word'"),
    "exits": (2, "failed with exit code 2: SystemExit: 2"),
    "exits_with_text": (1, "failed with exit code 1: SystemExit: no data"),
    "exits_after_error": (1, "failed with exit code 1: KeyError: 'no such word'"),
    "dies": (3, "exit code 3"),
}


@pytest.mark.parametrize(
    ("method", "cases"),
    [
        ("fork", [*GOOD, *BAD]),
        pytest.param("forkserver", ["end", "fails"], marks=pytest.mark.full),
        pytest.param("spawn", ["end", "fails", "exits_after_error"], marks=pytest.mark.full),
        pytest.param("forkserver", [*GOOD, *BAD], marks=pytest.mark.full),
        pytest.param("spawn", [*GOOD, *BAD], marks=pytest.mark.full),
    ],
)
def test_the_end_of_a_child_of_multiprocessing_is_the_end_of_a_rank(method, cases, tmp_path):
    result = run(
        [BIN["mpich"] / "python", PROGRAM, method, tmp_path, *cases],
        100,
        {"ALLRED_BANNER": "0", "PYTHONPATH": str(PROGRAM.parents[1])},
    )
    assert result.code == 0, result.text
    found, results = json.loads(result.out)
    text = "\n".join(f"==== {name}: {code}\n{err}" for name, (code, err) in found.items())
    for case in cases:
        (code_0, err_0), (code_1, err_1) = found[f"{case}-0"], found[f"{case}-1"]
        if case in GOOD:
            assert (code_0, err_0, code_1, err_1) == (0, "", 0, ""), text
            timelines = [*(tmp_path / f"timeline-{case}").glob("*")]
            assert len(timelines) == 2, timelines
            for path in timelines:  # they have their last record
                chunks = _chunks(path.read_bytes())
                assert any(record[0] == "end" for chunk in chunks for record in marshal.loads(chunk)), path
        else:
            code, words = BAD[case]
            assert code_1 == code, text
            assert code_0 != 0, text
            assert re.search(rf"rank 1 on \S+ .*{words}", err_0), text
            assert "has not left" not in err_0 + err_1, text
    expected = [
        *([0, 1] if "end" in cases else []),
        *([["callback", index, "None"] for index in range(2)] if "end_with_callback" in cases else []),
        *([2.0, 2.0] if "thread" in cases else []),
        *(["child", "child"] if "child_of_rank" in cases else []),
    ]
    assert sorted(map(str, results)) == sorted(map(str, expected)), text

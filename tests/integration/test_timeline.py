"""Jobs that are recorded: a slow rank is named, a killed one leaves what it did, and what cannot be written is told."""

import collections
import contextlib
import io
import json
import os

import pytest
from harness import MPIS, mpirun, python

from allred.timeline import command

TRAIN = """
import time, numpy as np, allred
from allred import testing
allred.init(banner=False)
opt = {fault}(allred.distributed(allred.optim.SGD(lr=0.1)))
params = [np.zeros((500, 20), np.float32), np.zeros(10, np.float32)]
opt.broadcast(params)
for step in range({steps}):
    time.sleep({sleep})
    opt.step(params, [np.full_like(p, allred.rank()) for p in params])
works = [allred.allreduce_async(np.ones(1000), name=f"w{{i}}") for i in range(3)]
evens = allred.ProcessSet([0, 2])
if allred.size() > 2 and evens.included(): allred.allreduce(np.ones(3), name="evens", process_set=evens)
for work in works: work.wait()
allred.shutdown()
"""


def train(fault="", steps=10, sleep="0.1 * (allred.rank() == 1)"):
    return TRAIN.format(fault=fault, steps=steps, sleep=sleep)


def merged(directory):
    """What the command prints, and the events. Each span is on the page, too."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert command.main(["merge", str(directory)]) == 0
        text = out.getvalue()
        assert command.main(["show", str(directory)]) == 0
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    page = page_of(directory / "timeline.html")
    count = sum(len(row["spans"]) for row in page["rows"])
    assert count == sum(e["ph"] == "X" for e in events) + len({e["id"] for e in events if e["ph"] == "b"})
    assert {row["rank"] for row in page["rows"]} <= {e["pid"] for e in events}
    return text, events


def page_of(path):
    return json.loads(path.read_text().split('id="data">')[1].split("</script>")[0])


def spans(events):
    """The kinds of spans of each rank, once they are found to nest."""
    found, rows = collections.defaultdict(collections.Counter), collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((event["ts"], -event["dur"], event["cat"]))
            found[event["pid"]][event["cat"]] += 1
    for row in rows.values():
        inside = []
        for start, negative, _ in sorted(row):
            end = start - negative
            while inside and inside[-1] <= start + 1e-3:
                inside.pop()
            assert not inside or end <= inside[-1] + 1e-3, (start, end, inside)
            inside.append(end)
    return found


def balanced(events):
    """How often each started operation begins and ends: 0, if it does both."""
    found = collections.Counter()
    for event in events:
        if event["ph"] in "be":
            found[event["id"]] += 1 if event["ph"] == "b" else -1
    return found


@pytest.mark.parametrize(
    ("mpi", "backend"),
    [("mpich", "mpi"), *(pytest.param(mpi, "shm", marks=pytest.mark.full) for mpi in ("mpich", "openmpi"))],
)
def test_the_summary_names_the_slow_rank(mpi, backend, tmp_path):
    env = {"ALLRED_TIMELINE": str(tmp_path / "made" / "here"), "ALLRED_BACKEND": backend}
    result = mpirun(3, "-c", train(), mpi=mpi, env=env)
    assert (result.code, result.left) == (0, []), result.text
    out, events = merged(tmp_path / "made" / "here")
    assert "; 3 ranks, " in out, out
    assert "; one clock" in out, out
    assert "ignored" not in out, out
    assert "rank 1 was waited for longest: " in out, out
    found = spans(events)
    kinds = {"step", "negotiate", "allreduce", "apply", "wait"} if backend == "mpi" else {"step", "negotiate", "apply"}
    assert set(found) == {0, 1, 2}
    assert all(kinds <= set(each) for each in found.values()), found
    assert all(each["step"] == each["apply"] == 10 for each in found.values()), found
    assert all(each["allreduce"] + each["grouped_allreduce"] >= 10 for each in found.values()), found
    assert {(e["pid"], e["args"]["members"]) for e in events if e["ph"] == "b" and e["name"].startswith("allreduce w")}
    assert set(balanced(events).values()) == {0}


@pytest.mark.parametrize("mpi", MPIS)
def test_a_killed_rank_leaves_what_it_did(mpi, tmp_path):
    code = train("testing.kill_at(1, 4).into", sleep="0.3")
    result = mpirun(2, "-c", code, mpi=mpi, env={"ALLRED_TIMELINE": str(tmp_path)})
    assert result.code != 0, result.text
    out, events = merged(tmp_path)
    assert "rank-1.timeline has no end: its rank was killed or aborted, and its last records are missing" in out, out
    found = spans(events)
    assert 1 <= found[1]["step"] <= 3, found
    assert 1 <= found[0]["step"] <= 4, found


@pytest.mark.parametrize("mpi", MPIS)
def test_a_file_that_cannot_be_made_is_one_error_on_all_ranks(mpi, tmp_path):
    (tmp_path / "rank-1.timeline").mkdir()
    code = """
import allred
try:
    allred.init(banner=False)
except allred.InputError as error:
    print(f"{error}\\n", end="", flush=True)
"""
    result = mpirun(2, "-c", code, mpi=mpi, env={"ALLRED_TIMELINE": str(tmp_path)})
    lines = result.out.splitlines()
    assert (result.code, len(lines), len(set(lines))) == (0, 2, 1), result.text
    assert lines[0].startswith(f"ALLRED_TIMELINE='{tmp_path}' cannot be used (rank 1 on "), result.text
    assert lines[0].endswith("give a directory that every rank can write to"), result.text
    assert os.listdir(tmp_path) == ["rank-1.timeline"]


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path):
    os.symlink("/dev/full", tmp_path / "rank-1.timeline")
    result = mpirun(2, "-c", train(sleep="0.05"), env={"ALLRED_TIMELINE": str(tmp_path)})
    assert result.code == 0, result.text
    assert result.err.count("rank-1.timeline: No space left on device") == 1, result.text
    (tmp_path / "rank-1.timeline").unlink()
    out, events = merged(tmp_path)
    assert "2 ranks (no file of 1)" in out, out
    assert spans(events)[0]["step"] == 10


@pytest.mark.parametrize(
    ("locking", "servers", "workers"), [("1", 2, 1), pytest.param("0", 1, 2, marks=pytest.mark.full)]
)
def test_pushes_and_pulls_of_parameter_servers(locking, servers, workers, tmp_path):
    code = train().partition("works =")[0]
    env = {"ALLRED_TIMELINE": str(tmp_path), "ALLRED_MODE": "ps", "ALLRED_USE_LOCKING": locking}
    result = mpirun(3, "-c", code, env={**env, "ALLRED_NUM_PS": str(servers)})
    assert result.code == 0, result.text
    out, events = merged(tmp_path)
    found = spans(events)
    assert all(found[worker]["step"] == found[worker]["push+pull"] == 10 for worker in range(servers, 3)), found
    assert all(found[server]["push+pull"] == 10 * workers for server in range(servers)), found
    rows = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(server, f"worker {worker}") for server in range(servers) for worker in range(workers)} <= rows
    assert f"parameter server {servers - 1}" in out, out


def test_a_world_of_one_has_a_timeline_too_and_the_command_merges_it(tmp_path):
    result = python("-c", train(sleep="0"), env={"ALLRED_TIMELINE": str(tmp_path)})
    assert result.code == 0, result.text
    merge = python("-m", "allred", "timeline", "merge", tmp_path)
    assert merge.code == 0, merge.text
    assert "; 1 rank, " in merge.out, merge.text
    assert spans(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])[0]["apply"] == 10
    show = python("-m", "allred", "timeline", "show", tmp_path / "trace.json", "-o", tmp_path / "page.html")
    assert (show.code, show.out[-28:]) == (0, "clock; open it in a browser\n"), show.text
    assert page_of(tmp_path / "page.html")["size"] == 1


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "cannot read {file}: No such file or directory"),
        ("[1, 2", "{file} is no timeline of this version of allred; expected the directory that ALLRED_TIMELINE named"),
        ("[]", "{file} is no timeline"),
        ("[" * 200_000, "{file} is no timeline"),
        ('{"traceEvents": [{"ph": "X", "ts": NaN}]}', "{file} is no timeline"),
        ('{"traceEvents": []}', "{file} is no timeline"),
        ('{"traceEvents": [{"ph": "X", "pid": 0}]}', "{file} is no timeline"),
        (b"\xff\xfe", "{file} is no timeline"),
        ({}, "{file} has no files rank-*.timeline; expected the directory that ALLRED_TIMELINE named"),
        (
            '{"traceEvents": [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}}]}',
            "cannot write /no/such/page: No such file or directory; choose another path",
        ),
    ],
)
def test_what_cannot_be_shown_is_one_line(content, error, tmp_path, capsys):
    file = tmp_path / "file"
    if content == {}:
        file.mkdir()
    elif content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert command.main(["show", str(file), "-o", "/no/such/page"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert error.format(file=file) in err

"""Recording, reading with different clocks and damaged files, matching, trace and command."""

import json
import marshal
import mmap
import os
import pathlib
import shutil
import zlib

import numpy as np
import pytest

from allred.__main__ import main
from allred.comm import recording
from allred.comm.backends.shm import CHUNK_BYTES, ShmBackend
from allred.comm.bootstrap import SingleBootstrap
from allred.comm.communicator import Communicator
from allred.comm.ops import ReduceOp
from allred.errors import InputError
from allred.native._kernels import segment_bytes
from allred.timeline import command, rank_file, recorder
from allred.timeline.rank_file import ClockAlignment, read_timeline
from allred.timeline.recorder import Operation, Recorder, Track

MS = 10**6


def chunk(*records):
    data = marshal.dumps(list(records))
    return recorder.CHUNK.pack(len(data), zlib.crc32(data)) + data


def written(directory, rank, *records, job="a", size=2, start=0, end=0, time=1.0):
    """A file of a rank that has noted these records, and ended."""
    path = directory / f"rank-{rank}.timeline"
    about = {"job": job, "rank": rank, "size": size, "name": f"rank {rank}", "host": "h", "pid": 1, "time": time}
    path.write_bytes(recorder.MAGIC + chunk(("begin", {**about, "start": start})) + chunk(*records, ("end", end)))
    return path


def records_of(path):
    return [record for part in rank_file._chunks(path.read_bytes()) for record in marshal.loads(part)]


def call(start, end, grouped=False, members="all ranks"):
    """As C has noted it."""
    return ("calls", members, ["v", "w"], recorder.ROW.pack(start, end, 8, 1, grouped))


def started(kind, start, end, members="all ranks", agreed=0):
    return ("operation", members, kind, "w", start, agreed, end, 8)


def span(kind, start, end, row=""):
    return ("span", row, kind, "", start, end, 0)


def merge(directory, capsys):
    """The command's exit code, what it prints, and the events of the trace."""
    code = main(["timeline", "merge", str(directory)])
    out = capsys.readouterr().out
    return code, out, json.loads((directory / "trace.json").read_text())["traceEvents"]


def test_what_is_noted_can_be_read(tmp_path, monkeypatch):
    """Also where the system takes a few bytes at a time."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    mine = Recorder(str(tmp_path / "rank-0.timeline"))
    mine.begin({"rank": 0, "name": "rank 0", "start": 0})
    recorder.install(mine)
    with recorder.span("step", np.str_("opt")), recorder.span("apply", "opt", 12):
        pass
    mine._write_records()
    with pytest.raises(KeyError), recorder.span("pack"):
        raise KeyError
    recorder.install(None)
    with recorder.span("apply"):
        pass
    found = read_timeline(tmp_path / "rank-0.timeline")
    assert [(each.kind, each.name, each.nbytes) for each in found.spans] == [
        ("step", "opt", 0),
        ("apply", "opt", 12),
        ("pack", "", 0),
    ]
    step, apply, _ = found.spans
    assert step.start <= apply.start <= apply.end <= step.end
    assert found.left_out == ""


def test_a_timeline_begins_and_ends_with_a_world(tmp_path):
    """And is made anew where one was left open, by an init() that failed."""
    alone, path = SingleBootstrap(), tmp_path / "made" / "rank-0.timeline"
    recording.start("none", alone, range(1), 1.0)
    recording.compare_clocks_again()
    assert (recorder.current, os.listdir(tmp_path)) == (None, [])
    for spans in (100, 1):
        recording.start(str(path.parent), alone, range(1), 1.0)
        for _ in range(spans):
            with recorder.span("apply"):
                pass
        recorder.current._write_records()
    recording.compare_clocks_again()
    recording.stop()
    assert recorder.current is None
    assert [each[0] for each in records_of(path)] == ["begin", "clock", "span", "clock", "end"]
    found = read_timeline(path)
    assert (found.name, found.left_out, [each.kind for each in found.spans]) == ("rank 0", "", ["apply"])


def test_ranks_are_called_by_what_they_do():
    assert [recording._name(rank, range(2), 2) for rank in range(2)] == ["rank 0", "rank 1"]
    names = ["parameter server 0", "worker 0", "worker 1", "client 0", "client 1"]
    assert [recording._name(rank, range(1, 3), 5) for rank in range(5)] == names


def test_a_track_numbers_calls_and_started_operations_alike(tmp_path):
    """Long and short ways through a backend of its own kind; names of any kind, and one that is refused."""
    path = tmp_path / "rank-0.timeline"
    mine = Recorder(str(path))
    mine.begin({"rank": 0, "name": "rank 0", "start": 0})
    alone = Communicator(ShmBackend(0, 1, mmap.mmap(-1, segment_bytes(1, CHUNK_BYTES))), 1.0)
    alone.allreduce_blocking(np.zeros(7), True, ReduceOp.SUM, "before")
    alone.record(Track(mine, "all ranks"))
    alone.allreduce_blocking(np.zeros(3), True, ReduceOp.SUM, np.str_("short"))
    alone.broadcast(np.zeros(5, np.uint8), 0, "b")
    alone.grouped_allreduce_blocking([np.zeros(2), np.zeros(1)], True, ReduceOp.SUM, "two")
    alone.allreduce_blocking(np.zeros((4, 4))[::2], False, ReduceOp.SUM, "long")
    with pytest.raises(InputError):
        alone.allreduce_blocking(np.zeros(1), True, ReduceOp.SUM, pathlib.Path("wrong"))
    alone.queue.track.waited(Operation("barrier"), 1.5)
    alone.close()
    alone.close()
    mine.close()
    found = read_timeline(path)
    assert [(each.number, each.kind, each.name, each.nbytes, each.blocking) for each in found.operations] == [
        (0, "allreduce", "short", 24, True),
        (1, "broadcast", "b", 5, False),
        (2, "grouped_allreduce", "two", 24, True),
        (3, "allreduce", "long", 64, True),
        (4, "allreduce", "wrong", 0, True),
    ]
    calls = [each.kind for each in found.spans if each.kind != "wait"]
    assert calls == ["allreduce", "grouped_allreduce", "allreduce", "allreduce"]
    (wait,) = (each for each in found.spans if each.name == "barrier")
    assert (wait.row, wait.kind, wait.start, wait.nbytes) == ("", "wait", 1_500_000_000, 0)
    assert found.operations[-1].end < wait.end < found.end


def test_a_program_may_end_without_closing_anything(tmp_path):
    """Then what C has noted is fetched when the end is noted already; where that is nothing, there is no record."""
    path = tmp_path / "rank-0.timeline"
    mine = Recorder(str(path))
    mine.begin({"rank": 0, "name": "rank 0", "start": 0})
    alone, idle = (Communicator(ShmBackend(0, 1, mmap.mmap(-1, segment_bytes(1, CHUNK_BYTES))), 1.0) for _ in range(2))
    alone.record(Track(mine, "all ranks"))
    idle.record(Track(mine, "[0]"))
    alone.allreduce_blocking(np.zeros(3), True, ReduceOp.SUM, "last")
    mine.close()
    found = read_timeline(path)
    assert ([each.name for each in found.operations], found.left_out) == (["last"], "")
    assert sorted(each[0] for each in records_of(path)) == ["begin", "calls", "end"]
    alone.close()
    idle.close()


def test_a_file_that_was_cut_gives_what_is_whole(tmp_path):
    mine = written(tmp_path, 0, *(span("step", n, n + 1) for n in range(50)))
    data = mine.read_bytes()
    first = len(recorder.MAGIC) + recorder.CHUNK.size + recorder.CHUNK.unpack_from(data, len(recorder.MAGIC))[0]
    for length in (len(data) - 1, first + recorder.CHUNK.size, first + 3):
        mine.write_bytes(data[:length])
        found = read_timeline(mine)
        assert f"{mine}: ignored the last {length - first} bytes" in found.left_out
        assert (found.about["rank"], found.spans) == (0, [])
    flipped = bytearray(data)
    flipped[-5] ^= 1
    mine.write_bytes(flipped)
    assert "are incomplete" in read_timeline(mine).left_out
    mine.write_bytes(data + bytes(20))  # as a machine that loses power may leave it
    assert len(read_timeline(mine).spans) == 50
    assert f"{mine}: ignored the last 20 bytes" in read_timeline(mine).left_out


def test_a_file_without_its_end_is_of_a_rank_that_was_killed(tmp_path):
    path = tmp_path / "rank-0.timeline"
    mine = Recorder(str(path))
    mine.begin({"rank": 0, "name": "rank 0", "start": 5})
    found = read_timeline(path)
    assert (found.start, found.spans, found.operations) == (5, [], [])
    assert found.left_out.endswith("has no end: its rank was killed or aborted, and its last records are missing")
    mine.close()


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"something else")
    with pytest.raises(InputError, match="is not a timeline of this version"):
        read_timeline(tmp_path / "x")
    (tmp_path / "x").write_bytes(recorder.MAGIC)
    with pytest.raises(InputError, match="is empty"):
        read_timeline(tmp_path / "x")
    (tmp_path / "x").write_bytes(recorder.MAGIC + chunk(("begin", 7)))
    with pytest.raises(InputError, match="has invalid records: "):
        read_timeline(tmp_path / "x")


def test_a_full_disk_causes_one_warning_only(tmp_path, capfd):
    os.symlink("/dev/full", tmp_path / "rank-0.timeline")
    mine = Recorder(str(tmp_path / "rank-0.timeline"))
    mine.begin({})
    mine.add(span("step", 0, 1))
    mine.close()
    told = capfd.readouterr().err
    assert told.count("rank-0.timeline: No space left on device; the timeline of this rank ends here") == 1


@pytest.mark.parametrize("drift", [0.0, 1e-4, -3e-5])
def test_clocks_that_differ_and_drift_are_aligned(drift):
    def local(when):
        return 7 * 10**15 + round(when * (1 + drift))

    asked = [1000 * MS, 4000 * MS]
    clock = ClockAlignment(
        [(local(when), when - local(when), error) for when, error in zip(asked, (500, 400), strict=True)]
    )
    assert [abs(clock(local(when)) - when) <= 2 for when in (0, 1000 * MS, 2500 * MS, 9000 * MS)] == [True] * 4
    assert clock.max_error == 500


def test_one_measurement_gives_a_constant_offset():
    clock = ClockAlignment([(5, 300, 10)])
    assert [clock(0), clock(10**12)] == [300, 10**12 + 300]


def test_what_is_less_than_its_error_is_no_difference():
    clock = ClockAlignment([(0, 300, 400), (10**9, -200, 300)])
    assert (clock(77), clock.max_error) == (77, 0)
    assert ClockAlignment([(0, 300, 400), (10**9, -400, 300)])(10**9) == 10**9 - 400


def test_ranks_with_other_clocks_are_compared_by_the_chiefs(tmp_path):
    ahead = 10**15
    one = [("clock", 0, 0, 0), call(1 * MS, 9 * MS)]
    other = [("clock", ahead, -ahead, 1000), call(ahead + 8 * MS, ahead + 9 * MS)]
    ranks = [read_timeline(written(tmp_path, 0, *one)), read_timeline(written(tmp_path, 1, *other, start=ahead))]
    (found,) = command.match(ranks)
    assert found.arrivals == {0: 1 * MS, 1: 8 * MS}
    assert (found.last, found.lateness) == (1, 7 * MS)
    waits = command.waits([found], ranks)
    assert [(each.start, each.end, each.name) for each in waits[0]] == [(1 * MS, 8 * MS, "1")]
    assert 1 not in waits


def test_operations_of_the_same_number_and_kind_belong_together(tmp_path):
    one = [call(0, 1), call(2, 3), started("broadcast", 4, 5), call(6, 7), call(1, 2, members="[0]")]
    other = [call(1, 3), call(4, 5), call(6, 7), call(8, 9)]
    ranks = [read_timeline(written(tmp_path, 0, *one)), read_timeline(written(tmp_path, 1, *other))]
    assert [each.arrivals for each in command.match(ranks)] == [{0: 0, 1: 1}, {0: 2, 1: 4}]


def test_a_rank_that_has_joined_is_not_waited_for(tmp_path):
    files = [call(0, 1), call(2, 9)], [call(1, 2), call(3, 9)], [call(0, 1), started("join", 8, 9)]
    ranks = [read_timeline(written(tmp_path, rank, *records)) for rank, records in enumerate(files)]
    assert [each.arrivals for each in command.match(ranks)] == [{0: 0, 1: 1, 2: 0}, {0: 2, 1: 3}]


def test_only_blocked_ranks_wait_and_for_one_rank_at_a_time(tmp_path):
    """Rank 0 has started an operation of all and one of a set, looks elsewhere for a moment, and waits for both."""
    both = [started("allreduce", 0, 100, members) for members in ("all ranks", "[0, 1]")]
    waits = [span("wait", 40, 45), span("wait", 47, 100), span("wait", 0, 100, row="another thread")]
    late = [call(50, 60), call(70, 80, members="[0, 1]")]
    files = [*both, *waits], late, [call(10, 60)]
    ranks = [read_timeline(written(tmp_path, rank, *records)) for rank, records in enumerate(files)]
    found = command.waits(command.match(ranks), ranks)
    assert [(each.start, each.end) for each in found[0]] == [(40, 45), (47, 50), (50, 70)]


@pytest.mark.parametrize("begun", [call(3, 0), ("call", "all ranks", "allreduce", 3)])
def test_what_a_call_has_started_is_that_call(begun, tmp_path):
    """Not what was started before it, nor what comes later, nor what is of another kind, nor of other ranks."""
    refused = [call(0, 0), ("call", "all ranks", "allreduce", 1), started("broadcast", 2, 9)]
    operations = [
        started("allreduce", 3, 8, agreed=7),
        started("allreduce", 5, 9),
        ("call", "all ranks", "allreduce", 6),
    ]
    other = started("allreduce", 7, 8, "the others")
    found = read_timeline(written(tmp_path, 0, *refused, ("clock", 0, 100, 0), *operations, begun, other)).operations
    assert [(each.number, each.blocking, each.start, each.agreed, each.end) for each in found] == [
        (0, False, 102, 0, 109),
        (1, True, 103, 107, 108),
        (2, False, 105, 0, 109),
        (0, False, 107, 0, 108),
    ]


TABLES = """
where the time went
        recorded  negotiate  allreduce   apply   wait    push  rest of step  outside  waits for others
rank 0    0.10 s     20.0 %     30.0 %  20.0 %  9.0 %   0.0 %         4.0 %   17.0 %            25.0 %
rank 1    0.10 s      0.0 %     10.0 %   5.0 %  0.0 %  43.0 %         0.0 %   60.0 %             5.0 %
rank 2    0.10 s      0.0 %      5.0 %   0.0 %  0.0 %   0.0 %         0.0 %   95.0 %             0.0 %

arrival at collectives (medians)
        before the last one    last        by  others waited for it
rank 0            25.000 ms  0 of 1         -                0.00 s
rank 1             5.000 ms  0 of 1         -                0.00 s
rank 2             0.000 ms  1 of 1  5.000 ms                0.03 s

who (row) waited for whom (column)
        rank 0  rank 1  rank 2
rank 0       -  0.00 s  0.03 s
rank 1  0.00 s       -  0.01 s
rank 2  0.00 s  0.00 s       -

rank 2 was waited for longest: 0.03 s in all; it arrived last at 1 of 1 collectives, by 5.000 ms (median)
"""


def test_all_tables_and_the_rows_of_a_trace(tmp_path, capsys):
    """Time is that of the innermost span, but for waits in anything but a step; spans as they are noted, in ms."""
    ahead = 10**9
    files = {
        0: [
            span("wait", 12, 30), span("negotiate", 10, 30), span("wait", 32, 60), call(30 * MS, 60 * MS),
            span("apply", 60, 80),
            span("wait", 82, 88), span("step", 10, 90), span("wait", 92, 95), ("end", 100),
        ],
        1: [
            span("apply", 25, 30, "worker 0"), span("push", 20, 40, "worker 0"), span("push", 22, 50, "worker 1"),
            call(50 * MS, 60 * MS), ("end", 100),
        ],
        2: [
            ("clock", ahead, -ahead, 0), call((ahead + 55) * MS, (ahead + 60) * MS),
            ("operation", "all ranks", "barrier", "", ahead + 70, 0, ahead + 80, 0), ("end", ahead + 100),
        ],
    }  # fmt: skip
    for rank, records in files.items():
        in_ns = (tuple(x * MS if isinstance(x, int) else x for x in record) for record in records)
        written(tmp_path, rank, *in_ns, size=3, start=ahead * MS * (rank == 2))
    _, out, events = merge(tmp_path, capsys)
    assert out.partition("\n")[2] == TABLES
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {
        (0, 0): "program", (0, 1): "waits for",
        (1, 0): "program", (1, 1): "worker 0", (1, 2): "worker 1", (1, 3): "waits for",
        (2, 0): "program",
    }  # fmt: skip
    assert [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"]] == [
        (0, 1, "rank 2", 30e3, 25e3),
        (1, 1, "push", 20e3, 20e3),
        (1, 1, "apply", 25e3, 5e3),
        (1, 2, "push", 22e3, 28e3),
        (1, 3, "rank 2", 50e3, 5e3),
    ]
    assert [(e["ph"], e["name"]) for e in events if e.get("cat") == "operation"] == [("b", "barrier"), ("e", "barrier")]


def test_the_command_writes_a_trace_and_names_the_awaited_rank(tmp_path, capsys):
    written(tmp_path, 0, *(call(n * 10 * MS, n * 10 * MS + 8 * MS) for n in range(5)), size=3)
    written(tmp_path, 1, *(call(n * 10 * MS + 6 * MS, n * 10 * MS + 8 * MS) for n in range(5)), size=3)
    code, out, events = merge(tmp_path, capsys)
    assert code == 0
    assert "a job of" in out
    assert "3 ranks (no file of 2), 20 spans; one clock" in out
    assert (
        "rank 1 was waited for longest: 0.03 s in all; it arrived last at 5 of 5 collectives, by 6.000 ms (median)"
        in out
    )
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 (h)", "rank 1 (h)"}
    waits = [event for event in events if event["ph"] == "X" and event["cat"] == "wait"]
    assert {(event["pid"], event["name"], event["dur"]) for event in waits} == {(0, "rank 1", 6000.0)}
    assert len([event for event in events if event["ph"] == "X" and event["cat"] == "allreduce"]) == 10


def test_started_operations_are_events_of_their_own(tmp_path, capsys):
    operation = ("operation", "all ranks", "allgather", "x", 2000, 3000, 6000, 8)
    written(tmp_path, 0, operation, ("operation", "all ranks", "barrier", "", 2500, 0, 7000, 8), size=1, start=1000)
    _, _, events = merge(tmp_path, capsys)
    assert [(e["ph"], e["id"], e["name"], e["ts"]) for e in events if e.get("cat") == "operation"] == [
        ("b", "0.0", "allgather x", 1.0),
        ("b", "0.0", "negotiate", 1.0),
        ("e", "0.0", "negotiate", 2.0),
        ("e", "0.0", "allgather x", 5.0),
        ("b", "0.1", "barrier", 1.5),
        ("e", "0.1", "barrier", 6.0),
    ]


def test_files_of_an_earlier_job_are_left_out(tmp_path, capsys):
    written(tmp_path, 0, size=1, job="new", time=2.0)
    written(tmp_path, 1, size=2, job="old", time=1.0)
    _, out, events = merge(tmp_path, capsys)
    assert "ignored: files of an earlier job, ranks 1" in out
    assert {event["pid"] for event in events} == {0}


def test_files_that_are_no_good_are_named_and_the_others_merged(tmp_path, capsys):
    one = written(tmp_path, 0, call(0, MS))
    written(tmp_path, 1, call(0, MS))
    shutil.copy(one, tmp_path / "rank-0 (copy).timeline")
    (tmp_path / "rank-2.timeline").mkdir()
    (tmp_path / "rank-3.timeline").symlink_to("nowhere")
    code, out, events = merge(tmp_path, capsys)
    assert code == 0
    assert f"ignored: {one} has the same rank and job as {tmp_path}/rank-0 (copy).timeline" in out
    assert f"ignored: cannot read {tmp_path}/rank-2.timeline: Is a directory" in out
    assert f"ignored: cannot read {tmp_path}/rank-3.timeline: No such file or directory" in out
    assert sum(each["name"] == "allreduce w" for each in events) == 2


def test_a_trace_that_cannot_be_written_is_named(tmp_path, capsys):
    written(tmp_path, 0, call(0, MS))
    assert main(["timeline", "merge", str(tmp_path), "--output", "/dev/full"]) == 2
    assert (
        "cannot write /dev/full: No space left on device; choose another path with --output FILE"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_without_a_timeline(there, tmp_path, capsys):
    assert main(["timeline", "merge", str(tmp_path / ("" if there else "missing"))]) == 2
    assert "has no files rank-*.timeline; expected the directory that ALLRED_TIMELINE named" in capsys.readouterr().err


def test_many_ranks_get_no_matrix_but_the_longest_waits(tmp_path):
    found = {rank: {0: rank * 10**9} for rank in range(1, 20)}
    text = command._wait_table({rank: f"rank {rank}" for rank in range(20)}, found)
    assert text.splitlines()[0] == "rank 19 waited 19.00 s for rank 0"
    assert len(text.splitlines()) == 10

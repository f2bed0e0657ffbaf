"""The doctor's findings, watchdog, messages between ranks, trials, GPUs and `info`, from given facts."""

import dataclasses
import itertools
import os
import subprocess
import sys

import pytest
from doctor_facts import MiB, finding_about, rank_facts, verdicts, write_files

from allred import config
from allred.doctor import command, findings, host, info, trials
from allred.doctor.findings import FAIL, NOTE, OK, WARN, Finding, ProbeFailure, RankReport, Topic, compare, rank_names
from allred.errors import CollectiveTimeout

# ---- findings


def test_ranks_that_differ_are_named_by_number_and_host():
    facts = rank_facts(1, 1, 1, 16, hosts=("nodeA", "nodeA", "nodeB", "nodeB"))
    assert compare(facts, lambda n: f"{n} threads") == "rank 3 on nodeB: 16 threads; other ranks: 1 threads"
    assert compare(facts[:3], str) == "1"
    assert compare(rank_facts(1, 2), str) == "rank 0 on nodeA: 1; rank 1 on nodeA: 2"
    assert compare(rank_facts(1, 2, 2, 1, 1), str) == "ranks 1-2 on nodeA: 2; other ranks: 1"


def test_other_topics_continue_if_a_probe_or_a_diagnosis_raises():
    def diagnose(there):
        return [Finding(OK, "good", f"{len(there)} ranks")]

    topics = [
        Topic("bad probe", lambda: 1 / 0, diagnose),
        Topic("bad diagnosis", lambda: 1, lambda there: there[9]),
        Topic("good", lambda: 1, diagnose),
    ]
    reports = [RankReport(rank, "a", findings.probe(topics)) for rank in (0, 1)]
    bad, worse, good = findings.diagnose(topics, reports)
    found = "could not be examined: ZeroDivisionError: division by zero (ranks 0-1 on a)"
    assert bad == Finding(NOTE, "bad probe", found)
    assert worse == Finding(NOTE, "bad diagnosis", "could not be examined: IndexError: list index out of range")
    assert good == Finding(OK, "good", "2 ranks")


def test_a_topic_is_diagnosed_from_the_ranks_whose_probe_succeeded():
    failure = ProbeFailure("gone")
    found = findings.diagnose(
        [Topic("t", lambda: 1, lambda there: [Finding(OK, "t", rank_names(there))])],
        [RankReport(0, "a", {"t": 1}), RankReport(1, "b", {"t": failure}), RankReport(2, "b", {"t": failure})],
    )
    assert [one.found for one in found] == ["rank 0 on a", "could not be examined: gone (ranks 1-2 on b)"]


def test_only_a_failure_makes_the_exit_code():
    assert findings.exit_code([Finding(verdict, "t", "") for verdict in (OK, NOTE, WARN)]) == 0
    assert findings.exit_code([Finding(OK, "t", ""), Finding(FAIL, "t", "")]) == 1


def test_a_disabled_printer_prints_nothing(capsys):
    printer = findings.ReportPrinter(as_json=False)
    printer.enabled = False
    printer.add([Finding(FAIL, "t", "found")])
    assert printer.end() == 1
    assert capsys.readouterr().out == ""


# ---- GPUs

GPU = host.GpuFacts("570.86", 2, "13.6.0", "", 12080, 12090, ("H100", "H100"), 22707)


@pytest.mark.parametrize(
    ("change", "verdict", "text"),
    [
        ({}, OK, "2 x H100; driver 570.86 (CUDA 12.8), CUDA 12.9, cupy 13.6.0"),
        ({"cupy": ""}, NOTE, "2 devices, driver 570.86, but cupy is not installed"),
        ({"cupy": "", "device_files": 0}, NOTE, "none, and cupy is not installed"),
        ({"error": "CUDARuntimeError: cudaErrorNoDevice"}, WARN, "cupy does not work: CUDARuntimeError"),
        ({"error": "CUDARuntimeError: cudaErrorNoDevice", "device_files": 0}, NOTE, "cupy does not work"),
        ({"cuda_runtime": 13000}, WARN, "cupy needs a newer CUDA than the driver supports"),
    ],
)
def test_gpus(change, verdict, text):
    lines = host.diagnose_gpus(rank_facts(dataclasses.replace(GPU, **change)))
    assert (lines[0].topic, lines[0].verdict) == ("GPU", verdict)
    assert lines[0].found.startswith(text)
    assert len(lines) == (2 if verdict == OK else 1)


def test_nccl_and_more_ranks_than_devices():
    lines = host.diagnose_gpus(rank_facts(GPU, GPU, GPU))
    assert finding_about(lines, "NCCL").found.startswith("2.27.7")
    assert [one.found for one in lines if one.topic == "GPU"][1] == "3 ranks for 2 devices on nodeA"


FAKE_CUPY = """
class runtime:
    runtimeGetVersion = driverGetVersion = staticmethod(lambda: 12080)
    getDeviceCount = staticmethod(lambda: 1)
    getDeviceProperties = staticmethod(lambda i: {"name": b"Fake GPU"})
class nccl:
    get_version = staticmethod(lambda: 22805)
"""


def test_cupy_is_probed_in_a_new_process(tmp_path, monkeypatch):
    write_files(tmp_path, {"cupy/__init__.py": "__version__, arange = '13.0', range", "cupy/cuda.py": FAKE_CUPY})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = host.probe_gpus()
    assert (facts.cupy, facts.devices, facts.nccl, facts.error) == ("13.0", ("Fake GPU",), 22805, "")
    write_files(tmp_path, {"cupy/__init__.py": "__version__ = '14'; arange = lambda _: open('cuda_fp16.h')"})
    assert host.probe_gpus().error == "FileNotFoundError: [Errno 2] No such file or directory: 'cuda_fp16.h'"
    write_files(tmp_path, {"cupy/__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"})
    assert host.probe_gpus().error == "the process that loaded it was killed by signal 11"
    write_files(tmp_path, {"cupy/__init__.py": "raise ImportError('libcuda.so.1: not found')"})
    assert host.probe_gpus().error == "ImportError: libcuda.so.1: not found"
    assert "cupy" not in sys.modules


# ---- software and trials


def test_software():
    facts = info.probe()
    assert verdicts(info.diagnose(rank_facts(facts, facts)))["software"] == OK
    other = dataclasses.replace(facts, numpy="1.0", settings={"timeout_s": 5.0}, extension=False)
    lines = info.diagnose(rank_facts(dataclasses.replace(facts, settings={"timeout_s": 6.0}), other))
    assert verdicts(lines) == {"software": WARN, "C extension": WARN, "settings": FAIL}


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ([trials.InitResult("mpi", "rank 1 lacks the C extension", 1)] * 2, WARN),
        ([trials.InitResult("mpi", "every rank is on a node of its own", 2)] * 2, OK),
        ([trials.InitResult("mpi", "as requested", 1)] * 2, OK),
        ([trials.InitResult("shm", "ranks share a node", 1)] * 2, OK),
        ([trials.InitResult(error="ConfigError: no")] * 2, FAIL),
    ],
)
def test_backends(facts, verdict):
    assert [one.verdict for one in trials.diagnose_init(rank_facts(*facts))] == [verdict]


@pytest.mark.parametrize(
    ("us", "hosts", "verdict"), [(5.0, "aa", OK), (600.0, "aa", WARN), (600.0, "ab", OK)]
)  # fmt: skip
def test_a_slow_small_allreduce_on_one_host_is_a_warning(us, hosts, verdict):
    results = [trials.AllreduceResult(4, us, ""), trials.AllreduceResult(4 * MiB, 1000.0, "")]
    (found,) = trials.diagnose_allreduce(rank_facts(results, results, hosts=hosts))
    assert found.verdict == verdict
    assert "4 MiB 1,000 us, 4.194 GB/s; sums are correct" in found.found


def test_wrong_sums_of_mpi_itself():
    assert trials.diagnose_mpi(rank_facts("", ""))[0].verdict == OK
    (found,) = trials.diagnose_mpi(rank_facts("", "64 KiB: element 0 is 2, and should be 1"))
    assert (found.verdict, found.found[:24]) == (FAIL, "wrong on rank 1 on nodeA")


@pytest.mark.parametrize(
    ("way", "ranks", "hosts", "verdict"),
    [("", 2, "aa", WARN), ("", 1, "ab", NOTE), ("memfd through /proc", 2, "aa", OK)],
)
def test_shared_memory(way, ranks, hosts, verdict):
    (found,) = trials.diagnose_sharing(rank_facts(*[trials.SharingResult(way, ranks)] * 2, hosts=hosts))
    assert found.verdict == verdict


@pytest.mark.parametrize("count", range(2, 8))
def test_rounds_have_each_pair_of_hosts_once_and_each_host_at_most_once_a_round(count):
    rounds = trials.rounds(count)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(itertools.combinations(range(count), 2))
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert len(hosts) == len(set(hosts))


def test_slow_pairs_of_hosts_are_named():
    good, slow = trials.Pair(("a", "b"), 40.0, 1.0), trials.Pair(("a", "c"), 45.0, 0.4)
    late = trials.Pair(("b", "c"), 700.0, 0.9)
    assert trials.diagnose_pairs(rank_facts([], []))[0].verdict == NOTE
    assert trials.diagnose_pairs(rank_facts([slow], []))[0].verdict == OK  # nothing to compare it with
    (found,) = trials.diagnose_pairs(rank_facts([good, slow], [late]))
    assert found.verdict == WARN
    assert found.found.startswith("slow: a - c 45 us, 0.4 GB/s; b - c 700 us, 0.9 GB/s; the best of 3 pairs: 40 us")
    (found,) = trials.diagnose_pairs(rank_facts([good], [good]))
    assert (found.verdict, "; the slowest: a - b 40 us" in found.found) == (OK, True)


def test_the_whole_report_of_this_process():
    lines = command.diagnose([RankReport(0, "nodeA", findings.probe(command.TOPICS))])
    assert not [one for one in lines if "could not be examined" in one.found]
    assert all(one.remedy for one in lines if one.verdict in (WARN, FAIL))


# ---- messages and watchdog


class Silent:
    """A communicator on which no message arrives."""

    def __init__(self, rank):
        self.rank = rank

    def Get_rank(self):  # noqa: N802
        return self.rank

    def Get_size(self):  # noqa: N802
        return 3

    def improbe(self, **_):
        return None

    def isend(self, value, dest):
        return self

    def test(self):
        return False, None


def test_messages_between_ranks_have_a_time_limit():
    assert command.gather(Silent(0), "own", limit_s=0.01) == {0: "own"}
    for call in (
        lambda: command.gather(Silent(1), "own", limit_s=0.01),
        lambda: command.broadcast(Silent(0), "answer", limit_s=0.01),
        lambda: command.broadcast(Silent(1), None, limit_s=0.01),
    ):
        with pytest.raises(CollectiveTimeout):
            call()
    assert command.gather(None, "own", limit_s=0) == {0: "own"}


WATCHED = """
import os, sys, time
from allred.doctor.watchdog import Watchdog
watchdog = Watchdog(prints={prints})
with watchdog.phase(50, "late 1", "gone 1"):
    pass
with watchdog.phase({limit_s}, "late 2", "gone 2"):
    {what}
with watchdog.phase(50, "late 3", "gone 3"):
    pass
watchdog.close()
"""


@pytest.mark.parametrize(
    ("what", "limit_s", "prints", "code", "out"),
    [
        ("pass", 50, True, 0, ""),
        ("os._exit(3)", 50, True, 3, "gone 2\n"),
        ("os._exit(3)", 50, False, 3, ""),
        ("time.sleep(60)", 0.1, True, -9, "late 2\n"),
        ("time.sleep(60)", 0.1, False, -9, ""),
        ("sys.exit(4)", 50, True, 4, ""),
    ],
)
def test_the_watchdog_reports_a_process_that_hangs_or_ends(what, limit_s, prints, code, out):
    program = WATCHED.format(what=what, limit_s=limit_s, prints=prints)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout) == (code, out), result.stderr


# ---- info


def test_every_setting_is_listed_with_its_source():
    records = info.settings({"ALLRED_TIMEOUT_S": "5", "ALLRED_BUCKET_BYTES": "a lot", "ALLRED_X": "1", "PATH": "/"})
    by_name = {record["variable"]: record for record in records}
    assert len(records) == len(dataclasses.fields(config.Config)) + 1
    for field in dataclasses.fields(config.Config):
        record = by_name[f"ALLRED_{field.name.upper()}"]
        assert record["default"] == field.default
        assert field.metadata["meaning"] in record["meaning"]
    assert (by_name["ALLRED_TIMEOUT_S"]["value"], by_name["ALLRED_TIMEOUT_S"]["source"]) == (5.0, "variable")
    assert by_name["ALLRED_BUCKET_BYTES"]["source"] == "variable, cannot be used"
    assert "is not a size" in by_name["ALLRED_BUCKET_BYTES"]["meaning"]
    assert by_name["ALLRED_BANNER"]["source"] == "default"
    assert by_name["ALLRED_X"]["source"] == "unknown variable"
    assert "PATH" not in by_name


def test_probes_neither_start_mpi_nor_load_cupy():
    code = (
        "import sys; from allred.doctor import command, findings; findings.probe(command.TOPICS)\n"
        "print([m for m in ('mpi4py.MPI', 'cupy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env={**os.environ}
    )
    assert result.stdout == "[]\n", result.stderr

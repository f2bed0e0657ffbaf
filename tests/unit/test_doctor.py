"""The pure parts of the doctor: what is judged from given facts, ranks that differ, cgroups, settings."""

import dataclasses
import os
import subprocess
import sys

import pytest

from allred import config
from allred.cluster import limits
from allred.doctor import (
    cores,
    gather,
    gpu,
    info,
    installation,
    launch,
    library,
    line,
    memory,
    network,
    printer,
    ranks,
    start,
    topics,
    trials,
)
from allred.doctor.line import FAIL, NOTE, OK, WARN, Line
from allred.doctor.ranks import Rank, Seen, Topic, Unseen
from allred.errors import CollectiveTimeout

GiB, MiB = 2**30, 2**20


def seen(*facts, hosts=()):
    """The facts of all ranks, on one host unless told otherwise."""
    return [Seen(rank, hosts[rank] if hosts else "nodeA", fact) for rank, fact in enumerate(facts)]


def verdicts(lines):
    return {found.topic: found.verdict for found in lines}


def about(lines, topic):
    (found,) = [one for one in lines if one.topic == topic]
    return found


# ---- lines and ranks


def test_ranks_that_differ_are_named_by_number_and_host():
    facts = seen(1, 1, 1, 16, hosts=("nodeA", "nodeA", "nodeB", "nodeB"))
    assert ranks.compared(facts, lambda n: f"{n} threads") == "rank 3 on nodeB: 16 threads; the others: 1 threads"
    assert ranks.compared(facts[:3], str) == "1"
    assert ranks.compared(seen(1, 2), str) == "rank 0 on nodeA: 1; rank 1 on nodeA: 2"
    assert ranks.compared(seen(1, 2, 2, 1, 1), str) == "ranks 1-2 on nodeA: 2; the others: 1"


def test_a_probe_or_a_judgement_that_raises_does_not_end_the_others():
    def judge(there):
        return [Line(OK, "good", f"{len(there)} ranks")]

    some = [
        Topic("bad look", lambda: 1 / 0, judge),
        Topic("bad judge", lambda: 1, lambda there: there[9]),
        Topic("good", lambda: 1, judge),
    ]
    lines = ranks.judge(some, [Rank(0, "a", ranks.look(some)), Rank(1, "b", ranks.look(some))])
    assert [(one.topic, one.verdict) for one in lines] == [("bad look", NOTE), ("bad judge", NOTE), ("good", OK)]
    assert lines[0].found == "could not be looked at: ZeroDivisionError: division by zero (ranks 0-1)"
    assert lines[2].found == "2 ranks"


def test_a_topic_seen_on_some_ranks_only_is_judged_for_them():
    lines = ranks.judge(
        [Topic("t", lambda: 1, lambda there: [Line(OK, "t", ranks.who(there))])],
        [Rank(0, "a", {"t": 1}), Rank(1, "b", {"t": Unseen("gone")}), Rank(2, "b", {"t": Unseen("gone")})],
    )
    assert [one.found for one in lines] == ["rank 0 on a", "could not be looked at: gone (ranks 1-2 on b)"]


def test_only_a_failure_makes_the_exit_code():
    assert line.exit_code([Line(verdict, "t", "") for verdict in (OK, NOTE, WARN)]) == 0
    assert line.exit_code([Line(OK, "t", ""), Line(FAIL, "t", "")]) == 1


def test_a_rank_that_does_not_speak_prints_nothing(capsys):
    one = printer.Printer(as_json=False)
    one.speaks = False
    one.add([Line(FAIL, "t", "found")])
    assert one.end() == 1
    assert capsys.readouterr().out == ""


# ---- processors


def facts_of_cores(allowed, threads=1, quota=None, measured=True):
    return cores.Cores(frozenset(allowed), 8, quota, threads, "openblas", measured)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([facts_of_cores(range(8))] * 4, {"binding": OK, "cores": OK, "BLAS threads": OK}),
        ([facts_of_cores(range(8), threads=8)] * 4, {"binding": OK, "cores": OK, "BLAS threads": WARN}),
        ([facts_of_cores(range(8), threads=8)], {"binding": OK, "cores": OK, "BLAS threads": NOTE}),
        ([facts_of_cores({0}), facts_of_cores({1})], {"binding": OK, "cores": OK, "BLAS threads": OK}),
        ([facts_of_cores({0}), facts_of_cores({0})], {"binding": WARN, "cores": WARN, "BLAS threads": OK}),
        ([facts_of_cores({0, 1}), facts_of_cores({1, 2})], {"binding": WARN, "cores": OK, "BLAS threads": OK}),
        ([facts_of_cores({0}, 3), facts_of_cores({1, 2, 3}, 1)], {"binding": OK, "cores": OK, "BLAS threads": WARN}),
        (
            [facts_of_cores(range(8), 1), facts_of_cores(range(8), 2)],
            {"binding": OK, "cores": OK, "BLAS threads": WARN},
        ),
        ([facts_of_cores(range(2))] * 3, {"binding": OK, "cores": WARN, "BLAS threads": OK}),
        (
            [facts_of_cores(range(8), quota=2.0)] * 2,
            {"binding": OK, "cores": OK, "cpu quota": WARN, "BLAS threads": OK},
        ),
        (
            [facts_of_cores(range(8), quota=2.0)] * 3,
            {"binding": OK, "cores": WARN, "cpu quota": WARN, "BLAS threads": OK},
        ),
    ],
)
def test_cores_and_threads(facts, expected):
    assert verdicts(cores.judge(seen(*facts))) == expected


def test_the_remedy_against_too_many_threads_is_each_ranks_share():
    lines = cores.judge(seen(*[facts_of_cores(range(8), threads=8)] * 4))
    found = about(lines, "BLAS threads")
    assert found.found == "8 threads (openblas); together 32 on 8 cores of nodeA"
    assert found.remedy == "export OMP_NUM_THREADS=2 before mpirun"


def test_ranks_of_several_hosts_are_counted_by_host():
    facts = [facts_of_cores(range(2))] * 4
    assert about(cores.judge(seen(*facts, hosts="aabb")), "cores") == Line(
        OK, "cores", "enough for the ranks of each of the 2 hosts"
    )
    assert about(cores.judge(seen(*facts, hosts="aaab")), "cores").found == "3 ranks on 2 cores of a"


def test_without_threadpoolctl_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    facts = cores.look()
    assert (facts.measured, facts.blas_threads, facts.blas) == (False, 3, "OPENBLAS_NUM_THREADS=3")
    lines = cores.judge(seen(dataclasses.replace(facts, allowed=frozenset(range(4)))))
    assert "pip install 'allred[doctor]'" in next(one.remedy for one in lines if "threadpoolctl" in one.found)


# ---- cgroups


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_limits_of_cgroups_version_2_come_from_every_level_above(tmp_path):
    write(
        tmp_path,
        {"a/memory.max": "1000", "a/b/memory.max": "max", "a/cpu.max": "max 100000", "a/b/cpu.max": "150000 100000"},
    )
    assert limits.look(tmp_path, "0::/a/b\n") == limits.Limits(1000, 1.5)
    assert limits.look(tmp_path, "0::/elsewhere\n") == limits.Limits(None, None)


def test_limits_of_cgroups_version_1(tmp_path):
    write(
        tmp_path,
        {
            "memory/job/memory.limit_in_bytes": "2000",
            "memory/memory.limit_in_bytes": str(2**63 - 4096),
            "cpu,cpuacct/job/cpu.cfs_quota_us": "200000",
            "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
    )
    own = "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/job\n0::/job\n"
    assert limits.look(tmp_path, own) == limits.Limits(2000, 2.0)


def test_in_a_container_the_mount_itself_is_looked_at(tmp_path):
    write(tmp_path, {"memory.max": "3000", "cpu.max": "50000 100000"})
    assert limits.look(tmp_path, "0::/system.slice/docker-1.scope\n") == limits.Limits(3000, 0.5)


# ---- memory

MEMORY = memory.Memory(GiB, GiB, None, False, 64 * GiB, None)


@pytest.mark.parametrize(
    ("change", "topic", "verdict"),
    [
        ({}, "/dev/shm", OK),
        ({"shm_free": 32 * MiB}, "/dev/shm", OK),
        ({"shm_free": 32 * MiB - 1}, "/dev/shm", WARN),
        ({"shm_bytes": None}, "/dev/shm", FAIL),
        ({"unused_files": 1, "unused_bytes": 4096}, "/dev/shm", NOTE),
        ({"locked_bytes": 8 * MiB}, "locked memory", OK),
        ({"locked_bytes": 8 * MiB, "rdma": True}, "locked memory", WARN),
        ({"rdma": True}, "locked memory", OK),
        ({"cgroup_bytes": 4 * GiB}, "memory", NOTE),
        ({"cgroup_bytes": 65 * GiB}, "memory", OK),
    ],
)
def test_memory(change, topic, verdict):
    lines = memory.judge(seen(*[dataclasses.replace(MEMORY, **change)] * 2))
    assert about(lines, topic).verdict == verdict
    assert [one.topic for one in lines] == ["/dev/shm", "locked memory", "memory"]


def test_files_of_killed_jobs():
    some = dataclasses.replace(MEMORY, unused_files=2, unused_bytes=4 * MiB)
    line = about(memory.judge(seen(some)), "/dev/shm")
    assert line.found.endswith("; 4 MiB in 2 files of killed MPICH jobs")
    assert line.remedy == "python -m allred.watch.shm_files"
    line = about(memory.judge(seen(dataclasses.replace(some, shm_free=0))), "/dev/shm")
    assert line.verdict == WARN
    assert line.remedy.startswith("python -m allred.watch.shm_files; or docker run --shm-size=1g")


# ---- launchers


def facts_of_launch(**change):
    facts = launch.Launch("", 1, "/env/bin/mpirun", "/env/bin/mpirun", "MPICH", False, True)
    return dataclasses.replace(facts, **change)


@pytest.mark.parametrize(
    ("change", "topic", "verdict", "remedy"),
    [
        ({}, "mpirun", OK, ""),
        ({"first": "/usr/bin/mpirun"}, "mpirun", WARN, "export PATH=/env/bin:$PATH"),
        ({"first": "/usr/bin/mpirun", "launcher": "MPICH's mpirun"}, "mpirun", NOTE, "export PATH=/env/bin:$PATH"),
        ({"beside": "", "first": "/usr/bin/mpirun"}, "mpirun", OK, ""),
        ({"beside": "", "first": ""}, "mpirun", WARN, "pip install 'allred[mpich]'"),
        ({"beside": "", "first": "", "slurm": True}, "mpirun", OK, ""),
        ({"slurm": True}, "launcher", NOTE, "srun --mpi=pmi2"),
        ({"slurm": True, "launcher": "srun with PMI"}, "launcher", OK, ""),
    ],
)
def test_launchers(change, topic, verdict, remedy):
    found = about(launch.judge(seen(facts_of_launch(**change))), topic)
    assert (found.verdict, found.remedy[: len(remedy)]) == (verdict, remedy)


def test_an_mpirun_of_another_mpi_and_root_are_told_before_they_are_met():
    alone = facts_of_launch(beside="", first="/usr/bin/mpirun")
    assert verdicts(launch.fits(alone, "Open MPI 5.0.11")) == {"mpirun": WARN, "root": WARN}
    assert launch.fits(alone, "MPICH 5.0.2") == []
    assert launch.fits(dataclasses.replace(alone, launcher="Open MPI's mpirun", first_kind=""), "Open MPI 5.0.11") == []


WORLD = start.World(0, 1, "nodeA", 4, "multiple")


@pytest.mark.parametrize(
    ("launcher", "name", "remedy"),
    [
        ("srun with PMI", "Open MPI 5.0.11", "srun --mpi=pmix python"),
        ("srun with PMIx", "MPICH 5.0.2", "srun --mpi=pmi2 python"),
        ("MPICH's mpirun", "Open MPI 5.0.11", "/env/bin/mpirun -np 4 python"),
    ],
)
def test_worlds_of_one_fail_with_the_launcher_that_fits(launcher, name, remedy):
    loaded = library.Library(text=name)
    (found,) = start.judge(seen(WORLD), facts_of_launch(launcher=launcher), loaded)
    assert (found.verdict, found.topic) == (FAIL, "world")
    assert found.found.startswith(f"4 processes were started, but {name} sees 4 worlds of one rank")
    assert found.remedy.startswith(remedy)


def test_a_world_of_several_hosts_and_thread_levels():
    worlds = [start.World(rank, 3, "", 3, level) for rank, level in enumerate(("multiple", "multiple", "funneled"))]
    lines = start.judge(seen(*worlds, hosts=("a", "a", "b")), None, None)
    assert lines[0] == Line(OK, "world", "3 ranks: 2 on a, 1 on b")
    assert lines[1].verdict == NOTE
    assert lines[1].found.startswith("rank 2 on b: funneled; the others: multiple")


# ---- the MPI library

LIBRARY = library.Library("", "4.1.2", "mpich", "MPICH Version:      5.0.2\n", (5, 0), "/env/lib/libmpi.so.12")


@pytest.mark.parametrize(
    ("change", "topic", "verdict", "remedy"),
    [
        ({}, "MPI library", OK, ""),
        ({}, "ABI", OK, ""),
        ({"abi": "openmpi"}, "ABI", WARN, "pip install --force-reinstall"),
        ({"text": "Intel(R) MPI Library 2021.17"}, "ABI", OK, ""),
        ({"abi": "mpiabi"}, "ABI", OK, ""),
        ({"standard": (2, 2)}, "MPI library", FAIL, "pip install 'allred[mpich]'"),
        ({"error": "RuntimeError: cannot load MPI library"}, "MPI library", FAIL, "pip install 'allred[mpich]'"),
        ({"error": "ImportError: undefined symbol: MPI_X"}, "MPI library", FAIL, "mpi4py was built for another MPI"),
        ({"error": "x", "forced": "MPI4PY_LIBMPI=/x"}, "MPI library", FAIL, "unset MPI4PY_LIBMPI"),
        (
            {"error": "ModuleNotFoundError: No module named 'mpi4py'"},
            "MPI library",
            FAIL,
            "pip install 'allred[mpich]'",
        ),
    ],
)
def test_libraries(change, topic, verdict, remedy):
    found = about(library.judge(seen(dataclasses.replace(LIBRARY, **change))), topic)
    assert (found.verdict, found.remedy[: len(remedy)]) == (verdict, remedy)


def test_ranks_with_different_libraries_fail():
    other = dataclasses.replace(LIBRARY, text="MPICH Version: 4.3.0")
    (found,) = library.judge(seen(LIBRARY, LIBRARY, other))
    assert found.verdict == FAIL
    assert "rank 2 on nodeA: MPICH 4.3.0" in found.found


# ---- the network

ETHERNET = network.Interface("eth0", "10.0.0.1", 1000)
DOCKER = network.Interface("docker0", "172.17.0.1", 0)


def facts_of_network(*interfaces, infiniband=(), choices=()):
    return network.Network(interfaces, tuple(infiniband), dict(choices))


def test_one_host_needs_no_network():
    assert verdicts(network.judge(seen(facts_of_network(), facts_of_network()))) == {"network": OK}


def test_between_hosts():
    def lines(*facts):
        return network.judge(seen(*facts, hosts="ab"))

    tcp = facts_of_network(ETHERNET, DOCKER)
    texts = [one.found for one in lines(tcp, tcp) if one.topic == "between hosts"]
    assert texts[0] == "likely over TCP; told by you: nothing"
    assert texts[1] == "docker0 of a lead to no other host"
    assert texts[2].startswith("1 Gbit/s is 0.125 GB/s")
    assert about(lines(tcp, facts_of_network()), "network").verdict == WARN
    up, down = "mlx5_0 port 1: ACTIVE, 200 Gb/sec", "mlx5_0 port 1: DOWN, 10 Gb/sec"
    fast = facts_of_network(ETHERNET, infiniband=[up])
    assert verdicts(lines(fast, fast)) == {"network": OK, "InfiniBand": OK, "between hosts": OK}
    broken = about(lines(fast, facts_of_network(ETHERNET, infiniband=[down])), "InfiniBand")
    assert broken.verdict == WARN
    assert broken.found.startswith("no active port for rank 1 on b")


def test_interfaces_and_infiniband_are_read_from_sysfs(tmp_path):
    write(tmp_path, {"net/lo/operstate": "unknown", "net/x1/operstate": "up\n", "net/x1/speed": "25000\n"})
    write(tmp_path, {"net/x2/operstate": "down", "net/x2/speed": "-1"})
    write(
        tmp_path, {"infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n", "infiniband/mlx5_0/ports/1/rate": "200 Gb/sec\n"}
    )
    facts = network.look(tmp_path)
    assert [str(one) for one in facts.interfaces] == ["x1 no IPv4 address 25 Gbit/s"]
    assert facts.infiniband == ("mlx5_0 port 1: ACTIVE, 200 Gb/sec",)
    assert network.look(tmp_path / "nothing").interfaces == ()


# ---- GPUs

GPU = gpu.Gpu("570.86", 2, "13.6.0", "", 12080, 12090, ("H100", "H100"), 22707)


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        ({}, OK, "2 x H100; driver 570.86 (CUDA 12.8), CUDA 12.9, cupy 13.6.0"),
        ({"cupy": ""}, NOTE, "2 devices, driver 570.86, but cupy is not installed"),
        ({"cupy": "", "device_files": 0}, NOTE, "none, and no cupy"),
        ({"error": "CUDARuntimeError: cudaErrorNoDevice"}, WARN, "cupy does not work: CUDARuntimeError"),
        ({"error": "CUDARuntimeError: cudaErrorNoDevice", "device_files": 0}, NOTE, "cupy does not work"),
        ({"cuda_runtime": 13000}, WARN, "cupy is for a newer CUDA than the driver"),
    ],
)
def test_gpus(change, verdict, words):
    lines = gpu.judge(seen(dataclasses.replace(GPU, **change)))
    assert (lines[0].topic, lines[0].verdict) == ("GPU", verdict)
    assert lines[0].found.startswith(words)
    assert len(lines) == (2 if verdict == OK else 1)


def test_nccl_and_more_ranks_than_devices():
    lines = gpu.judge(seen(GPU, GPU, GPU))
    assert about(lines, "NCCL").found.startswith("2.27.7")
    assert [one.found for one in lines if one.topic == "GPU"][1] == "3 ranks for 2 devices on nodeA"


FAKE_CUPY = """
class runtime:
    runtimeGetVersion = driverGetVersion = staticmethod(lambda: 12080)
    getDeviceCount = staticmethod(lambda: 1)
    getDeviceProperties = staticmethod(lambda i: {"name": b"Fake GPU"})
class nccl:
    get_version = staticmethod(lambda: 22805)
"""


def test_cupy_is_asked_in_a_process_of_its_own(tmp_path, monkeypatch):
    write(tmp_path, {"cupy/__init__.py": "__version__ = '13.0'", "cupy/cuda.py": FAKE_CUPY})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    facts = gpu.look()
    assert (facts.cupy, facts.devices, facts.nccl, facts.error) == ("13.0", ("Fake GPU",), 22805, "")
    write(tmp_path, {"cupy/__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"})
    assert gpu.look().error == "it ended without a word"
    write(tmp_path, {"cupy/__init__.py": "raise ImportError('libcuda.so.1: not found')"})
    assert gpu.look().error == "ImportError: libcuda.so.1: not found"
    assert "cupy" not in sys.modules


# ---- software, trials


def test_software():
    facts = installation.look()
    assert verdicts(installation.judge(seen(facts, facts)))["software"] == OK
    other = dataclasses.replace(facts, numpy="1.0", settings={"timeout_s": 5.0}, extension=False)
    lines = installation.judge(seen(dataclasses.replace(facts, settings={"timeout_s": 6.0}), other))
    assert verdicts(lines) == {"software": WARN, "C extension": WARN, "settings": FAIL}


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ([trials.Init("mpi", "rank 1 lacks the C extension", 1)] * 2, WARN),
        ([trials.Init("mpi", "every rank is on a node of its own", 2)] * 2, OK),
        ([trials.Init("mpi", "as requested", 1)] * 2, OK),
        ([trials.Init("shm", "ranks share a node", 1)] * 2, OK),
        ([trials.Init(error="ConfigError: no")] * 2, FAIL),
    ],
)
def test_backends(facts, verdict):
    assert [one.verdict for one in trials.judge_init(seen(*facts))] == [verdict]


@pytest.mark.parametrize(
    ("us", "hosts", "verdict"), [(5.0, "aa", OK), (600.0, "aa", WARN), (600.0, "ab", OK)]
)  # fmt: skip
def test_slow_small_allreduces_are_for_want_of_processors_on_one_host(us, hosts, verdict):
    timed = [trials.Timed(4, us, ""), trials.Timed(4 * MiB, 1000.0, "")]
    (found,) = trials.judge_times(seen(timed, timed, hosts=hosts))
    assert found.verdict == verdict
    assert "4 MiB 1,000 us, 4.194 GB/s; sums are right" in found.found


def test_wrong_sums_of_mpi_itself():
    assert trials.judge_mpi(seen("", ""))[0].verdict == OK
    (found,) = trials.judge_mpi(seen("", "64 KiB: element 0 is 2, and should be 1"))
    assert (found.verdict, found.found[:24]) == (FAIL, "wrong on rank 1 on nodeA")


def test_no_way_to_share_memory():
    assert trials.judge_sharing(seen(*[trials.Sharing("", 2)] * 2))[0].verdict == WARN
    assert trials.judge_sharing(seen(*[trials.Sharing("", 1)] * 2, hosts="ab"))[0].verdict == NOTE
    assert trials.judge_sharing(seen(*[trials.Sharing("memfd over a Unix socket", 2)] * 2))[0].verdict == OK


def test_the_whole_report_from_what_this_process_sees():
    lines = topics.judge([Rank(0, "nodeA", ranks.look(topics.TOPICS))])
    assert not [one for one in lines if "could not be looked at" in one.found]
    assert all(one.remedy for one in lines if one.verdict in (WARN, FAIL))


# ---- waiting, and last words


class Silent:
    """As much of a communicator as waiting in vain needs."""

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


def test_waiting_for_other_ranks_has_an_end():
    assert gather.to_first(Silent(0), "own", limit_s=0.01) == {0: "own"}
    for call in (
        lambda: gather.to_first(Silent(1), "own", limit_s=0.01),
        lambda: gather.from_first(Silent(0), "answer", limit_s=0.01),
        lambda: gather.from_first(Silent(1), None, limit_s=0.01),
    ):
        with pytest.raises(CollectiveTimeout):
            call()
    assert gather.to_first(None, "own", limit_s=0) == {0: "own"}


GUARDED = """
import os, sys, time
from allred.doctor.guard import Guard
guard = Guard(speaks={speaks})
with guard.phase(50, "late 1", "gone 1"):
    pass
with guard.phase({limit_s}, "late 2", "gone 2"):
    {what}
with guard.phase(50, "late 3", "gone 3"):
    pass
guard.close()
"""


@pytest.mark.parametrize(
    ("what", "limit_s", "speaks", "code", "out"),
    [
        ("pass", 50, True, 0, ""),
        ("os._exit(3)", 50, True, 3, "gone 2\n"),
        ("os._exit(3)", 50, False, 3, ""),
        ("time.sleep(60)", 0.1, True, -9, "late 2\n"),
        ("time.sleep(60)", 0.1, False, -9, ""),
        ("sys.exit(4)", 50, True, 4, ""),
    ],
)
def test_a_guard_speaks_for_a_process_that_hangs_or_ends(what, limit_s, speaks, code, out):
    program = GUARDED.format(what=what, limit_s=limit_s, speaks=speaks)
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


def test_looking_starts_no_mpi_and_loads_no_cupy():
    code = (
        "import sys; from allred.doctor import command, info, ranks, topics; ranks.look(topics.TOPICS)\n"
        "print([m for m in ('mpi4py.MPI', 'cupy') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, env={**os.environ}
    )
    assert result.stdout == "[]\n", result.stderr

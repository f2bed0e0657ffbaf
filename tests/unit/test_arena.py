"""allred.arena: which arrays it serves, and that they behave like other arrays (the allocator: tests/csrc/arena.c)."""

import contextvars
import gc
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

import allred
from allred import arena, native
from allred.native import arena_attach, arena_call, arena_usage

if not native.available:
    pytest.skip(f"C extension: {native.reason}", allow_module_level=True)

BYTES = 64 << 20  # of the arena of these tests


@pytest.fixture(autouse=True)
def _enabled():
    arena.enable(str(BYTES), ranks=1)
    yield
    arena.disable()
    arena._learned.clear()


def inside(array):
    memory, _ = arena.memory()
    base = np.frombuffer(memory, np.uint8, 1).__array_interface__["data"][0]
    return base <= array.__array_interface__["data"][0] < base + len(memory)


def in_context(function):
    """Run the function with a handler that lasts until it returns."""
    return contextvars.copy_context().run(function)


def program(code):
    """Run a program in a new process, because a process has one arena."""
    start = f"import os, numpy as np, allred\nfrom allred import arena\narena.enable('{BYTES}', 1)\n"
    command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", start + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("shape", [(), 5, (3, 4), (2, 0), (1000, 300)])
@pytest.mark.parametrize("dtype", ["float64", "int8", "bool"])
def test_empty(shape, dtype):
    expected, array = np.empty(shape, dtype), allred.empty(shape, dtype)
    assert (array.shape, array.dtype) == (expected.shape, expected.dtype)
    assert inside(array)
    assert array.flags.owndata
    assert not inside(np.empty(shape, dtype))


def test_empty_like():
    fortran = np.zeros((30, 40), "float32", order="F")
    array = allred.empty_like(fortran)
    assert inside(array)
    assert (array.shape, array.dtype, array.strides) == (fortran.shape, fortran.dtype, fortran.strides)


def test_an_error_leaves_no_handler():
    with pytest.raises(ValueError, match="negative dimensions"):
        allred.empty(-1)
    assert not inside(np.empty(100))


def test_disabled():
    arena.disable()
    array = allred.empty(1000)
    assert arena.memory() is None
    arena.enable(str(BYTES), ranks=1)
    assert not inside(array)


def test_sizes_that_are_served():
    @in_context
    def _():
        size = 3 * 8192
        arena.learn([size, 100, 50_000])
        dirty = np.full(3072, 7.0)
        assert inside(dirty)
        del dirty
        zeros = np.zeros((3, 1024))
        assert inside(zeros)
        assert not zeros.any()
        arrays = [zeros + 1, zeros.copy(), zeros.astype("int64"), np.concatenate([zeros[:1], zeros[1:]])]
        arrays += [np.ones((3, 5)) @ np.ones((5, 1024)), np.random.default_rng(0).normal(size=(3, 1024))]
        assert all(inside(array) for array in arrays)
        others = [np.empty(size // 8 - 1), np.empty(size // 8 + 1), np.empty(100, "u1"), np.zeros(())]
        assert not any(inside(array) for array in others)

    assert not inside(np.empty(50_000, "u1"))


def test_a_thread_has_its_own_handler():
    found = []

    def run():
        found.append(inside(np.empty(50_000, "u1")))
        arena_attach()
        found.append(inside(np.empty(50_000, "u1")))

    in_context(lambda: arena.learn([50_000]))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False, True]


def test_paused():
    @in_context
    def _():
        arena.learn([50_000])
        with arena.paused(), arena.paused():
            assert not inside(np.empty(50_000, "u1"))
            assert inside(allred.empty(50_000, "u1"))
        assert inside(np.empty(50_000, "u1"))


def test_sizes_are_learned_for_the_next_world():
    arena.disable()
    in_context(lambda: arena.learn([50_000]))
    arena.enable(str(BYTES), ranks=1)

    @in_context
    def _():
        arena_attach()
        assert inside(np.empty(50_000, "u1"))


def test_another_handler_is_not_replaced():
    in_context(lambda: arena.learn([50_000]))
    assert arena_call(arena_attach) is False
    assert arena_call(lambda: inside(np.empty(1)))


def test_resize_keeps_the_values():
    array = allred.empty(5000)
    array[:] = np.arange(5000)
    others = [allred.empty(5000) for _ in range(8)]
    for size in (9000, 200_000, 4000, 10):
        array.resize(size)
        assert inside(array)
        assert not any(np.may_share_memory(array, other) for other in others)
        assert (array[:10] == np.arange(10)).all()
    assert (array == np.arange(10)).all()
    view = array[:5]
    with pytest.raises(ValueError, match="cannot resize"):
        array.resize(100_000)
    del view


def test_a_full_arena():
    arrays = [allred.empty(4 << 20, "u1") for _ in range(20)]
    places = [inside(array) for array in arrays]
    assert 10 < sum(places) < 20
    assert places == sorted(places, reverse=True)
    for number, array in enumerate(arrays):
        array[:] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
    del array
    arrays[-1].resize(8 << 20)
    assert (arrays[-1][: 4 << 20] == 19).all()
    del arrays
    assert inside(allred.empty(4 << 20, "u1"))


def test_threads():
    def use(number, failed):
        arena_attach()
        random = np.random.default_rng(number)
        for _ in range(300):
            arrays = [np.full(size // 8, number, "i8") for size in random.choice(sizes, 5)]
            arrays += [allred.empty(int(random.integers(1, 30_000)), "u1")]
            arrays[-1][:] = number
            failed += [number for array in arrays if not (array == number).all()]

    sizes, failed = [16_384, 40_000, 400_000, 100_000], []
    in_context(lambda: arena.learn(sizes))
    threads = [threading.Thread(target=use, args=(number, failed)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    gc.collect()
    assert arena_usage()[1] == 0


def test_steps_do_not_grow():
    sizes = [4096 * (4 + i * i % 37) + 8 * i for i in range(20)]

    @in_context
    def _():
        arena.learn(sizes)
        committed = []
        for _ in range(10_000):
            grads = [np.empty(size // 8) for size in sizes]
            del grads
            committed.append(arena_usage()[2])
        assert committed[10] == committed[-1]
        assert arena_usage()[1] == 0


def test_pickle_and_save():
    array = allred.empty((100, 100))
    array[:] = np.arange(100)
    code = "import pickle, sys; print(int(pickle.load(sys.stdin.buffer).sum()))"
    for protocol in (2, 5):
        sent = pickle.dumps(array, protocol)
        result = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, timeout=60, check=True)
        assert int(result.stdout) == 4950 * 100
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    assert (np.load(file) == array).all()


def test_the_file_is_sealed():
    _, fd = arena.memory()
    for size in (0, 2 * BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)


def test_fork():
    """The child sees the values of the fork; neither sees what the other writes later."""
    result = program("""
        import multiprocessing
        array = allred.empty(100_000)
        array[:] = 1
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe()
        def child():
            there.recv()  # the parent has written
            assert (array == 1).all() and allred.empty(10).sum() is not None
            array[:] = 2
            array.resize(200_000)
            assert array.sum() == 200_000 and arena.memory() is None
            there.send("ok")
        process = fork.Process(target=child)
        process.start()
        array[:] = 3
        here.send("written")
        assert here.recv() == "ok"
        process.join()
        assert process.exitcode == 0 and (array == 3).all()
    """)
    assert (result.returncode, result.stderr) == (0, "")


def test_arrays_outlive_the_arena_and_the_interpreter():
    result = program("""
        arena.learn([80_000])
        kept, cycle = [allred.empty(1000), np.zeros(10_000)], []
        cycle.append((cycle, np.zeros(10_000)))
        kept[0][:] = 5
        arena.disable()
        kept += [allred.empty(1000), np.zeros(10_000)]
        assert kept[0].sum() == 5000 and kept[1].sum() == 0
        kept[1].resize(20_000)
        import builtins
        builtins.kept = kept  # freed after the modules
        print("end")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


def test_frozen_blocks_are_not_reused():
    result = program("""
        from allred.native import arena_freeze, arena_usage
        array = allred.empty(1000)
        array[:] = 7
        memory, _ = arena.memory()
        live = arena_usage()[1]
        arena_freeze()
        del array
        after = allred.empty(1000)
        assert arena_usage()[1] == live and arena_usage()[3]
        assert (np.frombuffer(memory, "f8", 1000) == 7).all()
    """)
    assert (result.returncode, result.stderr) == (0, "")


def test_an_unknown_numpy_is_refused():
    result = program("""
        import ctypes
        version = ctypes.CFUNCTYPE(ctypes.c_uint)(lambda: 0x3000000)
        table = (ctypes.c_void_p * 400)(*[ctypes.cast(version, ctypes.c_void_p).value] * 400)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
        arena._numpy_api = lambda: new(ctypes.addressof(table), None, None)
        assert arena.memory() is None
        assert allred.empty(10).shape == (10,)
    """)
    assert (result.returncode, result.stderr) == (0, "")


def test_size():
    result = program("""
        from allred.cluster import processors
        def size(setting, ranks, cgroup):
            arena.limits = lambda: processors.Limits(cgroup, None)
            arena.enable(setting, ranks)
            return arena._nbytes
        assert size("auto", 4, 2**30) == 2**27
        assert "134.22 MB on this rank (ALLRED_ARENA=auto: 1/8 of the memory limit of the cgroup" in arena.description()
        assert size(str(2**20 + 1), 4, 2**30) == 2**20
        assert "1.05 MB on this rank (ALLRED_ARENA=1048577)" in arena.description()
        assert size(str(2**40), 4, 2**30) == 2**30
        assert "but this is the memory limit of the cgroup" in arena.description()
        assert size("0", 4, None) == 0 and arena.memory() is None
        assert arena.description() == "none: ALLRED_ARENA=0"
        assert 0 < size("auto", 2, None) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") // 4
    """)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("begin", "abandon"),
    [
        ("allreduce(array, array, ReduceOp.SUM, '')", "del begun"),
        ("allreduce(array, array, ReduceOp.SUM, '')", "segment.halt()"),
        ("begin_allgather(bytes(64), array.data, np.empty(20_000).data, [80_000, 80_000])", "segment.halt()"),
        ("begin_broadcast(bytes(64), array.data, 0)", "del begun"),
    ],
)
def test_memory_of_an_abandoned_operation_is_never_used_again(begin, abandon):
    """The other rank may still use it. Costs 0.8 s."""
    result = program(f"""
        from allred.comm.backends.shm import _DTYPES, _OPS
        from allred.comm.ops import ReduceOp
        from allred.native import arena_usage
        from allred.native._kernels import Segment, segment_bytes
        segment = Segment(bytearray(segment_bytes(2, 4096)), 0, 2, 4096, np.zeros((2, 3)), _DTYPES, _OPS)
        segment.set_arenas([arena.memory()[0]] * 2)
        array = allred.empty(10_000)
        begun = segment.{begin}
        assert not begun.done() and not arena_usage()[3]
        {abandon}
        assert arena_usage()[3]
        address = array.__array_interface__["data"][0]
        array = begun = None
        others = [allred.empty(10_000) for _ in range(9)]
        assert all(other.__array_interface__["data"][0] != address for other in others)
        print("end")
    """)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


def test_memory_of_a_push_that_was_given_up_is_never_used_again():
    """The server may still read it. Costs 0.2 s."""
    result = program("""
        from allred.native._kernels import Mailbox, mailbox_bytes
        from allred.native import arena_usage
        worker = Mailbox(memoryview(np.zeros(mailbox_bytes(3, 65536) // 8)).cast("B"), 3, 65536)
        worker.set_arena(arena.memory()[0])
        array = allred.empty(20_000, "u1")
        worker.begin(b"", [array], np.array([20_000]), [], None, b"")
        assert worker.pending and worker.referenced == 20_000 and not arena_usage()[3]
        worker.close()
        assert arena_usage()[3]
        print("end")
    """)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


def test_why_an_array_is_outside():
    @in_context
    def _():
        early = np.empty(70_000, "u1")
        arena.learn([70_000])
        larger = np.empty((3, 70_000), "u1")
        foreign = np.frombuffer(bytearray(70_000), "u1")
        unpickled = pickle.loads(pickle.dumps(early))
        assert arena.why_outside(np.empty(70_000, "u1")) == ""
        assert arena.why_outside(early).startswith("allocated before the sizes were known")
        assert arena.why_outside(larger[1]) == "part of a larger array"
        assert arena.why_outside(np.empty(60_000, "u1")) == "of a size that is not served"
        assert arena.why_outside(foreign).startswith("memory that numpy did not allocate")
        assert arena.why_outside(unpickled) == arena.why_outside(foreign)
        kept = [np.empty(70_000, "u1") for _ in range(BYTES // 65_536)]
        assert arena.why_outside(kept[-1]) == "allocated when the arena was full"


SECCOMP = """
    import ctypes, errno, platform, struct
    number = {"x86_64": 285, "aarch64": 47}.get(platform.machine())
    def refuse_fallocate():  # a BPF program: if the system call has this number, it fails with ENOMEM
        parts = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | errno.ENOMEM), (0x06, 0, 0, 0x7FFF0000)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *part) for part in parts))
        prog = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(parts), ctypes.addressof(code)))
        libc = ctypes.CDLL(None)
        return libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, prog) == 0
"""


def test_the_system_has_no_pages():
    """The kernel refuses fallocate(), as at the limit of vm.overcommit_memory=2. Costs 0.3 s."""
    result = program(f"""{SECCOMP}
    arena.learn([80_000])
    served = np.ones(10_000)
    if number is None or not refuse_fallocate():
        print("skip")
        raise SystemExit
    arrays = [np.ones(10_000) for _ in range(3)] + [allred.empty(10_000)]
    arrays[-1][:] = 1
    assert all(array.sum() == 10_000 for array in arrays)  # no SIGBUS
    assert arena.why_outside(served) == ""
    assert arena.why_outside(arrays[0]) == "allocated when the system had no more memory for the arena"
    """)
    if result.stdout == "skip\n":
        pytest.skip("no system call filters here")
    assert (result.returncode, result.stderr) == (0, "")


def test_no_address_space_for_the_arena():
    """RLIMIT_AS refuses the mapping. Costs 0.3 s."""
    result = program("""
        import resource
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
        array = allred.empty(1000)
        array[:] = 1
        assert arena.memory() is None
        print(arena.description())
    """)
    text = "none: 67.11 MB of shared memory cannot be mapped: Cannot allocate memory\n"
    assert (result.returncode, result.stdout, result.stderr) == (0, text, "")

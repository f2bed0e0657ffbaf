"""How ranks fail and stall in these tests: what a rank does, and what the others are told of it."""

FAILURES = {  # what it does, its exit code, what is said of it
    "raise": ("raise ValueError('boom')", 1, "failed with exit code 1: ValueError: boom"),
    "sys.exit": ("sys.exit(3)", 3, "failed with exit code 3: sys.exit(3)"),
    "raise SystemExit": ("raise SystemExit(3)", 3, "failed with exit code 3"),
    "exit with words": ("sys.exit('no such file')", 1, "failed with exit code 1: sys.exit('no such file')"),
    "interrupt": (
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start(); time.sleep(9)",
        130,
        "failed with exit code 130: KeyboardInterrupt",
    ),
}
STALLS = {  # what the culprit does, and how the others are told of it
    "sleeps": ("time.sleep(60)", r"in Python at <string>:11 \(culprit\)"),
    "loops": ("while True: pass", r"in Python at <string>:11 \(culprit\)"),
    "holds the GIL": (
        "import ctypes; m = ctypes.create_string_buffer(64); [*map(ctypes.PyDLL(None).pthread_mutex_lock, (m, m))]",
        r"in Python at <string>:11 \(culprit\)",
    ),
    "receives by MPI": (
        "from mpi4py import MPI; MPI.COMM_WORLD.Recv(bytearray(8), source=MPI.ANY_SOURCE, tag=7)",
        r"in MPI Recv at <string>:11 \(culprit\)",
    ),
    "is stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", r"stopped \(kill -CONT \d+ continues it\)"),
}
WITHOUT_EXTENSION = "sys.modules['allred.native._kernels'] = None"
MPI_FIRST = "from mpi4py import MPI"


def check_end(result, code, mpi="mpich"):
    """The exit code; prterun itself crashes now and then where a rank aborts while another finalizes [ran]."""
    assert result.code == code or (mpi == "openmpi" and result.code == -11 and code), result.text


def count_tracebacks(result):
    return result.err.count("Traceback (most recent call last)")

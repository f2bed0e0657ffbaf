"""Runs tests of `torch.testing._internal.distributed.distributed_test`, the suite that PyTorch runs its backends with.

As a program it is a server: it imports torch once and forks the ranks of each test, because `import torch` takes
seconds. Upstream, the ranks are children of multiprocessing, which import torch again. A rank does the same here as
there: `init_process_group` with a file, the test, `destroy_process_group`. It ends as a Python program does. The
requests and the results are lines of JSON: {"backend", "ranks", "test"} and {"outcome", "text"}.
"""

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback

LIMIT_S = 100  # of a test; a test of torch may wait for a time limit of 60 s
GRACE_S = 3  # for the other ranks, when one has failed
PASSED, SKIPPED, FAILED = "pass", "skip", "FAIL"
SUITE = "torch.testing._internal.distributed.distributed_test"


class BackendName(str):
    """The name of the backend; it is also equal to the name for which the suite has the test."""

    chosen_as = ""
    __hash__ = str.__hash__

    def __eq__(self, other):
        return other in (str(self), self.chosen_as)

    def __ne__(self, other):
        return not self == other


class Server:
    """The server as a child process."""

    def __init__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "ALLRED_BANNER": "0", "PYTHONWARNINGS": "ignore"}
        self.directory = tempfile.TemporaryDirectory(prefix="allred-suite-")
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.directory.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.directory.cleanup()

    def run(self, backend, ranks, test, chosen_as="gloo"):
        """Run one test. Return its outcome, and what its ranks have printed.

        chosen_as: the name of a backend for which the suite has this test; the test itself uses `backend`.
        """
        request = {"backend": backend, "ranks": ranks, "test": test, "chosen_as": chosen_as}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["outcome"], answer["text"]

    def tests(self, backend, ranks):
        """Return {test: the reason why the suite skips it for this backend, or ""}."""
        outcome, text = self.run(backend, ranks, "", backend)
        assert outcome == PASSED, text
        return json.loads(text)


def serve(directory):
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "1", "TEMP_DIR": str(directory)}
    importlib.import_module(SUITE)
    del sys.modules[SUITE]  # its decorators read the variables; what it imports stays
    gc.freeze()  # else each rank copies the memory of all objects
    for number, line in enumerate(sys.stdin):
        (directory / str(number)).mkdir()
        outcome, text = run_ranks(directory / str(number), **json.loads(line))
        print(json.dumps({"outcome": outcome, "text": text}), flush=True)


def run_ranks(directory, backend, ranks, test, chosen_as):
    for part in ("barrier", "test_dir"):
        (directory / part).mkdir()
    children = {fork_rank(directory, backend, rank, ranks, test, chosen_as): rank for rank in range(ranks)}
    texts = wait(children, directory)
    found = [outcome_of(directory, rank) for rank in range(ranks)]
    if texts or FAILED in found:
        output = ((directory / f"output.{rank}").read_text(errors="replace") for rank in range(ranks))
        texts += [f"-- rank {rank}: {found[rank]}\n{text}" for rank, text in enumerate(output)]
        return FAILED, "\n".join(texts)
    return found[0], (directory / "tests").read_text() if not test else ""


def outcome_of(directory, rank):
    file = directory / f"outcome.{rank}"
    return file.read_text() if file.exists() else FAILED


def wait(children, directory):
    """Wait for the ranks to end. Return what went wrong with their processes: time limit, exit codes."""
    running, texts, end = dict(children), [], time.monotonic() + LIMIT_S
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = running.pop(pid)
                if code := os.waitstatus_to_exitcode(status):
                    texts.append(f"rank {rank} ended with code {code}")
                if texts or outcome_of(directory, rank) == FAILED:
                    end = min(end, time.monotonic() + GRACE_S)
        if time.monotonic() > end:
            texts += [f"rank {rank} still ran and was killed" for rank in running.values()]
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            end += 1000
        time.sleep(0.01)
    return texts


def fork_rank(directory, backend, rank, ranks, test, chosen_as):
    pid = os.fork()
    if pid:
        return pid
    output = os.open(directory / f"output.{rank}", os.O_CREAT | os.O_RDWR)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ |= {
        "BACKEND": chosen_as,
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": str(directory),
        "INIT_METHOD": f"file://{directory}/init",
        "MASTER_ADDR": "127.0.0.1",
    }
    faulthandler.dump_traceback_later(LIMIT_S - 2)
    try:
        outcome = run_rank(directory, backend, rank, test, chosen_as)
    except BaseException:
        traceback.print_exc()
        outcome = FAILED
    faulthandler.cancel_dump_traceback_later()
    (directory / f"outcome.{rank}").write_text(outcome)
    sys.exit()  # leaves the loop of the server


def run_rank(directory, backend, rank, test, chosen_as):
    """Do what a process does that torch's test case has started. Return the outcome."""
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS

    suite = importlib.import_module(SUITE)
    os.environ["BACKEND"] = backend
    suite.BACKEND = BackendName(backend)
    suite.BACKEND.chosen_as = chosen_as

    class Tests(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        pass

    if not test:
        names = [name for name in dir(Tests) if name.startswith("test_")]
        reasons = {name: getattr(getattr(Tests, name), "__unittest_skip_why__", "") for name in names}
        (directory / "tests").write_text(json.dumps(reasons))
        return PASSED
    if getattr(getattr(Tests, test), "__unittest_skip__", False):
        return SKIPPED
    ours, theirs = multiprocessing.Pipe()
    try:
        Tests._run(rank, test, str(directory / "store"), theirs)
    except SystemExit as end:
        if not end.code:
            return PASSED
        if end.code in [skip.exit_code for skip in TEST_SKIPS.values()]:
            if dist.is_initialized():
                dist.destroy_process_group()
            return SKIPPED
    print(ours.recv() if ours.poll() else "no traceback")
    return FAILED


if __name__ == "__main__":
    serve(pathlib.Path(sys.argv[1]))

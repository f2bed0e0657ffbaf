"""horovod.run: calls a function as ranks, and returns its results.

1  a file `call` in a temporary directory has the function, its arguments, and sys.path
2  horovodrun, as a process, starts function_rank.py as ranks; each of them writes its outcome to a file there
3  the results are returned in rank order, or the exception of the first rank that failed is raised

The function is pickled by value with cloudpickle (extra client); without it the ranks must be able to import it.
"""

import contextlib
import dataclasses
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allred.client.call import pack, unpack
from allred.errors import AllredError, InputError, RemoteRankError
from allred.launcher_variables import without_launcher
from allred.run import host_list
from allred.validators import integer

_STOP_S = 30.0  # for the ranks to end, after an exception such as KeyboardInterrupt


# The outcomes: a file for each rank and start of the job.


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """The result or the error of a rank, which it writes at its end.

    parts: the result, or the exception, as a message of allred.client.call; [] if it cannot be sent. error: None after
    success, else the exception in one line. is_of_another: whether another rank has caused the error.
    """

    rank: int
    parts: list[bytes]
    error: str | None = None
    traceback: str = ""
    is_of_another: bool = False
    host: str = dataclasses.field(default_factory=socket.gethostname)
    time: float = dataclasses.field(default_factory=time.time)

    def exception(self, code: int) -> BaseException:
        """Return the exception for the caller of horovod.run. code: the exit code of the job."""
        try:
            error = unpack(self.parts) if self.parts else None
        except Exception:  # unpickling runs code of the user
            error = None
        if error is None:
            if self.is_of_another:
                return RemoteRankError(str(self.error), self.rank, self.host, code)
            text = f"rank {self.rank} on {self.host} raised {self.error}"
            return RemoteRankError(text, self.rank, self.host, code, self.traceback)
        error.add_note(f"on rank {self.rank} ({self.host}):\n{self.traceback}")
        return error  # type: ignore[no-any-return]


def outcome_of_result(rank: int, result: Any) -> RankOutcome:
    """Return the outcome of a rank whose function has returned. Raises InputError if the result cannot be sent."""
    return RankOutcome(rank, _pack(result, f"the result of rank {rank}"))


def outcome_of_error(rank: int, error: BaseException) -> RankOutcome:
    """Return the outcome of a rank whose function has raised an exception."""
    is_of_another = isinstance(error, RemoteRankError)
    parts: list[bytes] = []
    if isinstance(error, Exception) and not is_of_another:  # no SystemExit for the caller
        try:
            parts = _pack(error, "the error")
        except InputError:
            parts = []
    line = str(error) if is_of_another else traceback.format_exception_only(error)[0].strip()
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without function_rank.py
    return RankOutcome(rank, parts, line, "".join(traceback.format_exception(type(error), error, trace)), is_of_another)


def _pack(value: Any, what: str) -> list[bytes]:
    return [bytes(part) for part in pack(value, f"horovod.run: {what}")]


def write_outcome(directory: str, outcome: RankOutcome) -> None:
    """Write the outcome of this rank. Other starts of the job have other files."""
    path = Path(directory, f"outcome-{os.environ.get('ALLRED_STARTS', '1')}-{outcome.rank}")
    path.with_suffix(".new").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".new").rename(path)


def read_outcomes(directory: str) -> list[RankOutcome]:
    """Return the outcomes of the last start, by rank."""
    found: dict[int, list[RankOutcome]] = {}
    for path in Path(directory).glob("outcome-*[0-9]"):
        found.setdefault(int(path.name.split("-")[1]), []).append(pickle.loads(path.read_bytes()))
    return sorted(found[max(found)], key=lambda outcome: outcome.rank) if found else []


# The call.


class JobError(AllredError, RuntimeError):
    """A job of horovod.run failed, and no rank has written a reason."""


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call `func(*args, **kwargs)` as num_proc ranks. Return the results of all ranks, in rank order.

    The arguments are those of Horovod 0.28, and have the meaning of the options of horovodrun. func calls `hvd.init()`.
    With other hosts, the working directory must be shared by all hosts: the function is passed in a file there.

    Raises the exception of the first rank that failed, with the rank's traceback as a note; RemoteRankError or
    JobError, which are RuntimeErrors, if a rank ended without one; InputError for arguments that cannot be sent.

    Example: `losses = horovod.run(train, (0.1,), np=2)`.
    """
    size = integer("horovod.run: num_proc", num_proc if np is None else np, 1)
    options = {
        "--name": re.sub(r"[^\w.-]", "", getattr(func, "__name__", "")),  # without the brackets of <lambda>
        "--num-proc": size,
        "--min-np": min_num_proc if min_np is None else min_np,
        "--max-np": max_num_proc if max_np is None else max_np,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--mpi-args": mpi_args,
        "--network-interfaces": ",".join(network_interfaces or ()) or network_interface,
    }
    words = [f"{name}={value}" for name, value in options.items() if value not in (None, "")]
    words += [] if cooldown_range is None else ["--blacklist-cooldown-range", *map(str, cooldown_range)]
    words += ["--gloo"] * bool(use_gloo)
    call = pack((func, tuple(args), dict(kwargs or {})), "horovod.run: the function, or an argument,")
    shared = os.getcwd() if host_discovery_script else _shared_directory(hosts, hostfile)
    with tempfile.TemporaryDirectory(prefix="horovod-run-", dir=shared) as directory:
        Path(directory, "call").write_bytes(pickle.dumps((sys.path, [bytes(part) for part in call])))
        program = [executable or sys.executable, "-m", "allred.compat.horovodrun.function_rank", directory]
        code = _run_command([*words, *program])
        return results(read_outcomes(directory), code)


def _shared_directory(hosts: str | None, hostfile: str | None) -> str | None:
    """Return the directory for the temporary directory; None for the default, if there is no other host."""
    environ = {} if hosts or hostfile or "LSB_JOBID" not in os.environ else os.environ
    found = host_list.find(hosts or "", hostfile or "", environ).slots
    return None if all(map(host_list.is_local, found)) else os.getcwd()


def _run_command(words: list[str]) -> int:
    """Run horovodrun. Return its exit code."""
    command = [sys.executable, "-m", "allred.compat.horovodrun", *words]
    # In a process group of its own it does not receive the signal of Ctrl-C beside `terminate`: two signals end the job
    # at once.
    with subprocess.Popen(command, env=without_launcher(os.environ), process_group=0) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()
            raise


def results(outcomes: list[RankOutcome], code: int) -> list[Any]:
    """Return the results by rank. code: the exit code of horovodrun. Raises the error of the first rank that failed."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        raise min(failed, key=lambda outcome: (outcome.is_of_another, outcome.time)).exception(code)
    if code or not outcomes:
        raise JobError(f"horovod.run: the job ended with exit code {code}; its last messages on stderr have the reason")
    return [unpack(outcome.parts) for outcome in outcomes]

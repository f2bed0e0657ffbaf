"""Background processes: the watcher of a node, and the rendezvous process of tasks without mpirun.

They answer while ranks block in MPI, are stopped or dead. They import only the modules that they need, and hold no file
of the launcher, which would wait for them.
"""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from allred.runtime.timings import DETACHED_START_S

Process = subprocess.Popen[str]

# The package without its __init__, which would load numpy: such a process takes 12 MB and starts in a moment.
_PROGRAM = """
import importlib, os, sys, types
try:
    os.sched_setaffinity(0, range(os.cpu_count() or 1))  # the cores of the rank may be busy
except OSError:
    pass
package = types.ModuleType("allred")
package.__path__ = [sys.argv[1]]
sys.modules["allred"] = package
importlib.import_module(sys.argv[2]).main()
"""


def keep_standard_files() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed (`<&-`). Else the next socket would get that
    number, be lost in child processes, and receive messages to the user."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(descriptor)


def program_of(module: str) -> list[str]:
    """Return the command that runs main() of a module of allred, which imports only the modules that it needs."""
    return [sys.executable, "-I", "-S", "-c", _PROGRAM, str(Path(__file__).parents[1]), module]


def spawn(module: str, files: Iterable[int] = ()) -> Process:
    """Spawn a process for `module` of allred, whose main() calls `serve`. It imports the module, and waits for the
    settings. files: descriptors that it inherits."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        program_of(module),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        cwd="/",
        pass_fds=tuple(files),
    )


def start(module: str, settings: Any, files: Iterable[int] = (), process: Process | None = None) -> dict[str, Any]:
    """Start the service of `module` in the spawned `process`; in a new one if that was killed, or without it. Return
    its answer, with the key "problem": an error, or "". files: descriptors that a new process inherits."""
    if process is not None and not (answer := _start(lambda: process, settings))["problem"]:
        return answer
    return _start(lambda: spawn(module, files), settings)


def _start(get_process: Callable[[], Process], settings: Any) -> dict[str, Any]:
    out = err = ""
    try:
        with get_process() as process:
            try:
                out, err = process.communicate(json.dumps(settings), DETACHED_START_S)
            except BaseException:
                process.kill()
                raise
        return {"problem": "", **json.loads(out)}
    except subprocess.TimeoutExpired:
        return {"problem": f"it did not answer within {DETACHED_START_S:g} s"}
    except (OSError, subprocess.SubprocessError) as error:
        return {"problem": f"{type(error).__name__}: {error}"}
    except ValueError:
        return {"problem": err.strip().rpartition("\n")[2] or f"it ended with code {process.returncode}"}


def serve(service: Callable[[Any], Any]) -> None:
    """Run the background process. service: a class, called with the settings. Its attribute `answer` is sent to the
    process that called `start`; its method `run` is called in a process without a parent."""
    settings = sys.stdin.read()
    if not settings:  # the process that spawned this one has ended, or needs no service
        os._exit(0)
    running = service(json.loads(settings))
    print(json.dumps(running.answer), flush=True)
    if os.fork():
        os._exit(0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each rank needs some files
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # batch systems send them to all processes before the end
    running.run()
    os._exit(0)

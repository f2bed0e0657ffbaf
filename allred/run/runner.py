"""Starts a job, and starts it again: after a failure, and with another number of ranks.

1  mpirun starts the ranks. The watcher of the chief's node connects to the runner and passes on what ranks report
2  signals are sent to the ranks through the watchers, because mpirun may kill them before they have saved
3  mpirun ends. Its exit code does not tell whether the ranks were successful; their reports do
4  after a failure the RestartPolicy decides. Hosts that cannot be reached are left out; the session resumes from its
   checkpoint, hvd.elastic.run from its commit, in a directory that is deleted after success
5  a new size, from `allred resize` or a changed host file: the session is asked to stop, and the job starts again
"""

import contextlib
import dataclasses
import errno
import os
import secrets
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path

from allred.config import Config, explicit_settings
from allred.errors import AllredError, ConfigError
from allred.run import host_list, job, mpirun, restarts
from allred.run.agent_job import AgentJob
from allred.run.host_list import HostList
from allred.run.job import Job
from allred.run.restarts import End, RestartPolicy
from allred.runtime.channel import Channel, Listener, Message, open_listener
from allred.runtime.loop import Loop
from allred.runtime.timings import HOST_FILE_S
from allred.watch import job_directory, runner_link
from allred.watch.start import own_address
from allred.wording import count

RESIZE_PURPOSE = "resize"  # of the channel to `allred resize`
MOST_HISTORY = 50
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The end of the terminal; the warning of Grid Engine's option -notify. A session does not handle these two.
_PASSED_AS = {signal.SIGHUP: signal.SIGTERM, signal.SIGUSR2: signal.SIGUSR1}


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """A job, as the options of the command describe it.

    program: the command of a rank. target: the number of ranks. min_np: fewest ranks; None: as many as before a
    failure, 1 after a resize. max_np: most ranks after a resize; None: the slots, or `target` if the host file has
    changed. settings: variables for the ranks. find_hosts: reads the hosts; called again before each start.
    watches_hosts: whether a changed host file resizes the job. forwards_all: whether ranks on other hosts get all
    variables under Open MPI too. elastic: whether ranks that survive another go on. spares: processes that wait to
    replace one, in an elastic job.
    """

    name: str
    program: list[str]
    target: int
    min_np: int | None
    max_np: int | None
    restarts: int
    settings: dict[str, str]
    find_hosts: Callable[[], HostList]
    watches_hosts: bool
    forwards_all: bool = False
    elastic: bool = False
    spares: int = 0


def delete_commits(directory: str) -> None:
    """Delete the commits of a program with hvd.elastic (allred/torch/elastic), and the directory if nothing is left."""
    for path in [*Path(directory).glob("run-*.pt"), *Path(directory).glob("run-*.tmp")]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def say(text: str) -> None:
    """Print a message."""
    with contextlib.suppress(OSError):  # the reader of a pipe has ended
        sys.stderr.write(f"allred run: {text}\n")
        sys.stderr.flush()


def _requeued(environ: Mapping[str, str]) -> int:
    """Return how often the batch system has queued the job again; Grid Engine says only whether."""
    count = environ.get("SLURM_RESTART_COUNT") or environ.get("RESTARTED", "")
    return int(count) if count.isdigit() else 0


class ResizeRequests:
    """The requests of `allred resize` to a running job.

    answer: called with the request; returns the answer, which the command prints, or raises AllredError."""

    def __init__(self, loop: Loop, name: str, answer: Callable[[Message], str]) -> None:
        if name in job_directory.entries(job_directory.RUN):
            raise AllredError(f"a job with the name {name!r} runs here already; choose another --name")
        self._answer, secret, listening = answer, secrets.token_hex(16), open_listener("127.0.0.1")
        self._listener = Listener(loop, listening, RESIZE_PURPOSE, secret, self._admit)
        self._entry = {"port": listening.getsockname()[1], "secret": secret}
        self._file: Path | None = None
        try:
            self._file = job_directory.write_entry(name, job_directory.RUN, self._entry)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.ENOENT):
                self._listener.close()
                raise AllredError(f"`allred resize` cannot find this job: {error}; choose another --name") from None
            say(f"warning: `allred resize` cannot find this job: {error.strerror}")

    def _admit(self, channel: Channel, messages: list[Message]) -> None:
        try:
            reply = {"text": self._answer(messages[0]), "code": 0}
        except AllredError as error:
            reply = {"text": str(error), "code": 1}
        channel.send(reply)
        channel.close()

    def close(self) -> None:
        self._listener.close()
        if self._file is not None:
            job_directory.remove_entry(self._file, self._entry)


class Runner:
    """Runs a job to its end."""

    def __init__(self, options: JobOptions, launch: mpirun.Launcher) -> None:
        self._options, self._launch = options, launch
        self._loop = Loop()
        self._policy = RestartPolicy(options.restarts)
        self._starts = 1 + _requeued(os.environ)
        self._target = options.target
        self._hosts = options.find_hosts()
        self._hosts_error = ""  # the last error of reading them
        self._hosts_changed = False  # since the job was started or asked to stop
        self._lost: set[str] = set()  # hosts that were unreachable for the watchers
        self._job: Job | AgentJob | None = None
        self._history: list[Message] = []  # the newest starts, for monitors
        self._assigned: dict[str, int] = {}  # the number of ranks on each host, of the current start
        self._resizes = False  # the session was asked to stop, because the job has to start again
        self._received: list[int] = []  # signals
        self._stops = False  # the user or the batch system ends the job
        given = os.environ.get("ALLRED_ELASTIC_DIR")
        self._commits = given or os.path.abspath(f"{options.name}.commits")  # of programs with hvd.elastic
        self._owns_commits = not given
        self._unwatched = os.environ.get("ALLRED_WATCHER") == "0"  # then no rank reports anything

    def run(self) -> int:
        """Run the job. Return its exit code."""
        job.adopt_orphans()
        requests = ResizeRequests(self._loop, self._options.name, self._answer)
        previous = {number: signal.signal(number, self._note_signal) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
        self._loop.wake_on_signals()
        if self._options.watches_hosts:
            self._look_at_hosts()
        try:
            listening = self._listen()
            return self._run_until_end(listening)
        finally:
            requests.close()
            signal.set_wakeup_fd(-1)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _listen(self) -> tuple[str, int, str]:
        """Listen for the watcher of the chief's node. Return address, port and secret."""
        remote = [name for name in self._hosts.slots if not host_list.is_local(name)]
        self._listens_locally = not remote
        address, secret = own_address(remote) if remote else "127.0.0.1", secrets.token_hex(16)
        listening = open_listener(address)
        Listener(self._loop, listening, runner_link.PURPOSE, secret, self._connect)
        return address, listening.getsockname()[1], secret

    def _connect(self, link: Channel, messages: list[Message]) -> None:
        if self._job is not None:
            self._job.connect(link, messages)
            if not self._options.elastic:
                link.send({"kind": "starts", "rank": None, "starts": self._history})

    def _run_until_end(self, listening: tuple[str, int, str]) -> int:
        available, end, why = self._hosts, End(0), "first start" if self._starts == 1 else "queued again"
        fewest = self._target  # without --min-np
        while True:
            least = self._options.min_np or fewest
            ranks = restarts.size(available.total, self._target, least)
            if ranks is None:
                left = f"{count(available.total, 'slot')} left on {', '.join(available.slots)}"
                say(f"{left}, but the job needs {least}" + "; --min-np allows fewer" * (self._options.min_np is None))
                return self._leave(end.code or 1)
            end = self._start(available.assign(ranks), listening, why)
            if self._stops or (not end.code and not self._resizes):
                return self._finish(end)
            if end.code:
                decision = self._policy.decide(end)
                if decision.delay_s is None:
                    return self._finish(end, decision.reason)
                say(f"{end.text}; restart {self._policy.made} of {self._options.restarts} in {decision.delay_s:g} s")
                self._wait(decision.delay_s)
                if self._stops:
                    return self._finish(end)
            fewest = sum(self._assigned.values()) if end.code else 1
            available = self._available(after_failure=bool(end.code))
            if self._hosts.slots and not available.slots:
                say(f"no host of {self._hosts.source} can be reached; the job ends")
                return self._leave(end.code or 1)
            why = end.text if end.code else "resize"
            self._starts, self._resizes = self._starts + 1, False

    def _finish(self, end: End, reason: str = "") -> int:
        if end.code and (reason or self._starts > 1 or self._stops):
            say(f"{end.text}; the job ends" + f": {reason}" * bool(reason))
        elif end.code:
            say(end.text)
        elif not (end.joined or self._stops or self._unwatched) and (ranks := sum(self._assigned.values())) > 1:
            say(
                f"warning: {count(ranks, 'rank')} ended with success, and none called allred.init(); if the program "
                "joins them in no other way, such as torch.distributed or MPI, each has done the whole work alone"
            )
        return self._leave(end.code)

    def _leave(self, code: int) -> int:
        """Delete the commits after success, or say how to continue from them. Return the exit code."""
        if self._owns_commits and os.path.isdir(self._commits):
            if code or self._stops:
                say(f"ALLRED_ELASTIC_DIR={self._commits} continues from the last commit")
            else:
                delete_commits(self._commits)
        return code

    def _start(self, assigned: dict[str, int], listening: tuple[str, int, str], why: str) -> End:
        """Start the job, and return how it ended. why: the reason of this start."""
        self._assigned, self._hosts_changed = assigned, False
        entry = {"start": self._starts, "time": time.time(), "ranks": sum(assigned.values()), "why": why}
        self._history = [*self._history, entry][-MOST_HISTORY:]
        start = self._agent_job if self._options.elastic else self._mpirun_job
        self._job = running = start(assigned, listening)
        while not running.has_ended():
            self._turn()
        self._lost |= running.lost_hosts
        if isinstance(running, AgentJob):
            self._policy.made += running.replaced
        self._job = None
        return running.end()

    def _settings(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the ranks, for messages, too."""
        own = {"ALLRED_STARTS": str(self._starts), "ALLRED_JOB": self._options.name}
        return {**self._options.settings, **more, **own}

    def _say_start(self, assigned: Mapping[str, int], command: str) -> None:
        name = f"start {self._starts} of {self._options.name}" if self._starts > 1 else self._options.name
        say(f"{name}: {count(sum(assigned.values()), 'rank')} on {', '.join(assigned)}; {command}")

    def _mpirun_job(self, assigned: dict[str, int], listening: tuple[str, int, str]) -> Job:
        settings = self._settings(mpirun.torch_variables(assigned, os.environ))
        address, port, secret = listening
        own = {runner_link.VARIABLE: f"{address} {port} {secret}", "ALLRED_ELASTIC_DIR": self._commits}
        environ = {**os.environ, **settings, **own}
        program = mpirun.with_rank(self._options.program)
        words = mpirun.command(self._launch, assigned, program, environ, mpirun.is_root(), self._options.forwards_all)
        self._say_start(assigned, mpirun.describe(settings, words))
        return Job(words, environ, self._loop)

    def _agent_job(self, assigned: dict[str, int], listening: tuple[str, int, str]) -> AgentJob:
        settings = self._settings({})
        given = explicit_settings(os.environ, {})
        limits = {name: given.get(name, getattr(Config, name)) for name in ("start_timeout_s", "timeout_s")}
        program, left = self._options.program, self._options.restarts - self._policy.made
        environ = {**os.environ, **settings, "ALLRED_ELASTIC_DIR": self._commits}
        self._say_start(assigned, mpirun.describe(settings, program))
        return AgentJob(
            assigned, self._hosts.slots, program, environ, listening, self._loop, spares=self._options.spares,
            minimum=self._options.min_np or 1, replacements=left, start_s=limits["start_timeout_s"],
            limit_s=limits["timeout_s"], say=say,
        )  # fmt: skip

    def _turn(self, limit_s: float = float("inf")) -> None:
        """One turn of the event loop."""
        self._loop.turn(limit_s)
        while self._received:
            self._handle_signal(self._received.pop(0))

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0 and not self._stops:
            self._turn(left_s)

    # Signals.

    def _note_signal(self, number: int, frame: types.FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._received.append(number)

    def _handle_signal(self, number: int) -> None:
        name, again = signal.Signals(number).name, self._stops and number in (signal.SIGTERM, signal.SIGINT)
        self._stops = True
        if self._job is None:
            say(f"{name}: the job does not start again")
        elif again:
            say(f"a second signal, {name}: ending all processes")
            self._job.terminate()
        else:
            say(f"{name}: the ranks receive it, and may write a checkpoint; a second signal ends them at once")
            self._job.send_signal(_PASSED_AS.get(signal.Signals(number), number))

    # Hosts and numbers of ranks.

    def _available(self, after_failure: bool) -> HostList:
        """Return the hosts for the next start."""
        self._read_hosts()
        lost = {name for name in self._hosts.slots if name in self._lost or name.partition(".")[0] in self._lost}
        if after_failure:
            lost |= host_list.unreachable(self._hosts.without(lost).slots, os.environ)
        if lost:
            say(f"without {', '.join(sorted(lost))}: unreachable")
        return self._hosts.without(lost)

    def _read_hosts(self) -> bool:
        """Read the hosts again. Return whether they have changed."""
        before, text = self._hosts, ""
        try:
            self._hosts = self._options.find_hosts()
        except ConfigError as error:  # the file is being written, or is wrong now
            text = f"{error}; the job keeps its hosts"
        if text and text != self._hosts_error:
            say(text)
        self._hosts_error = text
        return self._hosts != before

    def _look_at_hosts(self) -> None:
        """Resize the job if the host file has changed, as soon as a session can write a checkpoint."""
        self._loop.after(HOST_FILE_S, self._look_at_hosts)
        if self._job is None or self._stops:
            return
        if changed := self._read_hosts():
            self._target, self._hosts_changed = self._options.max_np or self._target, True
        if not self._hosts_changed:
            return
        source, wanted = self._hosts.source, restarts.size(self._hosts.total, self._target, self._options.min_np or 1)
        if wanted is None or self._hosts.assign(wanted) == self._assigned:
            self._hosts_changed = False
            if wanted is None:
                say(f"{source} has {count(self._hosts.total, 'slot')} now, fewer than --min-np")
        elif isinstance(self._job, AgentJob):
            self._hosts_changed = False
            if self._listens_locally and not all(map(host_list.is_local, self._hosts.slots)):
                return say(f"{source} has other hosts now, but the job was started for this host only; nothing changes")
            self._assigned = self._hosts.assign(wanted)
            say(f"{source} has changed: {count(wanted, 'rank')}")
            self._job.change_hosts(self._hosts.slots, self._assigned)
        elif self._request_restart():
            self._hosts_changed = False
            say(f"{source} has changed: {count(wanted, 'rank')} after a checkpoint of the current step")
        elif changed:
            say(f"{source} has changed; the job has no open allred.Session or hvd.elastic.run yet")

    def _answer(self, request: dict[str, int]) -> str:
        """Answer `allred resize`."""
        wanted, least, most = int(request["np"]), self._options.min_np or 1, self._options.max_np
        if wanted < least:
            raise AllredError(f"{count(wanted, 'rank')}, but --min-np is {least}")
        if most is not None and wanted > most:
            raise AllredError(f"{count(wanted, 'rank')}, but --max-np is {most}")
        if self._hosts.slots and wanted > self._hosts.total:
            raise AllredError(f"{self._hosts.source} has {count(self._hosts.total, 'slot')}, fewer than {wanted}")
        if isinstance(self._job, AgentJob):
            answer = self._job.resize(wanted)
            self._target = wanted
            return f"{self._options.name}: {answer}"
        if wanted == sum(self._assigned.values()) and not self._resizes:
            return f"{self._options.name} has {count(wanted, 'rank')} already"
        if not self._request_restart():
            raise AllredError(
                f"{self._options.name} has no open allred.Session or hvd.elastic.run, which could write a checkpoint; "
                "nothing was changed"
            )
        self._target = wanted
        return f"{self._options.name} starts again with {count(wanted, 'rank')} after a checkpoint of the current step"

    def _request_restart(self) -> bool:
        """Ask the session to stop, so that the job starts again. Return whether there is a session."""
        if self._job is None or self._stops:
            return False
        self._resizes = self._resizes or self._job.request_stop(runner_link.RESTART)
        return self._resizes

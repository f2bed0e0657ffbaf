"""The watchers of a large job on one machine: `python tests/scale/watchers.py --hosts 64 --ranks 16`.

Each simulated host is a real watcher process. Its ranks are sockets of this process, which send and receive what ranks
do; a process of each host writes their stacks. It prints what the watchers cost, above all the watcher of the chief.

CPU times are those of the processes, so they do not depend on other load. Times to an event do: the processes of all
hosts share the cores of this machine, so they are upper bounds of the times on so many hosts.
"""

import argparse
import contextlib
import json
import mmap
import os
import pathlib
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time

import counted_watcher

from allred.counters import Values
from allred.monitor import Connection, state, top
from allred.runtime import timings
from allred.watch import job_directory
from allred.watch.job_state import JobState

HERE = pathlib.Path(__file__).parent
ALLRED = pathlib.Path(job_directory.__file__).parents[1]
PROGRAM = """
import sys, types
package = types.ModuleType("allred")
package.__path__ = [sys.argv[1]]
sys.modules["allred"] = package
sys.path.append(sys.argv[2])
import counted_watcher
counted_watcher.main(int(sys.argv[3]))
"""
STACK = b'File "/home/me/train.py", line 87 in step\n'
NAME = "simulated"


class Watcher:
    """The watcher of a host. settings: of WatcherSettings."""

    def __init__(self, settings):
        self._settings = settings
        memory = os.memfd_create("counts")
        os.ftruncate(memory, mmap.PAGESIZE)
        self._counts = memoryview(mmap.mmap(memory, mmap.PAGESIZE)).cast("d")
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(ALLRED), str(HERE), str(memory)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, pass_fds=[memory]
        )
        os.close(memory)

    def start(self):
        """Start it, and set its name and port."""
        out, _ = self._process.communicate(json.dumps(self._settings), timeout=120)
        self.__dict__.update(json.loads(out))
        self.pid = next(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_its(pid))

    def _is_its(self, pid):
        try:
            return os.getsid(pid) == self._process.pid
        except ProcessLookupError:
            return False

    @property
    def counts(self):
        return dict(zip(counted_watcher.FIELDS, self._counts, strict=False))

    def forget_longest_turn(self):
        self._counts[counted_watcher.FIELDS.index("longest_turn_s")] = 0.0

    @property
    def cpu_s(self):
        try:
            return int(pathlib.Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it has ended
            return 0.0

    @property
    def is_alive(self):
        return self._is_its(self.pid)

    @property
    def memory_mb(self):
        """Its resident memory, and the part of it that it shares with no other process."""
        lines = pathlib.Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) / 1000 for line in lines[1:]}
        return sizes["Rss"], sizes["Private_Clean"] + sizes["Private_Dirty"]

    @property
    def connections(self):
        files = pathlib.Path(f"/proc/{self.pid}/fd")
        return sum("socket:" in os.readlink(file) for file in files.iterdir())


class Job:
    """A simulated job: `hosts` hosts with `ranks` ranks each."""

    def __init__(self, hosts, ranks, **settings):
        self.hosts, self.ranks, self.size = hosts, ranks, hosts * ranks
        self._epoll, self.received = select.epoll(), {}  # {rank: the messages to it}
        self.victim = self.size // 2 + 1
        self._children = []
        stack_signals = [signal.SIGRTMIN + number for number in range(ranks)]
        self._pipes = [[os.pipe() for _ in range(ranks)] for _ in range(hosts)]
        *pids, self._victim_pid = [
            self._fork(lambda pipes=pipes: write_stacks(stack_signals, pipes))
            for pipes in (*self._pipes, self._pipes[self.victim // ranks])
        ]
        self._pidfds = list(map(os.pidfd_open, pids))
        self._values = [Memory(), Memory(), Memory()]  # of the last rank, of one half of the others, of the other half
        common = {
            "size": self.size, "nodes": hosts, "warn_s": 30.0, "limit_s": 60.0, "expendable": [], "launcher": False,
            "runner": "", "ranks": ranks, "token": "secret",
            "about": {"job": NAME, "program": "train.py", "mode": "sync", "starts": 1, "host": "host0"},
        } | settings  # fmt: skip
        address = "127.0.0.1" if hosts > 1 else ""
        self.watchers = [Watcher(common | {"chief": not h, "address": "" if h else address}) for h in range(hosts)]
        for watcher in self.watchers:
            watcher.start()
        self.chief = self.watchers[0]
        self._sockets = [self._connect(rank, stack_signals[rank % ranks]) for rank in range(self.size)]
        for connection in self._sockets:
            self._epoll.register(connection, select.EPOLLIN)
        self._by_descriptor = {connection.fileno(): rank for rank, connection in enumerate(self._sockets)}
        self.wait_for(lambda: all(self.received.get(rank) for rank in range(self.size)))

    def _fork(self, call):
        if pid := os.fork():
            self._children.append(pid)
            return pid
        try:
            call()
        finally:
            os._exit(0)

    def _connect(self, rank, stack_signal):
        host, local = divmod(rank, self.ranks)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.watchers[host].name.encode("latin-1"))
        chief = {"host": "host0", "address": "127.0.0.1", "port": self.chief.port, "token": "secret"}
        hello = {"rank": rank, "host": f"host{host}", "token": "secret", "stack_signal": stack_signal}
        is_victim, is_last = rank == self.victim, rank == self.size - 1
        pidfd = os.pidfd_open(self._victim_pid) if is_victim else self._pidfds[host]
        values = self._values[0 if is_last else 1 + rank % 2]
        files = [pidfd, self._pipes[host][local][0], values.descriptor]
        socket.send_fds(connection, [json.dumps(hello | {"main_thread": 1, "chief": chief}).encode()], files)
        os.close(files[1])
        return connection

    def send(self, rank, event, **more):
        self._sockets[rank].send(json.dumps({"event": event, **more}).encode())

    def wait_for(self, is_true, limit_s=20.0):
        """Receive messages until a condition holds. Return the seconds."""
        began = time.monotonic()
        while not is_true():
            if time.monotonic() > began + limit_s:
                raise TimeoutError
            for descriptor, _ in self._epoll.poll(0.05):
                rank = self._by_descriptor[descriptor]
                data = self._sockets[rank].recv(timings.EVENT_BYTES)
                self.received.setdefault(rank, []).append(data)
                if not data:
                    self._epoll.unregister(descriptor)
        return time.monotonic() - began

    def pause(self, seconds):
        until = time.monotonic() + seconds
        self.wait_for(lambda: time.monotonic() > until)

    def ranks_with(self, kind):
        """The number of ranks that have received a message of this kind, by its first letter."""
        return sum(any(data[:1] == kind for data in messages) for messages in self.received.values())

    def cost(self, act):
        """Call `act`, and return the cost of it for the chief's watcher and for the mean of the others, per second."""
        self.chief.forget_longest_turn()
        before = [(watcher.cpu_s, watcher.counts) for watcher in self.watchers]
        began = time.monotonic()
        act()
        seconds = time.monotonic() - began
        made = []
        for watcher, (cpu_s, counts) in zip(self.watchers, before, strict=True):
            now = watcher.counts
            each = {name: (now[name] - counts[name]) / seconds for name in now}
            made.append(each | {"cpu": (watcher.cpu_s - cpu_s) / seconds, "longest_turn_s": now["longest_turn_s"]})
        others = made[1:] or made
        mean = {name: sum(each[name] for each in others) / len(others) for name in made[0]}
        return made[0], mean

    def set_steps(self, late):
        """Let the ranks `late`, "last" or "half", compute, and the others wait for them in opt.step."""
        last, even, odd = self._values
        last.write(Values(step=9, steps=9, in_step=0))
        even.write(Values(step=9, steps=9, in_step=1))
        odd.write(Values(step=9, steps=9, in_step=late == "last"))

    def open_monitor(self):
        [entry] = job_directory.entries(job_directory.JOB).values()
        return Connection(entry)

    def kill_victim(self):
        os.kill(self._victim_pid, signal.SIGKILL)
        self._epoll.unregister(self._sockets[self.victim])
        self._sockets[self.victim].close()
        os.waitpid(self._victim_pid, 0)  # so that its pidfd tells how it ended
        self._children.remove(self._victim_pid)

    def leave(self):
        """End all ranks without an error."""
        for rank, connection in enumerate(self._sockets):
            self.send(rank, "left")
            connection.close()

    def wait_for_end(self, limit_s=10.0):
        """Wait until all watchers have ended. Return the seconds."""
        began = time.monotonic()
        for watcher in self.watchers:
            while watcher.is_alive:
                if time.monotonic() > began + limit_s:
                    raise TimeoutError
                time.sleep(0.02)
        return time.monotonic() - began

    def kill(self):
        """Kill all ranks."""
        for connection in self._sockets:
            connection.close()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._children = []

    def close(self):
        self.kill()
        for watcher in self.watchers:
            if watcher.is_alive:
                os.kill(watcher.pid, signal.SIGKILL)


class Memory:
    """The counters of ranks, which their watchers map."""

    def __init__(self):
        self.descriptor = os.memfd_create("counters")
        os.ftruncate(self.descriptor, mmap.PAGESIZE)
        self._values = memoryview(mmap.mmap(self.descriptor, mmap.PAGESIZE)).cast("d")

    def write(self, values):
        for position, value in enumerate(values):
            self._values[position] = value


def write_stacks(stack_signals, pipes):
    """Answer the signals of a watcher with stacks, one pipe for each signal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, stack_signals)
    while True:
        os.write(pipes[signal.sigwait(stack_signals) - signal.SIGRTMIN][1], STACK)


def directory_of_jobs(stack):
    """Give the simulated job a job directory of its own."""
    os.environ["XDG_RUNTIME_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())


def report(name, costs):
    chief, others = costs
    print(
        f"{name:<34} chief: {100 * chief['cpu']:6.2f} % CPU, longest turn {1000 * chief['longest_turn_s']:7.1f} ms, "
        f"{chief['turns']:5.0f} turns/s, sends {chief['sent']:6.0f}/s {chief['sent_bytes'] / 1000:8.1f} kB/s, "
        f"receives {chief['received']:6.0f}/s {chief['received_bytes'] / 1000:8.1f} kB/s; "
        f"others: {100 * others['cpu']:5.2f} % CPU",
        flush=True,
    )


def monitor_for(job, seconds, every_s, states):
    """Take snapshots. Print the size of the last one."""
    with contextlib.closing(job.open_monitor()) as monitor:
        until, last = time.monotonic() + seconds, None
        while time.monotonic() < until:
            last = monitor.snapshot(states=states)
            job.pause(every_s)
    print(f"    snapshot: {len(json.dumps(last))} bytes, {len(last['ranks'])} ranks, {len(last['delays'])} delays")
    print(f"    {top.delays_text(last)[:120]}")
    state.state_of(last, last)


def measure(hosts, ranks, quiet_s):
    """Measure a job in all its states until the death of a rank."""
    with contextlib.ExitStack() as stack:
        directory_of_jobs(stack)
        began = time.monotonic()
        job = Job(hosts, ranks)
        stack.callback(job.close)
        seconds = time.monotonic() - began
        print(f"{hosts} hosts, {job.size} ranks; started in {seconds:.1f} s, chief {job.chief.cpu_s:.2f} s CPU")
        job.pause(2)
        report("first seconds", job.cost(lambda: job.pause(5)))
        print("memory of the chief: {:.1f} MB, {:.1f} MB of it private".format(*job.chief.memory_mb))
        print(f"connections of the chief: {job.chief.connections}; of another watcher: {job.watchers[-1].connections}")
        if quiet_s:
            job.pause(timings.IDLE_S)
            report("quiet", job.cost(lambda: job.pause(quiet_s)))

        def some_wait():
            for _ in range(5):
                for rank in range(0, job.size, 100):
                    what = {"what": "allreduce(Average) #5 'loss'", "since_s": 1.0, "peers": True, "quiet": True}
                    job.send(rank, "waiting", **what, members=None, earlier="")
                job.pause(0.7)
                for rank in range(0, job.size, 100):
                    job.send(rank, "resumed")
                job.pause(0.3)

        report("1 % of the ranks wait, 1 s each", job.cost(some_wait))
        for late in ("last", "half"):
            job.set_steps(late)
            report(f"metrics, late: {late}", job.cost(lambda: monitor_for(job, 8, 2.0, states=False)))
        job.set_steps("last")
        report("top", job.cost(lambda: monitor_for(job, 6, 1.0, states=True)))
        print("memory of the chief: {:.1f} MB, {:.1f} MB of it private".format(*job.chief.memory_mb))
        job.pause(1)
        table_of(job)
        death_of(job)


def table_of(job):
    """Let a wait become long, and measure the table."""
    job.received.clear()
    what = {"what": "allreduce(Average) #6 'loss'", "since_s": 31.0, "peers": True, "quiet": False}
    job.chief.forget_longest_turn()
    job.send(0, "waiting", **what, members=None, earlier="")
    seconds = job.wait_for(lambda: job.ranks_with(b"p"))
    [data] = [data for messages in job.received.values() for data in messages if data[:1] == b"p"]
    text = json.loads(data[1:])["text"]
    print(f"stall table: {seconds:.2f} s, {len(text.splitlines())} lines, {len(text)} characters")
    job.send(0, "resumed")
    job.pause(0.5)


def death_of(job):
    """Kill a rank, let the others unwind, and end the job."""
    job.received.clear()
    cpu_s = job.chief.cpu_s
    job.chief.forget_longest_turn()
    job.kill_victim()
    seconds = job.wait_for(lambda: job.ranks_with(b"v") >= job.size - 1)
    print(f"death known to all ranks: {seconds:.3f} s; chief {job.chief.cpu_s - cpu_s:.3f} s CPU")
    for rank in range(job.size):
        if rank != job.victim:
            job.send(rank, "unwound")
    seconds = job.wait_for(lambda: job.ranks_with(b"r"))
    print(f"release: {seconds:.2f} s after the last unwound")
    job.kill()
    print(f"end after the death of all: {job.wait_for_end():.2f} s")


def measure_end(hosts, ranks):
    """Measure the normal end of a job."""
    with contextlib.ExitStack() as stack:
        directory_of_jobs(stack)
        job = Job(hosts, ranks)
        stack.callback(job.close)
        job.pause(1)
        before = job.chief.cpu_s
        job.leave()
        began, cpu_s = time.monotonic(), 0.0
        while job.chief.is_alive:
            cpu_s = max(cpu_s, job.chief.cpu_s - before)
            time.sleep(0.005)
        print(f"normal end: {time.monotonic() - began:.2f} s, chief {cpu_s:.3f} s CPU")


def measure_ticks(size):
    """The cost of a tick without processes."""
    job = JobState(size, size // 16, 30.0)
    for rank in range(size):
        job.handle({"event": "joined", "rank": rank, "host": f"host{rank // 16}"}, 0.0)

    def tick_ms(times=50):
        began = time.thread_time()
        for _ in range(times):
            job.tick(1.0)
        return 1000 * (time.thread_time() - began) / times

    job.tick(0.5)
    print(f"tick of {size} ranks: {tick_ms():.3f} ms in the quiet state", end="")
    for rank in range(0, size, 100):
        event = {"event": "waiting", "rank": rank, "what": "barrier()", "since_s": 1.0, "peers": True, "quiet": False}
        job.handle(event, 1.0)
    print(f", {tick_ms():.3f} ms with 1 % waiting", end="")
    for rank in range(1, size, 2):
        job.handle({"event": "left", "rank": rank}, 1.0)
    print(f", {tick_ms():.3f} ms with half ended", end="")
    job.handle({"event": "failed", "rank": 0, "code": 1, "words": "E", "traceback": ""}, 1.0)
    for rank in range(2, size, 2):
        job.handle({"event": "unwound", "rank": rank}, 1.0)
    print(f", {tick_ms():.3f} ms after the verdict")


def sample():
    """Print what a small job sends, as JSON, for the test: numbers that depend on no time."""
    with contextlib.ExitStack() as stack:
        directory_of_jobs(stack)
        job = Job(hosts=3, ranks=4)
        stack.callback(job.close)
        found = {"connections": [watcher.connections for watcher in job.watchers]}
        job.set_steps("last")
        with contextlib.closing(job.open_monitor()) as monitor:
            found["snapshot"] = monitor.snapshot(states=True)
            before, _ = job.chief.counts, job.pause(0.6)
            made = {name: number - before[name] for name, number in job.chief.counts.items()}
            found["bytes_of_a_sample"] = made["received_bytes"] / made["received"]
            found["late"] = monitor.snapshot(states=False)["late"]
        job.received.clear()
        job.kill_victim()
        others = [rank for rank in range(job.size) if rank != job.victim]
        job.wait_for(lambda: job.ranks_with(b"v") == len(others))
        for rank in others:
            job.send(rank, "unwound")
        job.wait_for(lambda: job.ranks_with(b"r") == len(others))
        found["received"] = {rank: [data[:1].decode() for data in each] for rank, each in job.received.items()}
        found["verdicts"] = sorted(
            {data.decode() for each in job.received.values() for data in each if data[:1] == b"v"}
        )
        print(json.dumps(found))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", action="store_true", help="only the numbers of the test")
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=16, help="of each host")
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds of the measurement of the quiet state")
    parser.add_argument("--only", choices=["ticks", "job", "end"])
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.sample:
        return sample()
    if options.only in (None, "ticks"):
        measure_ticks(options.hosts * options.ranks)
    if options.only in (None, "job"):
        measure(options.hosts, options.ranks, options.quiet)
    if options.only in (None, "end"):
        measure_end(options.hosts, options.ranks)


if __name__ == "__main__":
    main()

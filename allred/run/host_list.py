"""The hosts of a job and their slots: from options, a host file, or the variables of a batch system. A test before a
restart on which hosts mpirun can start processes."""

import concurrent.futures
import contextlib
import dataclasses
import re
import shlex
import socket
import subprocess
from collections.abc import Iterable, Mapping

from allred.errors import ConfigError
from allred.runtime.timings import PROBE_S

LOCAL = "localhost"
_MOST_HOSTS = 2**16
_MOST_CHARS = 255  # of a host; DNS allows 253


@dataclasses.dataclass(frozen=True)
class HostList:
    """slots: the number of ranks that each host may run, by name, in order; empty for this host without a limit.
    source: the option or variable that named them, for messages."""

    slots: dict[str, int]
    source: str = ""

    @property
    def total(self) -> int:
        """The number of slots of all hosts; 0 if there is no limit."""
        return sum(self.slots.values())

    def without(self, names: Iterable[str]) -> "HostList":
        """Return the hosts whose names are not in `names`."""
        lost = set(names)
        return HostList({name: slots for name, slots in self.slots.items() if name not in lost}, self.source)

    def assign(self, ranks: int) -> dict[str, int]:
        """Return the number of ranks on each host: the first hosts are filled first.

        >>> HostList({"node1": 2, "node2": 2}).assign(3), HostList({}).assign(3)
        ({'node1': 2, 'node2': 1}, {'localhost': 3})
        """
        if not self.slots:
            return {LOCAL: ranks}
        assigned, left = {}, ranks
        for name, slots in self.slots.items():
            if taken := min(slots, left):
                assigned[name] = taken
                left -= taken
        return assigned


def find(listed: str, hostfile: str, environ: Mapping[str, str]) -> HostList:
    """Return the hosts of the option --hosts or --hostfile, else those of the batch job that this process is part of.

    Raises ConfigError if they cannot be read."""
    if listed:
        return HostList(parse_list(listed), "--hosts")
    if hostfile:
        return HostList(parse_file(_read(hostfile, "--hostfile")), hostfile)
    return of_batch_job(environ)


def parse_list(text: str) -> dict[str, int]:
    """Parse `node1:4,node2`. A host without a number has one slot. Raises ConfigError.

    >>> parse_list("node1:4,node2")
    {'node1': 4, 'node2': 1}
    """
    slots: dict[str, int] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*([\w.-]+)(?::([1-9]\d{0,8}))?\s*", word)
        if match is None:
            raise ConfigError(f"--hosts {text}: {word!r} is not a host name, or a name and a number of slots (node1:4)")
        slots[match[1]] = slots.get(match[1], 0) + int(match[2] or 1)
    return slots


def parse_file(text: str, name: str = "--hostfile") -> dict[str, int]:
    """Parse a host file: a host in each line, with its slots as in `node1 slots=4`, `node1:4` or `node1 4`, else one
    slot for each line. `#` begins a comment. Raises ConfigError.

    >>> parse_file("node1 slots=4  # a comment\\nnode2:2\\nnode3\\nnode3\\n")
    {'node1': 4, 'node2': 2, 'node3': 2}
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        host, *options = re.sub(r"\s*=\s*", "=", line.partition("#")[0].replace(":", " ")).split() or [""]
        counts = [option.removeprefix("slots=") for option in options if not re.fullmatch(r"(?!slots=)\w+=\S+", option)]
        if not host and not options:
            continue
        if (
            not re.fullmatch(r"[\w.-]+", host)
            or len(counts) > 1
            or not all(re.fullmatch(r"[1-9]\d{0,8}", n) for n in counts)
        ):
            raise ConfigError(f"{name}, line {number}: {line!r} is not a host and its slots, such as 'node1 slots=4'")
        slots[host] = slots.get(host, 0) + int(counts[0] if counts else 1)
    if not slots:
        raise ConfigError(f"{name} names no host; write a line such as 'node1 slots=4' for each of them")
    return slots


def of_batch_job(environ: Mapping[str, str]) -> HostList:
    """Return the hosts of the batch job whose variables are set; none without a batch job. Raises ConfigError."""
    try:
        return _of_batch_job(environ)
    except (ValueError, IndexError) as error:
        if isinstance(error, ConfigError):
            raise
        names = [name for name in _BATCH_VARIABLES if name in environ]
        raise ConfigError(f"the hosts of the batch job, in {' or '.join(names)}, cannot be read: {error}") from None


_BATCH_VARIABLES = ("SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "PBS_NODEFILE", "LSB_MCPU_HOSTS", "PE_HOSTFILE")


def _of_batch_job(environ: Mapping[str, str]) -> HostList:
    if nodes := environ.get("SLURM_JOB_NODELIST"):
        tasks = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_JOB_CPUS_PER_NODE", "1")
        names, counts = expand_slurm_hosts(nodes), _expand_slurm_counts(tasks)
        counts += counts[-1:] * (len(names) - len(counts))
        return HostList(dict(zip(names, counts, strict=False)), "SLURM_JOB_NODELIST")
    if path := environ.get("PBS_NODEFILE"):
        return HostList(parse_file(_read(path, "PBS_NODEFILE"), path), "PBS_NODEFILE")
    if words := environ.get("LSB_MCPU_HOSTS", "").split():
        return HostList(
            {name: int(slots) for name, slots in zip(words[::2], words[1::2], strict=True)}, "LSB_MCPU_HOSTS"
        )
    if path := environ.get("PE_HOSTFILE"):
        lines = [line.split() for line in _read(path, "PE_HOSTFILE").splitlines() if line.strip()]
        return HostList({line[0]: int(line[1]) for line in lines}, "PE_HOSTFILE")
    return HostList({})


def expand_slurm_hosts(text: str) -> list[str]:
    """Return the names of a Slurm node list.

    >>> expand_slurm_hosts("login,n[08-10,12]-ib,gpu[1-2]")
    ['login', 'n08-ib', 'n09-ib', 'n10-ib', 'n12-ib', 'gpu1', 'gpu2']
    """
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        found = [""]
        for plain, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word):
            endings = [plain] if plain else [name for each in ranges.split(",") for name in _expand_range(each)]
            _check_count(len(found) * len(endings))
            if len(found[0]) + max(map(len, endings)) > _MOST_CHARS:
                raise ValueError(f"a host with more than {_MOST_CHARS} characters")
            found = [start + ending for start in found for ending in endings]
        names += found
        _check_count(len(names))
    return names


def _check_count(count: int) -> None:
    if count > _MOST_HOSTS:
        raise ValueError(f"more than {_MOST_HOSTS} hosts")


def _expand_range(text: str) -> list[str]:
    first, _, last = text.partition("-")
    numbers = range(int(first), int(last or first) + 1)
    _check_count(len(first) + numbers.stop - numbers.start)
    return [str(number).zfill(len(first)) for number in numbers]


def _expand_slurm_counts(text: str) -> list[int]:
    """Return the numbers of `4(x2),2`: [4, 4, 2]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    _check_count(sum(int(times or 1) for _, times in found))
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _read(path: str, title: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{title} {path}: {getattr(error, 'strerror', None) or error}") from None


def is_local(name: str) -> bool:
    """Return whether a host is this machine."""
    if name in (LOCAL, own := socket.gethostname(), own.partition(".")[0]):
        return True
    try:
        family, _, _, _, address = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # possible for an address of this machine only
    except OSError:
        return False
    return True


_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=5"
_SRUN = "srun --overlap --nodes=1 --ntasks=1 --immediate=5 --nodelist"
_OTHER_BATCH_SYSTEMS = ("PBS_NODEFILE", "LSB_MCPU_HOSTS", "PE_HOSTFILE")  # they start processes in their own ways


def agent(environ: Mapping[str, str]) -> list[str]:
    """Return the command that runs a program on a host, without the host's name: that of mpirun. Empty if unknown.

    >>> agent({"SLURM_JOB_ID": "7"})[0], agent({})[0], agent({"PE_HOSTFILE": "hosts"})
    ('srun', 'ssh', [])
    """
    for name in ("HYDRA_LAUNCHER_EXEC", "PRTE_MCA_plm_ssh_agent"):
        if name in environ:
            return shlex.split(environ[name].partition(":")[0])
    if "SLURM_JOB_ID" in environ:
        return _SRUN.split()
    return [] if any(name in environ for name in _OTHER_BATCH_SYSTEMS) else _SSH.split()


def unreachable(names: Iterable[str], environ: Mapping[str, str]) -> set[str]:
    """Return the hosts on which no process can be started within PROBE_S seconds; none if there is no way to test."""
    remote, words = [name for name in names if not is_local(name)], agent(environ)
    if not words or not remote:
        return set()
    with concurrent.futures.ThreadPoolExecutor(len(remote)) as pool:
        answers = pool.map(lambda name: _answers([*words, name, "true"]), remote)
        return {name for name, answered in zip(remote, answers, strict=True) if not answered}


def _answers(words: list[str]) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        null = subprocess.DEVNULL
        return subprocess.run(words, stdin=null, stdout=null, stderr=null, timeout=PROBE_S).returncode == 0
    return False

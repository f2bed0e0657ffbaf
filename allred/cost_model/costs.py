"""Times of an allreduce on `hosts` hosts with `ranks` ranks each, by three algorithms. Pure functions.

ring               the flat ring of NCCL and gloo: 2 (n - 1) steps, each with a chunk of 1/n of the bytes, over n ranks
two-level ring     allred: sums within a host in shared memory, then a ring between hosts, in windows (csrc/network.h)
two-level halving  the same with recursive halving and doubling between hosts

A step of an algorithm between hosts takes at least one message: latency_s + message_s + one packet on the wire. In a
streamed ring a host forwards a byte as soon as it is received and added, so a step takes the longer one of a message
and of its bytes on the wire. docs/scaling.md compares the model with measurements.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

HEADER_BYTES, HEAD_BYTES = 64, 16  # of a rank; of a message (csrc/header.h, csrc/network.c)
SMALL_BYTES = 2**14  # a sum that travels with the headers
LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES, BLOCK_BYTES = 2**20, 2**23, 2**17  # comm/backends/tcp.py:window_bytes


@dataclasses.dataclass(frozen=True)
class Machine:
    """Constants of the hosts and of the network between them."""

    latency_s: float  # between two hosts, one way, without the work of the hosts
    link_bytes_per_s: float  # of a host, in each direction at the same time
    message_s: float = 10e-6  # a message at both ends: system calls, and to wake the receiver
    stream_bytes_per_s: float = 4e9  # that a rank can send and receive by TCP, both at the same time
    copy_bytes_per_s: float = 10e9  # of a rank while all ranks of its host copy
    sum_bytes_per_s: float = 10e9  # of a rank: bytes of the result of an addition
    python_s: float = 50e-6  # an operation in Python
    packet_bytes: int = 1500
    packet_overhead_bytes: int = 52  # headers of IP and TCP

    @property
    def payload_bytes_per_s(self) -> float:
        return self.link_bytes_per_s * (1 - self.packet_overhead_bytes / self.packet_bytes)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of an allreduce. The parts are those of each resource alone; they overlap, so total_s is less than their
    sum."""

    total_s: float
    latency_s: float  # messages that follow each other, if the wire took no time
    wire_s: float  # bytes on the link of a host
    memory_s: float  # copies and sums of a rank, with those of TCP
    python_s: float

    @property
    def limit(self) -> str:
        """The largest part: latency, wire, memory or Python."""
        parts = {"latency": self.latency_s, "wire": self.wire_s, "memory": self.memory_s, "Python": self.python_s}
        return max(parts, key=lambda name: parts[name])


def window_bytes(hosts: int, ranks: int) -> int:
    return min(max(LEAST_WINDOW_BYTES, hosts * ranks * BLOCK_BYTES), MOST_WINDOW_BYTES)


def message_s(machine: Machine, nbytes: float = 0.0) -> float:
    """The time of a message from its start to its end at the receiver."""
    return machine.latency_s + machine.message_s + nbytes / machine.payload_bytes_per_s


def power_of_two(hosts: int) -> int:
    """The largest power of two that is at most `hosts`."""
    return 1 << (hosts.bit_length() - 1)


def header_messages(hosts: int, ranks: int, data_bytes: float) -> list[float]:
    """The bytes of each message of the round of headers: recursive doubling over a power of two of hosts. The other
    hosts send theirs before it, and get the result after it.

    >>> header_messages(4, 1, 0), header_messages(3, 1, 0)
    ([80.0, 144.0], [80.0, 144.0, 208.0])
    """
    if hosts == 1:
        return []
    whole = power_of_two(hosts)
    known = [2**number * hosts / whole for number in range(whole.bit_length() - 1)]  # hosts of which one knows
    counts = known if whole == hosts else [1.0, *known, float(hosts)]
    return [HEAD_BYTES + HEADER_BYTES * ranks * math.ceil(count) + data_bytes for count in counts]


def _windows(nbytes: float, hosts: int, ranks: int) -> Iterator[tuple[float, int]]:
    """Yield (bytes, number) of the windows of each size."""
    whole = window_bytes(hosts, ranks)
    count, rest = divmod(nbytes, whole)
    if count:
        yield float(whole), int(count)
    if rest:
        yield rest, 1


def _ring_s(machine: Machine, hosts: int, ranks: int, nbytes: float) -> tuple[float, float, float]:
    """Return (time, messages that follow each other, bytes that a host sends) of a window."""
    steps, block = 2 * (hosts - 1), nbytes / hosts
    first_s = message_s(machine, min(block, ranks * machine.packet_bytes))  # of each slice one packet
    wire_s = block / machine.payload_bytes_per_s
    return (steps - 1) * max(first_s, wire_s) + wire_s, steps - 1, steps * block


def _halving_s(machine: Machine, hosts: int, ranks: int, nbytes: float) -> tuple[float, float, float]:
    """As _ring_s, of recursive halving and doubling."""
    whole = power_of_two(hosts)
    sent = [2 * nbytes / 2**number for number in range(1, whole.bit_length())]
    if whole < hosts:
        sent.append(2 * nbytes)
    steps = 2 * len(sent)
    return steps * message_s(machine) + sum(sent) / machine.payload_bytes_per_s, steps, sum(sent)


_Passes = Callable[[Machine, int, int, float], tuple[float, float, float]]


def _two_level(passes: _Passes, hosts: int, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """The round of headers, then windows one after the other. Copies and sums of a window overlap with the wire, except
    for the first window and the last one."""
    small = 0 < nbytes <= SMALL_BYTES and hosts > 1
    messages = header_messages(hosts, ranks, nbytes if small else 0)
    latency_s = len(messages) * message_s(machine)
    wire_s = sum(messages) / machine.payload_bytes_per_s
    copy_s, add_s = 1 / machine.copy_bytes_per_s, 1 / machine.sum_bytes_per_s
    memory_s = HEADER_BYTES * hosts * ranks * copy_s
    within_s = 2 * copy_s + (ranks - 1) / ranks * add_s  # of a byte: to a window, the sum of the host, and back
    total_s = machine.python_s + latency_s + wire_s + memory_s
    if small or hosts == 1:
        memory_s += within_s * nbytes
        return Cost(total_s + within_s * nbytes, latency_s, wire_s, memory_s, machine.python_s)
    network_s = rank_s = first_s = 0.0
    for each, count in _windows(nbytes, hosts, ranks):
        took_s, follow, sent = passes(machine, hosts, ranks, each)
        between_s = sent / ranks / machine.stream_bytes_per_s + (hosts - 1) / hosts * each / ranks * add_s
        network_s += count * took_s
        rank_s += count * (within_s * each + between_s)
        first_s = first_s or within_s * each
        latency_s += count * follow * message_s(machine)
        wire_s += count * sent / machine.payload_bytes_per_s
    if nbytes:
        network_s += message_s(machine)  # the last bytes
    total_s += max(network_s + first_s, rank_s)
    return Cost(total_s, latency_s, wire_s, memory_s + rank_s, machine.python_s)


def two_level_ring(hosts: int, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """allred with a ring between hosts."""
    return _two_level(_ring_s, hosts, ranks, nbytes, machine)


def two_level_halving(hosts: int, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """allred with recursive halving and doubling between hosts."""
    return _two_level(_halving_s, hosts, ranks, nbytes, machine)


def flat_ring(hosts: int, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """A ring over all ranks; a rank sends a chunk when it has received and added all of the one before.

    In each step one chunk crosses each link, and a chunk crosses `hosts` links in n steps; the slower one of both is
    the time of a step.
    """
    n = hosts * ranks
    steps, chunk = 2 * (n - 1), nbytes / n
    wire_s = chunk / machine.payload_bytes_per_s if hosts > 1 else 0.0
    links = hosts if hosts > 1 else 0
    hop_s = machine.message_s + chunk / machine.copy_bytes_per_s + chunk / machine.sum_bytes_per_s / 2
    latency_s = links / n * machine.latency_s + machine.message_s
    memory_s = hop_s - machine.message_s
    step_s = max(wire_s, (links * (machine.latency_s + wire_s) / n + hop_s)) if n > 1 else 0.0
    parts = [steps * each for each in (step_s, latency_s, wire_s, memory_s)]
    return Cost(machine.python_s + parts[0], parts[1], parts[2], parts[3], machine.python_s)


ALGORITHMS = {"ring": flat_ring, "two-level halving": two_level_halving, "two-level ring": two_level_ring}


def fastest(hosts: int, ranks: int, nbytes: float, machine: Machine) -> str:
    """The name of the algorithm that takes the least time; of equal ones the first."""
    return min(ALGORITHMS, key=lambda name: ALGORITHMS[name](hosts, ranks, nbytes, machine).total_s)


def crossover_bytes(hosts: int, machine: Machine, ranks: int = 1) -> float:
    """The bytes from which on the two-level ring is at least as fast as halving; inf if it is not at 16 GiB."""

    def ring_wins(nbytes: float) -> bool:
        times = [function(hosts, ranks, nbytes, machine).total_s for function in (two_level_ring, two_level_halving)]
        return times[0] <= times[1] * (1 + 1e-9)

    high = float(2**34)
    if not ring_wins(high):
        return math.inf
    low = high
    while low > 1 and ring_wins(low):
        high, low = low, low / 2
    if low <= 1:
        return 0.0
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if ring_wins(middle) else (middle, high)
    return high

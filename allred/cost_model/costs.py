"""Times of an allreduce on `hosts` hosts with `ranks` ranks each, by three algorithms. Pure functions.

flat ring            of NCCL and gloo, over n ranks: 2 (n - 1) steps, each with a chunk of 1/n of the bytes
two-level recursive  allred: sums within a host in shared memory, then recursive halving and doubling between hosts, in
                     windows (csrc/network.h, csrc/network_schedule.h)
two-level ring       the same with a ring between hosts

Each step that follows another takes at least one message: latency_s + overhead_s, and its bytes on the wire. In the
ring between hosts a host forwards a byte as soon as it is received and added, so a step takes the longer one of a
message and of its bytes. docs/scaling.md compares the model with measurements.
"""

import dataclasses
import math
from collections.abc import Callable

MESSAGE_BYTES = 88  # a message with the headers of all ranks, which agree (csrc/network.c)
SMALL_BYTES = 2**14  # of a sum, in all messages of a round: it travels with the headers
LARGEST_RADIX, LATENCY_BYTES = 7, 2**16  # csrc/network_schedule.h; network_schedule.c
LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES, BLOCK_BYTES = 2**20, 2**23, 2**17  # comm/backends/tcp.py:window_bytes


@dataclasses.dataclass(frozen=True)
class Machine:
    """Constants of the hosts and of the network between them."""

    latency_s: float  # between two hosts, one way, without the work of the hosts
    link_bytes_per_s: float  # of a host, in each direction at the same time
    overhead_s: float = 10e-6  # of a message, at both ends: system calls, and to wake the receiver
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


def message_time_s(machine: Machine, nbytes: float = 0.0) -> float:
    """The time of a message from its start to its end at the receiver."""
    return machine.latency_s + machine.overhead_s + nbytes / machine.payload_bytes_per_s


def levels(hosts: int) -> tuple[list[int], bool]:
    """Return the radix of each level of a recursive exchange, and whether some hosts only take part through others.

    >>> levels(8), levels(6), levels(11), levels(1)
    (([2, 2, 2], False), ([2, 3], False), ([2, 5], True), ([], False))
    """
    for members in range(hosts, 0, -1):
        found, rest = [], members
        for radix in range(2, LARGEST_RADIX + 1):
            while rest % radix == 0:
                found.append(radix)
                rest //= radix
        if rest == 1:
            break
    return found, members < hosts


def header_messages(hosts: int) -> list[int]:
    """Return how many messages a host sends in each round of headers.

    >>> header_messages(4), header_messages(3), header_messages(11)
    ([1, 1], [2], [1, 1, 4, 1])
    """
    radixes, folded = levels(hosts)
    return [1] * folded + [radix - 1 for radix in radixes] + [1] * folded


def _ring_s(machine: Machine, hosts: int, ranks: int, nbytes: float) -> tuple[float, float, float]:
    """Return of a window: the seconds until the next one can be sent, how many of these are messages that follow each
    other, and the bytes that a host sends. The last bytes may still be on their way."""
    steps, block = 2 * (hosts - 1), nbytes / hosts
    first_s = message_time_s(machine, min(block / ranks, machine.packet_bytes))
    wire_s = block / machine.payload_bytes_per_s
    return (steps - 1) * max(first_s, wire_s) + wire_s, (steps - 1) * message_time_s(machine), steps * block


def _recursive_s(machine: Machine, hosts: int, ranks: int, nbytes: float) -> tuple[float, float, float]:
    """As _ring_s. At a level a host sends a part to each of the others of its group. A host that takes part through
    another one gives it all its bytes, and receives the result."""
    radixes, folded = levels(hosts)
    members = math.prod(radixes)
    sent = (2 * (members - 1) / members + folded) * nbytes
    steps, messages = 2 * len(radixes) + folded - 1, 2 * (sum(radixes) - len(radixes)) + folded - 1
    latency_s = steps * machine.latency_s + messages * machine.overhead_s
    return latency_s + sent / machine.payload_bytes_per_s, latency_s, sent


_Passes = Callable[[Machine, int, int, float], tuple[float, float, float]]


def _two_level(passes: _Passes, hosts: int, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """The round of headers, then windows one after the other. Copies and sums of a window overlap with the wire, except
    for the first window and the last one."""
    radixes, folded = levels(hosts)
    small = 0 < nbytes <= SMALL_BYTES / (max(radixes, default=2) - 1)
    messages = header_messages(hosts)
    latency_s = len(messages) * machine.latency_s + sum(messages) * machine.overhead_s
    wire_s = sum(messages) * (MESSAGE_BYTES + small * nbytes) / machine.payload_bytes_per_s
    copy_s, add_s = 1 / machine.copy_bytes_per_s, 1 / machine.sum_bytes_per_s
    within_s = 2 * copy_s + (ranks - 1) / ranks * add_s  # a byte to a window, the sum of the host, and back
    total_s, whole = machine.python_s + latency_s + wire_s, window_bytes(hosts, ranks)
    if small or hosts == 1:
        return Cost(total_s + within_s * nbytes, latency_s, wire_s, within_s * nbytes, machine.python_s)
    network_s = rank_s = first_s = 0.0
    for each, count in ((whole, nbytes // whole), (nbytes % whole, 1)):
        if not each * count:
            continue
        took_s, follow_s, sent = passes(machine, hosts, ranks, each)
        between_s = sent / ranks / machine.stream_bytes_per_s + (hosts - 1) / hosts * each / ranks * add_s
        network_s += count * took_s
        rank_s += count * (within_s * each + between_s)
        first_s = first_s or within_s * each
        latency_s += count * follow_s
        wire_s += count * sent / machine.payload_bytes_per_s
    if nbytes:
        network_s += message_time_s(machine)  # the last bytes
    if folded and passes is _recursive_s:
        network_s += message_time_s(machine, min(nbytes, whole))  # the first window, to the host that acts for this one
    return Cost(total_s + max(network_s + first_s, rank_s), latency_s, wire_s, rank_s, machine.python_s)


def two_level_ring(hosts: int, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """allred with a ring between hosts."""
    return _two_level(_ring_s, hosts, ranks, nbytes, machine)


def two_level_recursive(hosts: int, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """allred with recursive halving and doubling between hosts."""
    return _two_level(_recursive_s, hosts, ranks, nbytes, machine)


def flat_ring(hosts: int, ranks: int, nbytes: float, machine: Machine) -> Cost:
    """A ring over all ranks; a rank sends a chunk when it has received and added all of the one before.

    In each step one chunk crosses each link, and a chunk crosses `hosts` links in n steps; the slower one of both is
    the time of a step.
    """
    n = hosts * ranks
    steps, chunk = 2 * (n - 1), nbytes / n
    wire_s = chunk / machine.payload_bytes_per_s if hosts > 1 else 0.0
    links = hosts if hosts > 1 else 0
    hop_s = machine.overhead_s + chunk / machine.copy_bytes_per_s + chunk / machine.sum_bytes_per_s / 2
    latency_s = links / n * machine.latency_s + machine.overhead_s
    memory_s = hop_s - machine.overhead_s
    step_s = max(wire_s, (links * (machine.latency_s + wire_s) / n + hop_s)) if n > 1 else 0.0
    parts = [steps * each for each in (step_s, latency_s, wire_s, memory_s)]
    return Cost(machine.python_s + parts[0], parts[1], parts[2], parts[3], machine.python_s)


ALGORITHMS = {"flat ring": flat_ring, "two-level recursive": two_level_recursive, "two-level ring": two_level_ring}


def fastest(hosts: int, ranks: int, nbytes: float, machine: Machine) -> str:
    """Return the name of the algorithm that takes the least time; of equal ones the first."""
    return min(ALGORITHMS, key=lambda name: ALGORITHMS[name](hosts, ranks, nbytes, machine).total_s)


def algorithm_used(hosts: int, ranks: int, nbytes: float) -> str:
    """Return the name of the algorithm that allred uses (csrc/network_schedule.c:allred_recursive_limit_bytes)."""
    radixes, folded = levels(hosts)
    saved = hosts - 1 - len(radixes) - folded
    recursive = min(nbytes, window_bytes(hosts, ranks)) / ranks <= LATENCY_BYTES * max(saved, 0) / (1 + folded)
    return "two-level recursive" if recursive else "two-level ring"

"""`python -m allred model`: the communication of a step by each algorithm, from the number of hosts and their links."""

import argparse
import dataclasses
import math
from collections.abc import Callable

from allred.command_line import Parser, fail, parse, program
from allred.cost_model import units
from allred.cost_model.costs import ALGORITHMS, Cost, Machine, algorithm_used, fastest
from allred.cost_model.units import RATES, SIZES, TIMES, show
from allred.wording import count

_DESCRIPTION = """\
Computes how long the communication of a training step takes, without running it: for a flat ring over all ranks, and
for allred, which sums within a host in shared memory, with recursive halving or with a ring between hosts. It shows
which algorithm is the fastest for which sizes, the efficiency, and what limits. docs/scaling.md has the formulas, and
compares them with measurements.
"""
BACKWARD_PART = 2 / 3  # of the computation of a step: during it, gradients can be reduced
TARGET_EFFICIENCY = 0.9  # for which the needed computation is printed
MOST = 1024  # hosts (csrc/network_schedule.h), and ranks of a host (csrc/segment.h)
TIE_FACTOR = 1.02  # algorithms whose times differ by less are taken as equal
GRID_BYTES = [2.0 ** (step / 8) for step in range(16, 8 * 34 + 1)]  # from 4 B to 16 GiB

_CONSTANTS = {  # options of the constants of a host: field, units, meaning
    "--overhead": ("overhead_s", TIMES, "software overhead of a message, sender and receiver"),
    "--stream": ("stream_bytes_per_s", RATES, "TCP rate of one rank"),
    "--copy": ("copy_bytes_per_s", RATES, "copy rate of one rank while all ranks of the host copy"),
    "--sum": ("sum_bytes_per_s", RATES, "the same of additions"),
    "--python": ("python_s", TIMES, "time of one operation in Python"),
}


def main(arguments: list[str]) -> int:
    """Run the command. Return the exit code."""
    options = parse(_parser, arguments)
    if isinstance(options, int):
        return options
    constants = {field: getattr(options, field) for field, _, _ in _CONSTANTS.values()}
    if options.measure:
        from allred.cost_model.measurement import measure

        found = measure(options.ranks)
        words = [f"{name} {show(found[field], unit).replace(' ', '')}" for name, (field, unit, _) in _CONSTANTS.items()]
        print(f"measured on this host: {' '.join(words)}\n")
        constants = {field: constants[field] or value for field, value in found.items()}
    given = {field: value for field, value in constants.items() if value is not None}
    machine = Machine(options.latency, options.link, packet_bytes=options.packet, **given)
    try:
        nbytes, what = _bytes_of(options.set)
    except ValueError as error:
        return fail(f"{program('model')}: --set: {error}")
    print("\n".join(_report(options.hosts, options.ranks, machine, nbytes, what, options.compute)))
    return 0


def _bytes_of(name: str) -> tuple[float, str]:
    """Return the bytes of a gradient set in float32, or of a size, and their description. Raises ValueError."""
    from allred.bench.verify import SETS

    if name in SETS:
        tensors = [math.prod(shape) for shape in SETS[name]()]
        nbytes = 4.0 * sum(tensors)
        return nbytes, f"{name} ({show(nbytes, SIZES)} in {count(len(tensors), 'tensor')})"
    try:
        nbytes = units.parse(name, SIZES)
    except ValueError:
        raise ValueError(f"expected {', '.join(SETS)}, or a size such as 64MiB, got {name!r}") from None
    return nbytes, show(nbytes, SIZES)


def _report(hosts: int, ranks: int, machine: Machine, nbytes: float, what: str, compute_s: float | None) -> list[str]:
    costs = {name: function(hosts, ranks, nbytes, machine) for name, function in ALGORITHMS.items()}
    lines = [f"{what} on {count(hosts, 'host')} with {count(ranks, 'rank')} each", ""]
    lines += _table(costs)
    lines += ["", "fastest by size:", *_fastest_by_size(hosts, ranks, machine), ""]
    best = fastest(hosts, ranks, nbytes, machine)
    lines.append(f"fastest for {what}: {best}; {costs[best].limit} limits it")
    lines.append(f"allred uses: {algorithm_used(hosts, ranks, nbytes)}")
    return lines + _efficiency(costs[best].total_s, compute_s)


def _table(costs: dict[str, Cost]) -> list[str]:
    rows = [["", "time", "latency", "wire", "memory", "Python", "limit"]]
    for name, cost in costs.items():
        times = cost.total_s, cost.latency_s, cost.wire_s, cost.memory_s, cost.python_s
        rows.append([name, *(show(each, TIMES) for each in times), cost.limit])
    return [f"{row[0]:20}{''.join(f'{cell:>9}' for cell in row[1:])}" for row in rows]


def _fastest_by_size(hosts: int, ranks: int, machine: Machine) -> list[str]:
    """Return a line for each range of sizes in which one algorithm is the fastest, or at most 2 % slower."""
    begins: list[tuple[str, str]] = []  # of each range: the algorithm, the first size
    for nbytes in GRID_BYTES:
        times = {name: function(hosts, ranks, nbytes, machine).total_s for name, function in ALGORITHMS.items()}
        best = min(times, key=lambda name: times[name])
        if not begins or times[begins[-1][0]] > TIE_FACTOR * times[best]:
            begins.append((best, show(nbytes, SIZES)))
    ends = [f" to {begin}" for _, begin in begins[1:]] + [""]
    return [f"  {name:20} from {begin}{end}" for (name, begin), end in zip(begins, ends, strict=True)]


def _efficiency(communication_s: float, compute_s: float | None) -> list[str]:
    """Efficiency: the computation of a step, divided by the time of the step. With overlap, gradients are reduced while
    the backward pass computes others."""
    if compute_s is None:
        alone_s = communication_s * TARGET_EFFICIENCY / (1 - TARGET_EFFICIENCY)
        overlapped_s = communication_s / (1 / TARGET_EFFICIENCY - 1 + BACKWARD_PART)
        return [
            f"an efficiency of {TARGET_EFFICIENCY:.0%} needs {show(alone_s, TIMES)} of computation in a step, "
            f"with overlap {show(overlapped_s, TIMES)}"
        ]
    alone = compute_s / (compute_s + communication_s)
    overlapped = compute_s / (compute_s + max(0.0, communication_s - BACKWARD_PART * compute_s))
    return [f"efficiency with {show(compute_s, TIMES)} of computation: {alone:.1%}, with overlap {overlapped:.1%}"]


def _quantity(unit: dict[str, float], zero: bool = False) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = units.parse(text, unit)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not value and not zero:
            raise argparse.ArgumentTypeError(f"expected more than 0, got {text!r}")
        return value

    return convert


def _whole(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number > 0, got {text!r}")
    return int(text)


def _up_to_most(text: str) -> int:
    if (value := _whole(text)) > MOST:
        raise argparse.ArgumentTypeError(f"allred has at most {MOST} hosts, and as many ranks on each, got {text!r}")
    return value


def _packet(text: str) -> int:
    if (value := _whole(text)) <= Machine.packet_overhead_bytes:
        least = Machine.packet_overhead_bytes
        raise argparse.ArgumentTypeError(f"expected more than {least}, the bytes of IP and TCP headers, got {text!r}")
    return value


def _parser(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog=program("model"), description=_DESCRIPTION)
    add = parser.add_argument
    add("--hosts", type=_up_to_most, required=True, metavar="N", help="number of hosts")
    add("--ranks", type=_up_to_most, default=1, metavar="N", help="ranks of each host; default 1")
    add("--link", type=_quantity(RATES), required=True, metavar="RATE", help="of a host in each direction: 100Gbit/s")
    add("--latency", type=_quantity(TIMES, zero=True), required=True, metavar="TIME", help="one way: 5us, 0.2ms")
    add("--set", default="resnet50", metavar="SET", help="gradients: resnet50 (default), transformer, small, or 64MiB")
    add("--compute", type=_quantity(TIMES), metavar="TIME", help="computation of a step, for the efficiency")
    add("--packet", type=_packet, default=1500, metavar="BYTES", help="size of a packet (MTU); default 1500")
    add("--measure", action="store_true", help="measure the constants of this host that are not given, in about 5 s")
    defaults = {field.name: field.default for field in dataclasses.fields(Machine)}
    for name, (field, unit, meaning) in _CONSTANTS.items():
        kind, default = ("TIME" if unit is TIMES else "RATE"), show(defaults[field], unit)  # type: ignore[arg-type]
        add(name, dest=field, type=_quantity(unit), metavar=kind, help=f"{meaning}; default {default}")
    return parser.parse_args(arguments)

"""What a benchmark prints, on rank 0: a JSON object a line for programs, or a table for people."""

import json
from collections import Counter
from typing import Any

from allred.bench import measure, setting
from allred.ps.account import histogram

_RATES = ("copy_GBps", "pack_GBps", "unpack_GBps", "pack_scaled_GBps", "unpack_divided_GBps")
_COLUMNS = {"p50_us": "p50 us", "p99_us": "p99 us", "algbw_GBps": "algbw GB/s"}


def numbers(
    ours: measure.Samples, against: str | None, theirs: measure.Samples | None, nbytes: int, size: int | None = None
) -> dict[str, Any]:
    """The measured part of a line: times in microseconds, bandwidths in GB/s, how many times faster than `against`.

    size: ranks of an allreduce, for its busbw."""
    p50 = ours.us(50)
    algbw = measure.algbw(nbytes, p50)
    other = theirs.us(50) if theirs else None
    return {
        "p50_us": short(p50),
        "p99_us": short(ours.us(99)),
        "algbw_GBps": short(algbw),
        **({} if size is None else {"busbw_GBps": short(measure.busbw(algbw, size))}),
        "against": against,
        "against_p50_us": other and short(other),
        "against_p99_us": theirs and short(theirs.us(99)),
        "speedup": other and short(other / p50),
        "samples": len(ours.seconds),
        "calls_per_sample": ours.batch,
    }


def short(value: float) -> float:
    """Four significant digits.

    >>> short(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


def _columns(bench: str) -> dict[str, str]:
    """The heads of a table's numbers, by their names in a record."""
    last = {"updates_per_s": "updates/s"} if bench == "ps" else {"busbw_GBps": "busbw GB/s"}
    return {**_COLUMNS, **last}


class Printer:
    """Prints lines as they come, in one of the two forms, if this rank is the one that speaks."""

    def __init__(self, as_json: bool, speaks: bool) -> None:
        self.as_json = as_json
        self.speaks = speaks

    def begin(self, bench: str, common: dict[str, Any], where: dict[str, Any], against: str | None) -> None:
        """What holds for all lines, and the head of the table."""
        if self.as_json or not self.speaks:
            return
        ranks = f"{common['ranks']} rank{'s' * (common['ranks'] > 1)}"
        if bench == "ps":
            ranks += f": {common['servers']} to serve, {common['workers']} to work, {common['consistency']}"
        dtype = f"{common['dtype']} as {common['compression']}" if "compression" in common else common["dtype"]
        print(f"{bench}: {dtype}, {where['op']}, in place, blocking; {ranks}, backend {common['backend']}")
        if "gpu" in where:
            print(f"{where['gpu']}, NCCL {where['nccl']}, cupy {where['cupy']}")
        print(*setting.lines(where), sep="\n")
        head = [
            f"{'size' if bench == 'allreduce' else 'set':>12}",
            *(f"{name:>11}" for name in _columns(bench).values()),
        ]
        head += [f"{'samples':>14}", *(["  against", " its p50 us, speedup"] if against else [])]
        print("".join(head), flush=True)

    def end(self, progress_thread: bool) -> None:
        """What holds at the end: whether a thread for started operations has taken cycles from the measured calls."""
        if self.speaks and not self.as_json:
            print(f"{'a' if progress_thread else 'no'} progress thread alive", flush=True)

    def line(self, record: dict[str, Any]) -> None:
        """One measured line."""
        if not self.speaks:
            return
        if self.as_json:
            print(json.dumps(record), flush=True)
            return
        times = "".join(f"{number(record[key]):>11}" for key in _columns(record["bench"]))
        text = f"{record.get('set') or size_name(record['bytes']):>12}{times}"
        text += f"{record['samples']:>6} x {record['calls_per_sample']:<5}"
        if record["against"]:
            text += f"  {record['against']} {number(record['against_p50_us'])} us, {record['speedup']:.2f}x"
        print(text.rstrip(), flush=True)
        if "enqueue_us" in record:
            rates = ", ".join(f"{key[:-5].replace('_', ' ')} {number(record[key])}" for key in record if key in _RATES)
            print(f"{'':>12}  enqueueing a call: {number(record['enqueue_us'])} us; GB/s of a {rates}", flush=True)
        if "staleness" in record:
            print(f"{'':>12}  staleness: {histogram(Counter(record['staleness']))}", flush=True)


def number(value: float) -> str:
    """Four significant digits, without an exponent.

    >>> number(12345.6), number(1.23456), number(0.000012)
    ('12,346', '1.235', '0.00001')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 0.001 or not value else f"{value:.5f}"


def size_name(nbytes: int) -> str:
    """Bytes as people write them.

    >>> size_name(4), size_name(65536), size_name(1500)
    ('4 B', '64 KiB', '1500 B')
    """
    power = next((power for power in (3, 2, 1) if nbytes and nbytes % 1024**power == 0), 0)
    return f"{nbytes // 1024**power} {('B', 'KiB', 'MiB', 'GiB')[power]}"

"""Output of a benchmark on rank 0: the conditions of the measurement; one JSON object per line, or a table."""

import json
import os
from collections import Counter
from typing import Any

from allred.bench import measure
from allred.cluster import mpi
from allred.ps.protocol import histogram
from allred.wording import count, ranges

_RATES = ("copy_GBps", "pack_GBps", "unpack_GBps", "pack_scaled_GBps", "unpack_divided_GBps")
_SHARED = {"p50_us": "p50 us", "p99_us": "p99 us", "algbw_GBps": "algbw GB/s"}
_ALLREDUCE = {**_SHARED, "busbw_GBps": "busbw GB/s"}
_COLUMNS = {
    "allreduce": _ALLREDUCE,
    "fused": _ALLREDUCE,
    "ps": {**_SHARED, "updates_per_s": "updates/s"},
    "step": _SHARED,
    "checkpoint": _SHARED,
}

# Freed memory stays in the process; large blocks come from the heap too; the heap uses huge pages.
TUNABLES = f"glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold={2**64 - 1}:glibc.malloc.mmap_threshold={2**64 - 1}"


def result(
    ours: measure.CallTimes, against: str | None, theirs: measure.CallTimes | None, nbytes: int, size: int | None = None
) -> dict[str, Any]:
    """The measured part of a record: times in microseconds, bandwidths in GB/s, speedup over `against`. size: number of
    ranks of an allreduce, for busbw."""
    p50 = ours.us(50)
    algbw = measure.algbw(nbytes, p50)
    their_p50 = theirs.us(50) if theirs else None
    return {
        "p50_us": rounded(p50),
        "p99_us": rounded(ours.us(99)),
        "algbw_GBps": rounded(algbw),
        **({} if size is None else {"busbw_GBps": rounded(measure.busbw(algbw, size))}),
        "against": against,
        "against_p50_us": their_p50 and rounded(their_p50),
        "against_p99_us": theirs and rounded(theirs.us(99)),
        "speedup": their_p50 and rounded(their_p50 / p50),
        "samples": len(ours.seconds),
        "calls_per_sample": ours.batch,
    }


def rounded(value: float) -> float:
    """Round to four significant digits.

    >>> rounded(0.123456)
    0.1235
    """
    return float(f"{value:.4g}")


class ResultWriter:
    """Prints each record when it is measured, as JSON or as a row of a table. enabled: this rank prints."""

    def __init__(self, as_json: bool, enabled: bool) -> None:
        self.as_json = as_json
        self.enabled = enabled

    def header(self, bench: str, labels: dict[str, Any], conditions: dict[str, Any], against: str | None) -> None:
        """Print what all rows share, and the column headers."""
        if self.as_json or not self.enabled:
            return
        ranks = count(labels["ranks"], "rank")
        if bench == "ps":
            ranks += f": servers {labels['servers']}, workers {labels['workers']}, {labels['consistency']}"
        dtype = f"{labels['dtype']} as {labels['compression']}" if "compression" in labels else labels["dtype"]
        backend = f"{labels['backend']}, arena {labels['arena']}" if "arena" in labels else labels["backend"]
        print(f"{bench}: {dtype}, {conditions['op']}, in place, blocking; {ranks}, backend {backend}")
        if "gpu" in conditions:
            print(f"{conditions['gpu']}, NCCL {conditions['nccl']}, cupy {conditions['cupy']}")
        print(*condition_lines(conditions), sep="\n")
        columns = [
            f"{'size' if bench == 'allreduce' else 'set':>12}",
            *(f"{name:>11}" for name in _COLUMNS[bench].values()),
        ]
        columns += [f"{'samples':>14}", *(["  against: p50 us, speedup"] if against else [])]
        print("".join(columns), flush=True)

    def text(self, text: str) -> None:
        """Print a line that is no result."""
        if self.enabled and not self.as_json:
            print(text, flush=True)

    def result(self, record: dict[str, Any], text: str) -> None:
        """Print a result, as JSON or as this text."""
        if self.enabled:
            print(json.dumps(record) if self.as_json else text, flush=True)

    def footer(self, progress_thread: bool) -> None:
        """Print whether a progress thread runs: it competes with the measured calls for cores."""
        self.text(f"progress thread: {'running' if progress_thread else 'not running'}")

    def line(self, record: dict[str, Any]) -> None:
        times = "".join(f"{number(record[key]):>11}" for key in _COLUMNS[record["bench"]])
        text = f"{record.get('set') or size_name(record['bytes']):>12}{times}"
        text += f"{record['samples']:>6} x {record['calls_per_sample']:<5}"
        if record["against"]:
            text += f"  {record['against']}: {number(record['against_p50_us'])}, {record['speedup']:.2f}x"
        lines = [text.rstrip()]
        if "enqueue_us" in record:
            rates = ", ".join(f"{key[:-5].replace('_', ' ')} {number(record[key])}" for key in record if key in _RATES)
            lines.append(f"{'':>12}  enqueue: {number(record['enqueue_us'])} us per call; GB/s: {rates}")
        if "staleness" in record:
            lines.append(f"{'':>12}  staleness: {histogram(Counter(record['staleness']))}")
        self.result(record, "\n".join(lines))


def tuned() -> bool:
    return TUNABLES in os.environ.get("GLIBC_TUNABLES", "")


def describe(comm: Any, mpi_settings: dict[str, str]) -> dict[str, Any]:
    """The conditions as a JSON record. Collective over the mpi4py communicator `comm`."""
    from mpi4py import MPI

    library = mpi.library_name(MPI.Get_library_version())
    other_mpi = "MPIR_CVAR_" if library.startswith("Open MPI") else "OMPI_MCA_"
    levels = {getattr(MPI, f"THREAD_{word.upper()}"): word for word in ("single", "funneled", "serialized", "multiple")}
    return {
        "mpi": library,
        "thread_level": levels[MPI.Query_thread()],
        "threads": len(os.listdir("/proc/self/task")),
        "mpi_settings": {name: value for name, value in mpi_settings.items() if not name.startswith(other_mpi)},
        "binding": comm.allgather(ranges(os.sched_getaffinity(0))),
        "cores": os.cpu_count(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES", ""),
        "tuned": tuned(),
    }


def condition_lines(record: dict[str, Any]) -> list[str]:
    settings = " ".join(f"{name}={value}" for name, value in record["mpi_settings"].items())
    binding = record["binding"]
    where = f"{binding[0]} each" if len(set(binding)) == 1 else ", ".join(binding)
    return [
        f"{record['mpi']}, thread level {record['thread_level']}; settings: {settings or 'none'}",
        f"{record['cores']} cores, binding of the ranks: {where}; threads per rank: {record['threads']}; "
        f"GLIBC_TUNABLES: {record['glibc_tunables'] or 'none'}",
    ]


def number(value: float) -> str:
    """Four significant digits without an exponent.

    >>> number(12345.6), number(1.23456), number(0.000012)
    ('12,346', '1.235', '0.00001')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 0.001 or not value else f"{value:.5f}"


def size_name(nbytes: int) -> str:
    """A size in bytes, KiB, MiB or GiB.

    >>> size_name(4), size_name(65536), size_name(1500)
    ('4 B', '64 KiB', '1500 B')
    """
    power = next((power for power in (3, 2, 1) if nbytes and nbytes % 1024**power == 0), 0)
    return f"{nbytes // 1024**power} {('B', 'KiB', 'MiB', 'GiB')[power]}"

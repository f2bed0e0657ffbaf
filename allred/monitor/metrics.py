"""The metrics endpoint for Prometheus: a process on the chief's host, which asks the watcher at each scrape.

python metrics.py JOB ADDRESS     prints the URL or an error; ends with the job
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from allred.errors import AllredError
from allred.monitor import Connection, Snapshot, open_job
from allred.runtime.timings import ADDRESS_FREE_S, NEXT_WATCHER_S, RETRY_S

# Name of the metric: (key of a snapshot, meaning). All are counters since init() of this start, by rank.
_SUMS = {
    "allred_steps": ("steps", "Steps of the rank"),
    "allred_examples": ("examples", "Samples of the rank"),
    "allred_skipped_steps": ("skipped", "Steps that were skipped because of gradients that are not finite"),
    "allred_gradient_bytes": ("bytes", "Bytes of gradients that the rank has sent"),
    "allred_dropped_gradients": ("dropped", "Mode ps: gradients that the servers dropped"),
    "allred_staleness_sum": ("staleness", "Mode ps: sum of the staleness of the gradients"),
}
_PHASES = {"waiting": "waiting_s", "communicating": "communicating_s"}


class Collector:
    """A collector of prometheus_client. job: the connection to the watcher."""

    def __init__(self, job: Connection) -> None:
        self.job = job

    def collect(self) -> Iterator[Any]:
        return families(self.job.snapshot(states=False))


def families(now: Snapshot) -> Iterator[Any]:
    """Yield the metrics of a snapshot."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["job_name", "rank", "host"]
    ranks = [([now["job"], str(rank["rank"]), rank["host"]], rank) for rank in now["ranks"]]
    yield GaugeMetricFamily("allred_ranks", "Ranks of the job", value=now["size"])
    yield CounterMetricFamily("allred_starts", "Starts of the job by `allred run`", value=now["starts"])
    step = GaugeMetricFamily("allred_global_step", "Global step", labels=labels)
    for label, rank in ranks:
        step.add_metric(label, rank["step"])
    yield step
    for name, (key, meaning) in _SUMS.items():
        family = CounterMetricFamily(name, meaning, labels=labels)
        for label, rank in ranks:
            family.add_metric(label, rank[key])
        yield family
    phases = CounterMetricFamily("allred_phase_seconds", "Seconds of the rank by phase", labels=[*labels, "phase"])
    for label, rank in ranks:
        for phase, key in _PHASES.items():
            phases.add_metric([*label, phase], rank[key])
        others = sum(rank[key] for key in _PHASES.values())
        phases.add_metric([*label, "computing"], max(0.0, rank["seconds"] - others))
    yield phases
    delays = CounterMetricFamily(
        "allred_delay_seconds",
        "Seconds that `rank` waited for rank `late`, from samples; in a large job `rank` is `all`: the sum",
        labels=["rank", "late"],
    )
    for rank, late, seconds in now["delays"] or [["all", late, seconds] for late, _, seconds in now["late"]]:
        delays.add_metric([str(rank), str(late)], seconds)
    yield delays


def parse_address(text: str) -> tuple[str, int]:
    """Parse `9100` or `host:9100`. Raises ValueError.

    >>> parse_address("9100"), parse_address("0.0.0.0:9100")
    (('127.0.0.1', 9100), ('0.0.0.0', 9100))
    """
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"{text!r} is not a port, or host:port")
    return host.strip("[]") or "127.0.0.1", int(port)


def url(host: str, port: int) -> str:
    """Return the address that a browser opens.

    >>> url("127.0.0.1", 9100), url("::1", 9100)
    ('http://127.0.0.1:9100/metrics', 'http://[::1]:9100/metrics')
    """
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/metrics"


def open_next(job: str) -> Connection | None:
    """Return a connection to the job if it goes on with another watcher within NEXT_WATCHER_S; else None."""
    until = time.monotonic() + NEXT_WATCHER_S
    while time.monotonic() < until:
        with contextlib.suppress(AllredError, OSError):
            found = open_job(job)
            found.snapshot(states=False)
            return found
        time.sleep(RETRY_S)
    return None


def main(job: str, address: str, is_elastic: str = "") -> None:
    """Serve until the job ends. is_elastic: "elastic" if it is, and each of its worlds has a watcher."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        return print("prometheus-client is missing: pip install prometheus-client", flush=True)
    try:
        host, port = parse_address(address)
        connection, lifeline = open_job(job), open_job(job)
        connection.snapshot(states=False)  # the watcher closes a connection without a first message
        registry = CollectorRegistry(auto_describe=False)
        until = time.monotonic() + ADDRESS_FREE_S
        while True:
            try:
                start_http_server(port, host, registry)
                break
            except OSError as error:
                if time.monotonic() > until:
                    return print(f"cannot listen on {host} port {port}: {error.strerror}", flush=True)
                time.sleep(RETRY_S)
        collector = Collector(connection)
        registry.register(collector)
        print(url(host, port), flush=True)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        lifeline.wait_for_end()
        while is_elastic and (found := open_next(job)) is not None:
            collector.job = open_job(job)
            found.wait_for_end()
    except (AllredError, ValueError) as error:
        print(error, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

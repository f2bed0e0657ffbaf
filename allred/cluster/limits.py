"""What the kernel allows this process: a cgroup's memory and processors, of both versions of cgroups.

A limit may stand on any level above the process's own group; the smallest one counts. Inside a container the path that
/proc/self/cgroup gives is often that of the host, and what is mounted is the container's own group: where the path does
not exist, the mount itself is looked at.
"""

import dataclasses
import pathlib

UNLIMITED = 2**60  # version 1 says so with a number of about 2**63


@dataclasses.dataclass(frozen=True)
class Limits:
    """None where there is none."""

    memory_bytes: int | None
    cpus: float | None


def look(root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"), own: str | None = None) -> Limits:
    """The limits of the process whose /proc/PID/cgroup is `own`; default: this one."""
    text = pathlib.Path("/proc/self/cgroup").read_text() if own is None else own
    memory: list[int] = []
    cpus: list[float] = []
    for entry in text.splitlines():
        _, controllers, path = entry.split(":", 2)
        mounts = [root / name for name in {controllers, *controllers.split(",")}] if controllers else [root]
        for mount in mounts:
            for group in _upwards(mount, path):
                memory += _memory(group)
                cpus += _cpus(group)
    return Limits(min(memory, default=None), min(cpus, default=None))


def _upwards(mount: pathlib.Path, path: str) -> list[pathlib.Path]:
    """The process's group and those above it, as far as they can be seen."""
    group = mount / path.lstrip("/")
    inside = [group, *group.parents]
    return [one for one in inside if one.is_relative_to(mount) and one.is_dir()]


def _memory(group: pathlib.Path) -> list[int]:
    values = (_read(group / name) for name in ("memory.max", "memory.limit_in_bytes"))
    return [int(value) for value in values if value.isdigit() and int(value) < UNLIMITED]


def _cpus(group: pathlib.Path) -> list[float]:
    words = _read(group / "cpu.max").split()
    words = words or [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return [int(words[0]) / int(words[1])]
    return []


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

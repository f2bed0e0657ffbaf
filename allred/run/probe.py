"""Tests before a restart on which hosts mpirun can start processes."""

import concurrent.futures
import contextlib
import shlex
import subprocess
from collections.abc import Iterable, Mapping

from allred.run.host_list import is_local
from allred.runtime.timings import PROBE_S

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

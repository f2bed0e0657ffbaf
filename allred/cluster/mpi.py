"""The start of MPI: its settings, the import, and a check that its world is the one that was launched."""

import contextlib
import os
import pathlib
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from allred import log
from allred.cluster import launcher
from allred.errors import ConfigError, InputError
from allred.runtime.timings import PRINT_FIRST_S
from allred.wording import count

# Open MPI's default algorithm of MPI_Iallreduce sends as a reduce and a broadcast, and `put` of its BTL tcp uses one
# direction of a link at a time: both take twice as long as needed.
_SEVERAL_HOSTS = {
    "OMPI_MCA_coll_libnbc_iallreduce_algorithm": "3",  # Rabenseifner's
    "OMPI_MCA_btl_tcp_flags": "1",  # send only
}

# MPICH 5 takes 5.3 MiB of /dev/shm per rank (measured), or 1 MiB if much less is free; between both it may crash.
_SHM_RANK_BYTES, _SHM_BYTES = 6 << 20, 16 << 20

_HOST_FILE_4, _HOST_FILE_5 = "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"

_given: dict[str, str] | None = None  # the settings with which allred started MPI; None if it did not start it


def load() -> tuple[Any, bool]:
    """Start MPI. Return the module mpi4py.MPI, and whether this call started MPI.

    The module is None if no MPI can be loaded and no launcher started this process. Raises ConfigError if a launcher
    started this process and no MPI can be loaded, or if that launcher cannot start ranks of this MPI.
    """
    global _given
    import mpi4py

    imports = "mpi4py.MPI" not in sys.modules
    if imports:
        mpi4py.rc.finalize = False  # watch/exit.py does it
        mpi4py.rc.initialize = False  # done below, after the check of the launcher
    passing = settings(os.environ) if imports else {}
    os.environ.update(passing)
    try:
        MPI = _module()  # noqa: N806  (mpi4py's spelling)
        starts = MPI is not None and not MPI.Is_initialized()
        if starts:
            check_launcher(MPI.Get_library_version())
            _warn_of_small_shm(MPI.Get_library_version(), os.environ)
            if mpi4py.rc.threads:
                MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
            else:
                MPI.Init()
    finally:
        for name in passing:  # programs that this one starts do not inherit them
            os.environ.pop(name, None)
    if imports and MPI is not None:
        _given = passing
    return MPI, starts


def _module() -> Any:
    """Import mpi4py.MPI; None if no MPI can be loaded and no launcher started this process."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        launched = launcher.launched_size(os.environ)
        if launched == 1:
            return None
        raise ConfigError(
            f"{launched} processes were launched, but mpi4py cannot load an MPI library ({error}); install the MPI of "
            "your launcher into this environment, for example: pip install mpich"
        ) from None
    return MPI


def load_library() -> tuple[str, bool]:
    """Load the MPI library. Return its name ("" without one), and whether MPI is running. Does not start MPI."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return "", False
    return library_name(MPI.Get_library_version()), MPI.Is_initialized()


def describe_settings() -> str:
    """Describe the settings with which allred started MPI."""
    if "mpi4py.MPI" not in sys.modules:
        return "MPI has not been started"
    from mpi4py import MPI

    meant = settings(os.environ) if _given is None else _given
    words = " ".join(f"{name}={value}" for name, value in meant.items())
    if not words or not MPI.Get_library_version().startswith("Open MPI"):
        return "none needed"
    if _given is None:
        return f"too late for {words}: MPI was started before allred.init(); call that before importing mpi4py.MPI"
    return f"{words}, given at its start"


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return settings for Open MPI that the user has not set, in the environment or in an MCA parameter file.

    Several hosts: _SEVERAL_HOSTS. One host: a value of OMPI_MCA_btl, which saves a second of the start. Open MPI probes
    for libfabric, which ranks of one node never use. Without a launcher, and unless it is limited to the BTL `self`, it
    leaves a file in /dev/shm on every exit. A program without a launcher that spawns processes with MPI has to set
    OMPI_MCA_btl.
    """
    local_size = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if local_size is not None and environ.get("OMPI_COMM_WORLD_SIZE") != local_size:
        in_files = _mca_file_parameters(environ)
        unset = {name: value for name, value in _SEVERAL_HOSTS.items() if name not in environ}
        return {name: value for name, value in unset.items() if name.removeprefix("OMPI_MCA_") not in in_files}
    if "OMPI_MCA_btl" in environ:
        return {}
    if "PMIX_RANK" not in environ and launcher.launched_size(environ) == 1:
        return {"OMPI_MCA_btl": "self"}
    return {} if local_size is None else {"OMPI_MCA_btl": "^ofi"}


def _mca_file_parameters(environ: Mapping[str, str]) -> set[str]:
    """Return the names of the parameters in Open MPI's parameter files: the user's, and those of its installation."""
    prefixes = [pathlib.Path(sys.prefix), pathlib.Path(environ.get("OPAL_PREFIX", sys.prefix))]
    if mpirun := launcher.mpirun_on_path():
        prefixes.append(pathlib.Path(mpirun).resolve().parents[1])
    files = [prefix / "etc/openmpi-mca-params.conf" for prefix in prefixes]
    if "HOME" in environ:
        files.append(pathlib.Path(environ["HOME"]) / ".openmpi/mca-params.conf")
    names = set()
    for file in files:
        with contextlib.suppress(OSError):
            lines = file.read_text(errors="replace").splitlines()
            names |= {line.partition("=")[0].strip() for line in lines if "=" in line.partition("#")[0]}
    return names


def check_launcher(library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if this launcher cannot start ranks of this MPI. Called before MPI starts: MPICH would end the
    process, and Open MPI would start a world of one rank in each. library: the text of MPI_Get_library_version."""
    if launcher.launched_size(environ) > 1 and launcher.incompatible(launcher.name(environ), library):
        raise ConfigError(launcher.mismatch_error(environ, library_name(library)))
    if launcher.implementation(library) != "Open MPI" and not _is_open(environ.get("PMI_FD", "")):
        raise ConfigError(
            f"a rank started this process without its connection to the launcher (PMI_FD={environ['PMI_FD']} is not "
            "open here), so it cannot join the world in place of that rank; start it by os.exec or with "
            "subprocess.Popen(close_fds=False). For a world of its own, start it without the variables PMI_* and MPI_*"
        )


def _warn_of_small_shm(library: str, environ: Mapping[str, str]) -> None:
    """Print a warning on one rank of this host if /dev/shm may be too small for MPICH, which then ends in MPI_Init by a
    signal, without a message. Open MPI prints one."""
    if launcher.implementation(library) != "MPICH":
        return
    ranks = int(environ.get("MPI_LOCALNRANKS", "1"))
    needed = _SHM_BYTES + ranks * _SHM_RANK_BYTES
    with contextlib.suppress(OSError):
        status = os.statvfs("/dev/shm")
        if (free := status.f_bavail * status.f_frsize) >= needed:
            return
        if environ.get("MPI_LOCALRANKID", "0") != "0":
            time.sleep(PRINT_FIRST_S)
        else:
            log.rank_warning(
                f"warning: /dev/shm of {socket.gethostname()} has {free >> 20} MiB left. MPICH may need "
                f"{needed >> 20} MiB for {count(ranks, 'rank')}; without it a signal may end the job in MPI_Init "
                "(SIGBUS or SIGSEGV). Delete old files (python -m allred.watch.shm_files), or enlarge it (docker run "
                "--shm-size=1g, or mount -o remount,size=1g /dev/shm)"
            )


def _is_open(descriptor: str) -> bool:
    """Return whether a descriptor is open; True also if the text is not a number."""
    try:
        os.fstat(int(descriptor))
    except OSError:
        return False
    except ValueError:
        return True
    return True


def check_world(size: int, library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the launcher started several processes, but MPI sees a world of one rank."""
    if size == 1 and launcher.launched_size(environ) > 1:
        raise ConfigError(launcher.mismatch_error(environ, library))


def ignored_host_file(size: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the error if all ranks run on one host, and Open MPI 4 would have used several; else "".

    The MPI operators of Kubernetes name the host file in a variable of Open MPI 4, which Open MPI 5 ignores."""
    path = environ.get(_HOST_FILE_4, "")
    if size == 1 or not path or _HOST_FILE_5 in environ:
        return ""
    try:
        listed = [line for line in pathlib.Path(path).read_text().splitlines() if line.strip()]
    except OSError:
        return ""
    if len(listed) < 2:
        return ""
    return (
        f"{size} ranks run on one host ({socket.gethostname()}), but {_HOST_FILE_4}={path} lists {len(listed)} hosts; "
        f"Open MPI 5 ignores this variable: start with `allred run --hostfile {path}`, or set {_HOST_FILE_5}={path}"
    )


def communicator_of(everyone: Any, ranks: Sequence[int]) -> Any:
    """Create a communicator of some ranks of MPI.COMM_WORLD. Collective among them. Raises InputError on
    ranks that are not in the list."""
    number, size = everyone.Get_rank(), everyone.Get_size()
    if number not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(size)):
        raise InputError(
            f"init(comm={list(ranks)}) was called on rank {number} of {size}; expected a list of different ranks from "
            f"0 to {size - 1} that contains this one"
        )
    return everyone.Create_group(everyone.Get_group().Incl(ranks))


def world_rank(default: int) -> int:
    """Return this rank's number in MPI.COMM_WORLD, or `default` without MPI."""
    MPI = sys.modules.get("mpi4py.MPI")  # noqa: N806  (mpi4py's spelling)
    return default if MPI is None or not MPI.Is_initialized() else int(MPI.COMM_WORLD.Get_rank())


def check_torchrun(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if torchrun started several processes: each would be a world of one rank for MPI."""
    size = environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in environ and size.isdigit() and int(size) > 1 and launcher.launched_size(environ) == 1:
        raise ConfigError(
            f"torchrun started {size} processes, and allred.init() would make each a world of one rank; call "
            'torch.distributed.init_process_group("allred") instead, which joins them and calls allred.init(), or '
            f"start with mpirun -np {size}"
        )


def library_name(text: str) -> str:
    """Return the short name and version of an MPI library. text: the text of MPI_Get_library_version.

    >>> library_name("Open MPI v5.0.11, package: ...")
    'Open MPI 5.0.11'
    """
    first = text.split("\n")[0].strip("\0 ")
    if first.startswith("MPICH Version:"):
        return f"MPICH {first.split(':')[1].strip()}"
    return first.split(",")[0].replace("Open MPI v", "Open MPI ")

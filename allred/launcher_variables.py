"""The environment variables of launchers."""

from collections.abc import Mapping

_PREFIXES = ("PMI", "PRTE_", "HYDI_", "HYDRA_", "MPI_", "OMPI_")  # MPIR_CVAR_... are settings of MPICH


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that is not a rank of this process's job.

    >>> without_launcher({"PMI_RANK": "1", "HOME": "/root"})
    {'HOME': '/root'}
    """
    return {name: value for name, value in environ.items() if not name.startswith(_PREFIXES)}

"""Registers the backend "allred" with torch.distributed: the entry point of torch.backends.

Every `import torch` calls `register`. `register` imports no module of allred and never raises, because an error would
make `import torch` fail. allred and MPI are loaded when a process group is created. This module is outside of the
package, because the import of a module inside of it would import the whole package.
"""

import importlib
import sys
from typing import Any

NAME = "allred"


def register() -> None:
    """Register the backend with torch.distributed. Idempotent; never raises."""
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available() or NAME in dist.Backend.backend_list:
            return
        devices = ["cpu", "cuda"] if torch.cuda.device_count() else ["cpu"]  # torch sends objects to one that is listed
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
        _wrap_env_handler(importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers)
    except Exception as error:  # then init_process_group raises, and only for this backend
        print(f"allred: cannot register its backend with torch.distributed: {error!r}", file=sys.stderr)


def _create(options: Any, backend_options: Any) -> Any:
    if getattr(options, "enable_reconfigure", False):
        from allred.torch.reconfigurable_group import ReconfigurableGroup

        return ReconfigurableGroup(options)
    from allred.torch import process_group

    return process_group.create(options)


def _wrap_env_handler(handlers: dict[str, Any]) -> None:
    """Make `env://`, the default init method, work for this backend under mpirun, which does not set torch's
    variables."""
    env = handlers["env"]

    def handler(url: str, **arguments: Any) -> Any:
        if NAME in _requested_backend():
            from allred.torch import rendezvous

            if (found := rendezvous.env_rendezvous(url, **arguments)) is not None:
                return iter([found])
            return rendezvous.report_wait(env(url, **arguments))
        return env(url, **arguments)

    handlers["env"] = handler


def _requested_backend() -> str:
    """Return the argument `backend` of the call of init_process_group that is running; "" if there is none."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_locals.get("backend", ""))

"""The launcher's command of the manifests, with ssh and sshd between network namespaces in the place of pods.

The environment and the host file are those of the operator (pkg/controller/mpi_job_controller.go). About 15 s.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from harness import BIN, run
from hosts import hosts

yaml = pytest.importorskip("yaml")
EXAMPLES = Path(__file__).parents[2] / "examples/kubernetes"
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
PORT = 2222
# MPICH's ucx would find that the pods share a kernel, and send nothing over the network.
TCP = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
OF_OPERATOR = {
    "mpich": {"HYDRA_HOST_FILE": "/etc/mpi/hostfile", "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10"},
    "openmpi": {
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": "2",
    },
}
PROGRAM = """
import socket
import allred
allred.init(banner=False)
found = allred.allgather_object(socket.gethostname())
if allred.is_chief():
    print("world", *found, flush=True)
"""


def command_of(kind):
    """Return the words of the launcher in a manifest."""
    if kind == "MPIJob":
        job = yaml.safe_load((EXAMPLES / "mpijob.yaml").read_text())
        return job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"]
    _, job = yaml.safe_load_all((EXAMPLES / "trainjob.yaml").read_text())
    return job["spec"]["trainer"]["command"] + job["spec"]["trainer"]["args"]


@contextlib.contextmanager
def pods(directory):
    """A launcher and two workers with sshd. Yields the hosts, and the ssh command with their keys."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("no ssh or sshd here: make test-kubernetes as root installs them")
    for name in ("host_key", "id"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name]
        subprocess.run(key, check=True)
    server = f"Port {PORT}\nHostKey {directory}/host_key\nPidFile none\nStrictModes no\nUsePAM no\n"
    (directory / "sshd_config").write_text(server + f"AuthorizedKeysFile {directory}/id.pub\nPermitRootLogin yes\n")
    client = f"Host *\n  Port {PORT}\n  IdentityFile {directory}/id\n  StrictHostKeyChecking no\n  LogLevel ERROR\n"
    (directory / "ssh_config").write_text(client + "  UserKnownHostsFile /dev/null\n  ConnectionAttempts 30\n")
    ssh = directory / "ssh-of-image"  # ssh reads the configuration of the user's home, whatever HOME is
    ssh.write_text(f'#!/bin/sh\nexec ssh -F {directory}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        here = stack.enter_context(hosts(3, directory))
        for number in (1, 2):
            stack.callback(end, start_sshd(here, number, directory), here, number)
            wait_for_sshd(here, number)
        yield here, ssh


def start_sshd(here, number, directory):
    libc, pr_set_pdeathsig = ctypes.CDLL(None), 1
    command = [*here.inside(number), SSHD, "-De", "-f", directory / "sshd_config"]
    with (directory / f"sshd-{number}.log").open("wb") as log:
        return subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            preexec_fn=lambda: libc.prctl(pr_set_pdeathsig, signal.SIGKILL),
        )  # fmt: skip


def wait_for_sshd(here, number):
    code = f"import socket; socket.create_connection(('127.0.0.1', {PORT}), 1)"
    for _ in range(100):
        probe = subprocess.run([*here.inside(number), BIN["mpich"] / "python", "-c", code], capture_output=True)
        if probe.returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(probe.stderr)


def end(sshd, here, number):
    sshd.kill()
    sshd.wait()
    for pid in here.processes(number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def environment(mpi, ssh, hostfile):
    variables = {name: value.replace("/etc/mpi/hostfile", str(hostfile)) for name, value in OF_OPERATOR[mpi].items()}
    agents = {"HYDRA_LAUNCHER_EXEC": str(ssh), "PRTE_MCA_plm_ssh_agent": str(ssh)}  # the test's keys, not the user's
    path = f"{BIN[mpi]}:{os.environ['PATH']}"
    return {**variables, **agents, **TCP, "PATH": path, "PRTE_MCA_rmaps_default_mapping_policy": None}


@pytest.mark.parametrize(("mpi", "kind"), [("mpich", "MPIJob"), ("openmpi", "TrainJob")])
def test_the_command_of_the_manifest_uses_the_workers_of_the_host_file(mpi, kind, tmp_path):
    with pods(tmp_path) as (here, ssh):
        workers, hostfile = here.names[1:], tmp_path / "hostfile"
        form = "{}:2\n" if mpi == "mpich" else "{} slots=2\n"
        hostfile.write_text("".join(map(form.format, workers)))
        (tmp_path / "train.py").write_text(PROGRAM)
        words = [str(hostfile) if word == "/etc/mpi/hostfile" else word for word in command_of(kind)]
        assert words[0] == "allred"
        words = [BIN[mpi] / "python", "-m", *words]
        result = run([*here.inside(0), *words], env=environment(mpi, ssh, hostfile), cwd=tmp_path)
    assert result.code == 0, result.text
    assert f"world {workers[0]} {workers[0]} {workers[1]} {workers[1]}" in result.out, result.text


def test_a_plain_mpirun_of_open_mpi_5_is_an_error(tmp_path):
    """It ignores the operator's variables, and starts all ranks in the launcher's pod."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("train-worker-0.train.default.svc slots=2\ntrain-worker-1.train.default.svc slots=2\n")
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {**environment("openmpi", "ssh", hostfile), "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    mpirun = [BIN["openmpi"] / "mpirun", "-np", 4, BIN["openmpi"] / "python", "train.py"]
    result = run(mpirun, env=env, cwd=tmp_path)
    assert result.code != 0, result.text
    assert (
        f"ConfigError: 4 ranks run on one host ({socket.gethostname()}), but OMPI_MCA_orte_default_hostfile={hostfile}"
        in result.text
    ), result.text
    assert "allred run" in result.text

"""The commands of docs/running.md, with a program of a page."""

import os
import re

import pytest
from harness import BIN, MPICH_BY_DEFAULT, ROOT, run
from hosts import hosts
from page_blocks import programs

PAGE = (ROOT / "docs/running.md").read_text()
COMMANDS = re.findall(r"^```sh\n(.*?)\n```$", PAGE, flags=re.MULTILINE | re.DOTALL)
TCP = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}


def command(words):
    return next(each for each in COMMANDS if words in each)


def environment(mpi, directory, **more):
    return {"PATH": f"{BIN[mpi]}:{os.environ['PATH']}", "XDG_RUNTIME_DIR": str(directory), **more}


def write_program(directory):
    """Write the program of docs/sessions.md, which takes a directory of checkpoints."""
    (directory / "train.py").write_text(programs("sessions.md")[0])


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_on_one_machine(mpi, tmp_path):
    write_program(tmp_path)
    result = run(["sh", "-ec", f"{command('run -np 4 train.py')} ckpt"], env=environment(mpi, tmp_path), cwd=tmp_path)
    assert (result.code, result.out) == (0, "step 150 [1. 2. 3. 4.]\n"), result.text


@pytest.mark.parametrize("mpi", MPICH_BY_DEFAULT)
def test_with_restarts_on_two_hosts(mpi, tmp_path):
    with hosts(2, tmp_path) as here:
        write_program(tmp_path)
        text = command("--restarts 3").replace("node1", here.names[0]).replace("node2", here.names[1])
        agent = str(tmp_path / "agent")
        agents = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": agent, "PRTE_MCA_plm_ssh_agent": agent}
        env = environment(mpi, tmp_path, **agents, **TCP)
        result = run([*here.inside(0), "sh", "-ec", f"{text} ckpt"], env=env, cwd=tmp_path)
    assert (result.code, result.out) == (0, "step 150 [1. 2. 3. 4.]\n"), result.text
    assert f"4 ranks on {here.names[0]}, {here.names[1]}" in result.err, result.text


def test_all_commands_of_the_page_are_known():
    """Those that no test above runs are run by test_run.py and test_monitor.py, with these words. The archives of an
    environment were made by hand."""
    assert [" ".join(text.split()[:2]) for text in COMMANDS if "ALLRED_METRICS" not in text] == [
        "allred run", "allred run", "allred resize", "allred top", "mksquashfs /scratch/env", "sbcast /scratch/env.tar"
    ]  # fmt: skip

"""The commands of docs/hosts.md, on two hosts. A script that is named ssh takes the place of ssh."""

import os
import re

import pytest
from harness import BIN, MPIS, ROOT, run
from hosts import hosts

PAGE = ROOT / "docs/hosts.md"
# MPICH's ucx would find that the hosts share a kernel, and send nothing over the network.
TCP = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
NO_POLICY = {"PRTE_MCA_rmaps_default_mapping_policy": None}  # that of harness.py places all ranks on the first host
PROGRAM = """
import allred, numpy as np
allred.init()
assert allred.allreduce(np.ones(3), allred.Sum)[0] == 2
"""


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("mpi", MPIS)
def test_the_commands_of_the_page(mpi, tmp_path):
    with hosts(2, tmp_path) as here:

        def named(text):
            text = text.replace("/path/to/agent", str(tmp_path / "agent"))
            return text.replace("node1", here.names[0]).replace("node2", here.names[1])

        (tmp_path / "ssh").symlink_to("agent")
        (tmp_path / "train.py").write_text(PROGRAM)
        for block in map(named, blocks("text")):
            if name := re.match(r"# (hosts\.\w+)\n", block):
                (tmp_path / name[1]).write_text(block)
        path = f"{tmp_path}:{BIN[mpi]}:{os.environ['PATH']}"
        own = ["ip", "netns", "exec", here.names[0], "unshare", "--uts", "sh", "-ec"]
        for block in map(named, blocks("sh")):
            if f"hosts.{mpi}" not in block:
                continue
            lines = re.sub(r"\\\n", "", block).splitlines()
            mine = [line for line in lines if f"hosts.{mpi}" in line or not line.startswith("mpirun")]
            script = "\n".join((f"hostname {here.names[0]}", *mine))
            result = run([*own, script], env={"PATH": path, "OMP_NUM_THREADS": "1", **TCP, **NO_POLICY}, cwd=tmp_path)
            assert result.code == 0, result.text
            assert "; TCP between nodes: " in result.text, result.text
            if "doctor" in block:
                pair = rf"network between hosts {here.names[0]} - {here.names[1]} [\d.,]+ us, [\d.,]+ GB/s"
                assert re.search(pair, result.out), result.text

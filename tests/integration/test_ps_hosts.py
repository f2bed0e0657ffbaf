"""Mode ps between hosts, over TCP."""

import json
import pathlib

from hosts import hosts

PROGRAM = pathlib.Path(__file__).with_name("ps_program.py")


def test_two_workers_of_one_host_push_large_gradients_to_a_server_on_another(tmp_path):
    """Regression: MPICH hung, because all cells of one worker were unexpected while the server served the other."""
    with hosts(2, tmp_path) as here:
        arguments = {"elements": 12_000_000, "steps": 2}  # 92 cells; libfabric takes 64 unexpected ones
        cases = json.dumps([["large", arguments, {}]])
        result = here.run("mpich", [1, 2], PROGRAM, 1, cases, timeout_s=60)
    assert result.code == 0, result.text
    assert json.loads(result.out.splitlines()[-1])["w"] == [-4.0]

"""The addresses of interfaces, in a network namespace of this test."""

import subprocess
import sys

import pytest

PROGRAM = "from allred.cluster.topology import ipv4_addresses; print(*ipv4_addresses().items())"


def test_only_interfaces_that_are_up_have_an_address():
    namespace = ["unshare", "--map-root-user", "--net", "sh", "-ec"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user cannot create a network namespace")
    links = [
        "ip link set lo up",
        *(f"ip link add {name}0 type veth peer name {name}1" for name in ("up", "down", "half")),
        *(f"ip address add 10.9.{n}.1/24 dev {name}0" for n, name in enumerate(("up", "down", "half"))),
        "ip link set up0 up; ip link set up1 up; ip link set half0 up",  # half0: up, but without a link
        f'exec {sys.executable} -c "{PROGRAM}"',
    ]
    found = subprocess.run([*namespace, "\n".join(links)], check=True, capture_output=True, text=True)
    assert found.stdout == "('lo', '127.0.0.1') ('up0', '10.9.0.1')\n"

"""PMI-1, the protocol by which MPICH's processes start and find each other, as the server of one world speaks it: a
state machine without sockets. What processes have put is there for all after the barrier that follows.

    client                                  server
    cmd=init pmi_version= pmi_subversion=   cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2
    cmd=get_maxes                           cmd=maxes rc=0 kvsname_max= keylen_max= vallen_max=
    cmd=get_appnum                          cmd=appnum rc=0 appnum=0
    cmd=get_my_kvsname                      cmd=my_kvsname rc=0 kvsname=
    cmd=get_universe_size                   cmd=universe_size rc=0 size=
    cmd=put kvsname= key= value=            cmd=put_result rc=0 msg=success
    cmd=get kvsname= key=                   cmd=get_result rc=0 value=     (rc=1 where there is none)
    cmd=barrier_in                          cmd=barrier_out rc=0           to all, once all are in
    cmd=finalize                            cmd=finalize_ack rc=0
"""

import secrets
from collections.abc import Hashable, Sequence

_MAXES = "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024"


def mapping(nodes: Sequence[Hashable]) -> str:
    """MPICH's PMI_process_mapping, where nodes[r] names the node of rank r: (first node, nodes, ranks of each) blocks.

    >>> mapping(["a", "a", "b", "a"])
    '(vector,(0,1,2),(1,1,1),(0,1,1))'
    """
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    blocks: list[list[int]] = []
    for node in nodes:
        if blocks and blocks[-1][0] == numbers[node]:
            blocks[-1][1] += 1
        else:
            blocks.append([numbers[node], 1])
    return f"(vector,{','.join(f'({node},1,{count})' for node, count in blocks)})"


class Pmi:
    """Of a world of so many ranks as there are nodes given.

    Its name is one of its own: MPICH names its shared memory by it, and would take that of a job that was killed.
    """

    def __init__(self, nodes: Sequence[Hashable]) -> None:
        self._name = f"allred_{secrets.token_hex(8)}"
        self._size = len(nodes)
        self._values = {"PMI_process_mapping": mapping(nodes)}
        self._in_barrier: set[int] = set()

    def hear(self, rank: int, line: str) -> list[tuple[int, str]]:
        """What to say to whom on a line of that rank. Raises ValueError if it is none of PMI-1."""
        words = dict(word.partition("=")[::2] for word in line.split())
        command = words.get("cmd", "")
        if command == "put":
            self._values[words.get("key", "")] = words.get("value", "")
            return [(rank, "cmd=put_result rc=0 msg=success")]
        if command == "get":
            value = self._values.get(words.get("key", ""))
            found = f"rc=0 value={value}" if value is not None else "rc=1 msg=key_not_found"
            return [(rank, f"cmd=get_result {found}")]
        if command == "barrier_in":
            self._in_barrier.add(rank)
            if len(self._in_barrier) < self._size:
                return []
            self._in_barrier.clear()
            return [(each, "cmd=barrier_out rc=0") for each in range(self._size)]
        if command == "abort":  # allred's own exit protocol ends the others
            return []
        answer = {
            "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=2",
            "get_maxes": _MAXES,
            "get_appnum": "cmd=appnum rc=0 appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname rc=0 kvsname={self._name}",
            "get_universe_size": f"cmd=universe_size rc=0 size={self._size}",
            "finalize": "cmd=finalize_ack rc=0",
        }.get(command)
        if answer is None:
            raise ValueError(f"not of PMI-1, or not needed by MPICH: {line!r}")
        return [(rank, answer)]

"""Worlds that are formed without MPI, by real processes that meet at a rendezvous."""

import pathlib
import socket
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).with_name("bootstrap_program.py")


def run(dies=-1):
    """The exit code, output and error of each of three tasks."""
    places = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [str(place.getsockname()[1]) for place in places]
    for place in places:
        place.close()
    command = [sys.executable, str(PROGRAM)]
    tasks = [
        subprocess.Popen([*command, str(task), str(dies), *ports], stdout=-1, stderr=-1, text=True) for task in range(3)
    ]
    try:
        return [(*task.communicate(timeout=100), task.returncode) for task in tasks]
    finally:
        for task in tasks:
            task.kill()


def test_three_worlds_in_turn_on_shared_memory_and_tcp():
    for out, err, code in run():
        assert (out, code) == ("shm -10.0\ntcp -10.0\ntcp -10.0\n", 0), err


def test_a_task_that_ends_is_named_to_the_others():
    for _, err, code in run(dies=1)[::2]:
        assert "AllredError: task 1 (pid " in err
        assert code == 1

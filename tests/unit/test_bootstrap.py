"""Worlds that are created without MPI, by real processes that meet at a rendezvous."""

import pathlib
import socket
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).with_name("bootstrap_program.py")


def run(dying_task=-1):
    """The output, error and exit code of each of three tasks."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [str(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    command = [sys.executable, str(PROGRAM)]
    tasks = [
        subprocess.Popen([*command, str(task), str(dying_task), *ports], stdout=-1, stderr=-1, text=True)
        for task in range(3)
    ]
    try:
        return [(*task.communicate(timeout=100), task.returncode) for task in tasks]
    finally:
        for task in tasks:
            task.kill()


def test_worlds_one_after_another_on_shared_memory_and_tcp():
    worlds = "shm -10.0\ntcp -10.0\ntcp -10.0\n"
    lost = "the connection with rank 1 on host HOST was lost: its process may have been killed 1\n"
    for task, (out, err, code) in enumerate(run()):
        assert (out, code) == (worlds if task == 1 else worlds + lost, 0), err


def test_a_task_that_ends_is_named_to_the_others():
    for _, err, code in run(dying_task=1)[::2]:
        assert "AllredError: task 1 (pid " in err
        assert code == 1

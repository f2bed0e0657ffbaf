"""The command line: unknown commands, and a closed standard output."""

import contextlib
import os
import subprocess
import sys

import pytest

import allred
from allred.__main__ import main
from allred.timeline.recorder import Recorder

COMMANDS = {
    "usage": ["--help"],
    "wrong": ["no-such-command"],
    "help": ["timeline", "--help"],
    "unbuffered": ["info", "--config"],
    "timeline": ["timeline", "merge", "."],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_closed_output_pipe_causes_no_traceback(command, tmp_path):
    """As with `| head`. `wrong` writes to stderr, the others to stdout."""
    with contextlib.closing(Recorder(str(tmp_path / "rank-0.timeline"))) as recorder:
        about = {"job": "a", "rank": 0, "size": 1, "name": "rank 0", "host": "h", "pid": 1, "time": 1.0, "start": 0}
        recorder.begin(about)
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": writing, "stderr": subprocess.PIPE}
    if command == "wrong":
        streams = {"stdout": subprocess.PIPE, "stderr": writing}
    environment = {**os.environ, "PYTHONUNBUFFERED": "1" * (command == "unbuffered")}
    arguments = [sys.executable, "-m", "allred", *COMMANDS[command]]
    result = subprocess.run(arguments, cwd=tmp_path, env=environment, timeout=60, check=False, **streams)
    os.close(writing)
    assert not result.stdout
    assert not result.stderr
    assert result.returncode == 141


def test_output_on_a_full_disk_causes_one_line():
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "allred", "--help"]
        result = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (1, "cannot write the output: No space left on device\n")


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "no command given"), (["benhc"], "python -m allred: unknown command 'benhc'")]
)
def test_missing_or_unknown_command_is_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, message in err) == ("", True)


@pytest.mark.parametrize(
    ("typed", "shown"), [("/env/bin/allred", "allred"), ("/env/allred/__main__.py", "python -m allred")]
)
def test_usage_and_errors_have_the_name_that_was_typed(typed, shown, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [typed])
    assert main(["--version"]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"allred {allred.__version__}\nusage: {shown} COMMAND ...\n")
    assert main(["run"]) == main(["top", "no-such-job"]) + 1 == 2
    err = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in err] == [f"{shown} run", f"{shown} top"], err

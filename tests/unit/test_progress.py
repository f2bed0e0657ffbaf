"""The progress line on a terminal (a pseudo terminal, and a little of its emulation), and plain lines elsewhere."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest

from allred.session.progress import PlainDisplay, Rates, TerminalDisplay, display, plain_line

LINE = re.compile(r"^step 20, loss = 37\.97, accuracy = 0\.91 \(18761\.7 examples/sec; 0\.005 sec/batch\)$")


def rates(seconds=0.0533, examples=1000):
    now = iter([0.0, seconds])
    made = Rates(clock=lambda: next(now))
    for step in (10, 20):
        made.record(step, examples)
    return made


def test_plain_lines_in_a_file(tmp_path):
    with open(tmp_path / "log", "w") as log:
        shown = display(log)
        assert isinstance(shown, PlainDisplay)
        shown.show(20, 1000, {"accuracy": 0.91, "loss": 37.967}, rates())
        shown.say("checkpoint: step 20")
        shown.close()
        shown.close()
    first, second = (tmp_path / "log").read_text().splitlines()
    assert LINE.match(first), first
    assert second == "checkpoint: step 20"


def test_what_is_not_known_is_left_out():
    assert plain_line(0, {}, Rates()) == "step 0"
    assert plain_line(1, {"loss": float("inf")}, Rates()) == "step 1, loss = inf"
    assert plain_line(1, {"loss": 0.00012}, rates(examples=0)) == "step 1, loss = 0.00012 (0.005 sec/batch)"
    assert plain_line(1, {}, rates(seconds=0.002)) == "step 1 (500000.0 examples/sec; 0.000200 sec/batch)"


def test_a_name_is_any_text_and_stays_on_its_line():
    line = plain_line(1, {"loss\n\x1b[2J": 1, "[/b]層": 2}, Rates())
    assert line == r"step 1, loss\n\x1b[2J = 1.00, [/b]層 = 2.00"


def test_a_stream_that_cannot_write_all_letters():
    raw = io.BytesIO()
    shown = display(io.TextIOWrapper(raw, encoding="ascii"))
    shown.show(1, None, {"Größe": 1.0}, Rates())
    shown.say("層\n\udc80")
    assert raw.getvalue() == b"step 1, Gr\\xf6\\xdfe = 1.00\n\\u5c64\n\\udc80\n"


def test_a_closed_or_broken_stream_ends_no_training():
    closed = io.StringIO()
    shown = display(closed)
    closed.close()
    shown.show(1, None, {}, Rates())
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        shown = display(pipe)
        for _ in range(3):
            shown.show(1, None, {}, Rates())
        shown.say("x")
        shown.close()
        with pytest.raises(BrokenPipeError):
            pipe.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for its close


@pytest.fixture
def terminal(monkeypatch):
    """Both ends of a pseudo terminal: where a person looks, and the stream of a program."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen, stream = pty.openpty()
    with open(stream, "w") as program:
        yield screen, program
    os.close(screen)


@pytest.mark.parametrize("setting", ["NO_COLOR=1", "TERM=dumb", "TERM="])
def test_plain_terminals(terminal, monkeypatch, setting):
    monkeypatch.setenv(*setting.split("="))
    assert isinstance(display(terminal[1]), PlainDisplay)


def test_plain_without_rich(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(display(terminal[1]), PlainDisplay)


def test_a_terminal_that_is_closed(terminal):
    pytest.importorskip("rich")
    screen, stream = terminal
    shown = display(stream)
    assert isinstance(shown, TerminalDisplay)
    shown.show(1, 3, {"loss": 1.0}, rates())
    stream.close()
    before = sys.stdout, sys.stderr
    for step in (2, 3):
        shown._drawn = 0.0
        shown.show(step, 3, {"loss": 1.0}, rates())
    shown.say("x")
    shown.close()
    assert (sys.stdout, sys.stderr) == before
    assert os.read(screen, 10000)


def on_screen(output, columns):
    """The rows that a terminal shows after this output, as far as rich and programs here control one."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|.", output, re.DOTALL):
        if token == "\n":
            row += 1
        elif token == "\r":
            column = 0
        elif token == "\x1b[2K":
            rows[row] = ""
        elif token == "\x1b[1A":
            row -= 1
        elif token[0] == "\x1b":
            assert token[-1] == "m" or token in ("\x1b[?25l", "\x1b[?25h"), repr(token)
        else:
            if column == columns:
                row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + 1 :]
            column += 1
        rows += [""] * (row + 1 - len(rows))
    return [line.rstrip() for line in rows]


BEGIN = """
import os, sys, time
from allred.session.progress import display
from allred.session.progress import Rates
now = iter(range(10**6))
rates = Rates(clock=lambda: next(now) / 100)
shown = display()
def show(step, last=100, **values):
    rates.record(step, 64, 0.003, 0.0025)
    shown._drawn = 0
    shown.show(step, last, values, rates)
"""


def run_in_terminal(program, columns=120, stdout=None, **environ):
    """All that a program writes to a terminal of so many columns; at the word RESIZE it gets 40."""
    screen, stream = pty.openpty()
    fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + program], stdin=stream, stdout=stdout or stream, stderr=stream,
        env={**clean, "TERM": "xterm", "PYTHONIOENCODING": "utf-8", **environ},
    )  # fmt: skip
    os.close(stream)
    output = b""
    while select.select([screen], [], [], 30)[0]:
        try:
            got = os.read(screen, 10000)
        except OSError:  # the program has ended
            break
        if b"RESIZE" in got:
            fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 40, 0, 0))
        output += got
    os.close(screen)
    assert process.wait(timeout=30) == 0, output
    return output.decode()


def test_one_line_on_a_terminal_and_other_output_above_it():
    pytest.importorskip("rich")
    output = run_in_terminal(
        columns=150,
        program="""
show(19)
print("from stdout: [/b] " + "x" * 200)
show(20, loss=37.967, accuracy=0.91)
print("allred: rank 1 has waited", file=sys.stderr)
print("no end", end="")
show(21, loss=37.967, accuracy=0.91)
shown.say("checkpoint: [bold]step 21\\n:smile:")
show(22, loss=5)
shown.close()
shown.say("unheard")
print("after it")
""",
    )
    lines = on_screen(output, 150)
    assert lines[0] == "from stdout: [/b] " + "x" * 132
    assert lines[1:5] == ["x" * 68, "allred: rank 1 has waited", "checkpoint: [bold]step 21", ":smile:"]
    assert lines[5] == "no end"
    assert re.fullmatch(
        r"step 22/100  loss = 5\.00  6400\.0 examples/s  0\.010 s/batch  ETA 0:00:01  "
        r"45 % computing, 30 % waiting, 25 % communicating [━╸╺ ]{20}",
        lines[6],
    ), lines
    assert lines[7:] == ["after it", ""]
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_what_others_write_to_the_terminal_stays_readable():
    pytest.importorskip("rich")
    lines = on_screen(run_in_terminal("""
show(1, loss=1)
os.write(2, b"allred: rank 1 has died (SIGKILL)\\n")
show(2, loss=1)
shown.close()
"""), 120)  # fmt: skip
    assert lines[0].endswith("allred: rank 1 has died (SIGKILL)")
    assert lines[1].startswith("step 2/100 ")
    assert lines[2:] == [""]


def test_stdout_in_a_file_stays_there(tmp_path):
    pytest.importorskip("rich")
    with open(tmp_path / "out", "w") as out:
        lines = on_screen(run_in_terminal("show(1)\nprint('result')\nshow(2)\nshown.close()", stdout=out), 120)
    assert (tmp_path / "out").read_text() == "result\n"
    assert len(lines) == 2
    assert lines[0].startswith("step 2/100")


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_a_narrow_terminal_gets_one_row(columns):
    pytest.importorskip("rich")
    output = run_in_terminal("for step in range(1, 5): show(step, loss=1, accuracy=2)\nshown.close()", columns)
    lines = on_screen(output, columns)
    assert len(lines) == 2
    assert lines[0].startswith("step 4/100")


def test_a_terminal_that_becomes_narrower():
    pytest.importorskip("rich")
    output = run_in_terminal("""
show(1, loss=1)
shown.say("RESIZE")
time.sleep(0.3)
show(2, loss=1)
show(3, loss=1)
shown.close()
""")
    last = output.rpartition("\x1b[2K")[2]
    assert len(on_screen(last, 40)) == 2


def test_without_a_last_step_and_in_ascii():
    pytest.importorskip("rich")
    lines = on_screen(run_in_terminal("show(3, None, **{'Größe': 1})\nshown.close()", PYTHONIOENCODING="ascii"), 120)
    assert re.match(r"step 3  Gr\\xf6\\xdfe = 1\.00 [- ]*$", lines[0]), lines

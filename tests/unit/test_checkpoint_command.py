"""`python -m allred checkpoint`: what it prints, and its exit codes."""

import os
import pathlib
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from checkpoints import M, W, piece, save, save_one

from allred import checkpoint
from allred.__main__ import main
from allred.checkpoint import pickled_state, whole

WHEN = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.fixture
def command(capsys):
    """Runs a command; its exit code, the lines that it prints, and its error."""

    def run(*arguments):
        try:
            code = main(["checkpoint", *map(str, arguments)])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err

    return run


def flip_a_bit(path):
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_ls(tmp_path, command):
    save(tmp_path, 400, [piece("w", W, 0, 5)], [piece("w", W, 5, 10)])
    save_one(tmp_path, 123456789)
    begun = checkpoint.begin(tmp_path, 500)
    (tmp_path / "other").mkdir()
    code, lines, _ = command("ls", tmp_path)
    assert code == 0
    assert lines[0].split() == ["step", "saved", "size", "shards", "state"]
    assert re.fullmatch(rf" +400  {WHEN} +[\d.]+ B +2  complete", lines[1])
    assert re.fullmatch(rf" +123456789  {WHEN} +[\d.]+ B +1  complete", lines[2])
    assert lines[3:] == [f"{begun.name}: unfinished: being written, or left by a dead writer"]
    checkpoint.abandon(begun)


def test_ls_prints_damage(tmp_path, command):
    manifest, shard = save_one(tmp_path, 1) / "manifest.json", next(save_one(tmp_path, 2).glob("shard-*"))
    manifest.write_text("{")
    shard.write_bytes(b"")
    code, lines, _ = command("ls", tmp_path)
    assert code == 0
    assert re.fullmatch(rf"step-00000001 +- +- +-  damaged: checkpoint: {manifest} is damaged: .*", lines[1])
    assert re.fullmatch(rf" +2  {WHEN} .* damaged: checkpoint: {shard} has 0 bytes, but \d+ were written", lines[2])


def test_show(tmp_path, command):
    save_one(tmp_path, 3)
    scale = np.ones((), ml_dtypes.bfloat16)
    path = save(
        tmp_path, 7, [piece("fc1.w", W, 0, 5), piece("fc1.w", W, 0, 5, "m")],
        [piece("fc1.w", W, 5, 10), piece("fc1.w", W, 5, 10, "m"), whole("fc1.w", M, "v"), whole("s\n", scale)],
        meta={"optimizer": {"global_step": 7}},
    )  # fmt: skip
    for given in (tmp_path, path):
        code, lines, _ = command("show", given)
        assert code == 0
        assert re.fullmatch(rf"{path}: step 7, saved {WHEN}, \d+ B in 2 shards", lines[0]), lines
        assert lines[1:] == [
            'meta: {"optimizer": {"global_step": 7}}',
            "2 parameters, 11 numbers:",
            "  fc1.w  float32 (10,); slots: m float32 (10,), v float32 (2, 3)",
            "  's\\n'  bfloat16 ()",
        ]


def test_show_takes_the_newest_that_is_complete_and_the_one_given(tmp_path, command):
    older, newer = save_one(tmp_path, 3), save_one(tmp_path, 4)
    next(newer.glob("shard-*")).unlink()
    assert command("show", tmp_path)[1][0].startswith(f"{older}: step 3, ")
    code, lines, _ = command("show", newer)
    assert code == 0
    assert re.fullmatch(r"damaged: .*shard-00000-of-00001.safetensors failed: No such file or directory.*", lines[1])
    next(older.glob("shard-*")).unlink()
    code, lines, error = command("show", tmp_path)
    assert (code, lines) == (2, [])
    told = f"no checkpoint in {tmp_path} is complete; `verify` prints the damage"
    assert error == f"python -m allred checkpoint: {told}\n"


def test_show_an_optimizer_of_the_users_own(tmp_path, command):
    state = pickled_state({"m": 1})
    save(tmp_path, 1, [whole("", W), state])  # a nest that is one array has no name
    assert command("show", tmp_path)[1][2:] == [
        "1 parameter, 10 numbers:",
        "  ''  float32 (10,)",
        f"state of the user's own optimizer, pickled: {state[1].size} B",
    ]


def test_verify(tmp_path, command):
    good, bad = save_one(tmp_path, 1), save(tmp_path, 2, [piece("w", W, 0, 5)], [piece("w", W, 5, 10)])
    size = sum(shard.nbytes for shard in checkpoint.read_manifest(good).shards)
    assert command("verify", good)[:2] == (0, [f"step-00000001: complete and undamaged, {size} B in 1 shard"])
    assert command("verify", tmp_path)[0] == 0
    for shard in bad.glob("shard-*"):
        flip_a_bit(shard)
    assert command("ls", tmp_path)[1][2].endswith("complete")  # the lengths are right
    code, lines, _ = command("verify", tmp_path)
    assert code == 1
    assert lines[0].startswith("step-00000001: complete and undamaged")
    for line, shard in zip(lines[1:], sorted(bad.glob("shard-*")), strict=True):
        assert re.match(rf"step-00000002: checkpoint: {shard} is damaged: its checksum", line)
    assert command("verify", bad)[0] == 1
    (bad / "manifest.json").unlink()
    for given in (bad, tmp_path):
        code, lines, _ = command("verify", given)
        assert code == 1
        assert re.match(rf"step-00000002: .*{bad / 'manifest.json'} failed: No such file", lines[-1])


@pytest.mark.parametrize("what", ["ls", "show", "verify"])
def test_a_directory_that_is_none(tmp_path, command, what):
    empty, file = tmp_path / "empty", tmp_path / "file"
    empty.mkdir()
    file.write_text("")
    who = "python -m allred checkpoint: "
    give = "give the directory that checkpoints were saved to, or one of them"
    dirs = "they are directories named step-00000400 and so on"
    assert command(what, tmp_path / "no") == (2, [], f"{who}{tmp_path / 'no'} does not exist; {give}\n")
    assert command(what, file) == (2, [], f"{who}{file} is not a directory; {give}\n")
    assert command(what, empty) == (2, [], f"{who}{empty} holds no checkpoint; {dirs}\n")
    begun = checkpoint.begin(empty, 1)
    assert f"{empty} holds no checkpoint, only 1 unfinished: being written" in command(what, empty)[2]
    checkpoint.abandon(begun)


@pytest.mark.parametrize("arguments", [[], ["ls"], ["rm", "x"], ["ls", "x", "y"]])
def test_wrong_arguments_are_one_line(command, arguments):
    code, lines, error = command(*arguments)
    assert (code, lines, error.count("\n")) == (2, [], 1)
    assert error.startswith("python -m allred checkpoint")


def test_in_a_process_of_its_own_without_mpi_and_in_ascii(tmp_path):
    save(tmp_path, 1, [whole("Größe", W)])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    program = (
        "import sys; sys.modules['mpi4py'] = None; from allred.__main__ import main; "
        f"sys.exit(main(['checkpoint', 'show', {str(tmp_path)!r}]))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[-1] == "  Gr\\xf6\\xdfe  float32 (10,)"


def test_each_manifest_is_read_once(tmp_path, command, monkeypatch):
    """With thousands of shards it takes seconds."""
    for step in (1, 2, 3):
        save_one(tmp_path, step)
    read, opened = pathlib.Path.read_bytes, []
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: opened.append(path.parent.name) or read(path))
    command("ls", tmp_path)
    assert opened == ["step-00000001", "step-00000002", "step-00000003"]
    opened.clear()
    checkpoint.prune(tmp_path, keep=1)
    assert opened == ["step-00000001", "step-00000002", "step-00000003"]

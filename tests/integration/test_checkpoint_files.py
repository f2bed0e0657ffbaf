"""Checkpoint files and processes: killed while they save, saving one together, and the memory that it takes."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from allred import checkpoint
from allred.checkpoint import ShardInfo
from allred.errors import CheckpointError

KILLS = {"default": 25, "full": 200}  # test_checkpoint_kills.py tests every moment of one save

# For each line that it reads, forks a child that saves for ever: from the step that it finds on, two shards, each third
# step twice, and only two checkpoints are kept. Forked, for the imports take longer than all else here.
SAVES = """
import os, sys
import numpy as np
from allred import checkpoint
from allred.checkpoint import Entry

def say(what):  # at once: a line that is cut by a kill cannot be told from another
    os.write(1, f"{what}\\n".encode())

def save(root, step):
    values = np.arange(20_000, dtype=np.float32) + step
    entries = [Entry("w", "", "float32", values.shape, at, at + 10_000) for at in (0, 10_000)]
    directory = checkpoint.begin(root, step)
    shards = [checkpoint.write_shard(directory, i, 2, [(entry, values[entry.start : entry.stop])])
              for i, entry in enumerate(entries)]
    checkpoint.commit(directory, step, shards, {"sum": step})

def save_for_ever(root, parent):
    found = checkpoint.newest(root)
    step = checkpoint.read_checkpoint(found).step + 1 if found else 0
    say(os.getpid())
    while os.getppid() == parent:
        for _ in range(1 + (step % 3 == 0)):
            save(root, step)
        say(step)
        checkpoint.prune(root, keep=2)
        step += 1

parent = os.getpid()
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        save_for_ever(sys.argv[1], parent)
    os.waitpid(child, 0)
    say("dead")
"""


def killed(saver, rng):
    """The steps that one child of the saver told of before it was killed: somewhere in its first saves."""
    saver.stdin.write("\n")
    saver.stdin.flush()
    child = int(saver.stdout.readline())
    told = [saver.stdout.readline() for _ in range(rng.randrange(3))]
    time.sleep(rng.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    told += iter(saver.stdout.readline, "dead\n")
    return list(map(int, told))


@pytest.mark.limit(240)
def test_killed_at_any_moment_the_newest_checkpoint_is_complete_and_right(tmp_path, request):
    kills = KILLS["full" if request.config.getoption("--full") else "default"]
    rng, committed, leftovers = random.Random(4), -1, 0
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SAVES, tmp_path]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as saver:
        try:
            for _ in range(kills):
                committed = max([committed, *killed(saver, rng)])  # what was told is never lost
                names = [path.name for path in tmp_path.iterdir()]
                leftovers += any(name.startswith(".") for name in names)
                check(tmp_path, committed)
        finally:
            saver.kill()
    assert committed >= kills / 2
    assert leftovers >= kills / 10  # so many at least were killed in the midst of a save
    assert len(names) <= 8  # and what they leave does not pile up


def check(root, committed):
    newest = checkpoint.newest(root)
    if newest is None:
        assert committed == -1
        return
    back = checkpoint.read_checkpoint(newest)
    assert back.step >= committed
    assert back.meta == {"sum": back.step}
    np.testing.assert_array_equal(back.params["w"], np.arange(20_000, dtype=np.float32) + back.step)
    assert all(checkpoint.verify(path) == [] for path in checkpoint.list_complete(root))


# Writes its share of a tensor and of its slot, when all are ready; the last one has a scalar, too.
SERVER = """
import json, sys
import numpy as np
from allred import checkpoint
from allred.checkpoint import Entry, whole

directory, index, of = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
start, stop = index * index * 1000, (index + 1) ** 2 * 1000
entries = [(Entry("w", slot, "float64", (of, of, 1000), start, stop), np.arange(start, stop) + 0.5 * bool(slot))
           for slot in ("", "m")]
if index == of - 1:
    entries.append(whole("w", 7, slot="count"))
print("ready", flush=True)
input()
print(json.dumps(checkpoint.write_shard(directory, index, of, entries).to_json()))
"""


def write_together(directory, servers, lost=None):
    """What each server said of its shard; `lost` is killed before it writes."""
    command = [sys.executable, "-c", SERVER, directory]
    processes = [
        subprocess.Popen([*command, str(index), str(servers)], stdin=-1, stdout=-1, text=True)
        for index in range(servers)
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * servers
        if lost is not None:
            processes[lost].kill()
            processes[lost].wait()
        for index, process in enumerate(processes):
            if index != lost:
                process.stdin.write("\n")
                process.stdin.flush()
        said = [process.communicate(timeout=30)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [ShardInfo.from_json(json.loads(line)) for line in said if line]


def test_several_processes_write_one_checkpoint(tmp_path):
    directory = checkpoint.begin(tmp_path, 3)
    back = checkpoint.read_checkpoint(checkpoint.commit(directory, 3, write_together(directory, 2), {"servers": 2}))
    np.testing.assert_array_equal(back.params["w"], np.arange(4_000.0).reshape(2, 2, 1000))
    np.testing.assert_array_equal(back.slots["w"]["m"], back.params["w"] + 0.5)
    assert back.slots["w"]["count"] == 7
    assert back.meta == {"servers": 2}


def test_without_the_shard_of_a_killed_process_nothing_is_committed(tmp_path):
    directory = checkpoint.begin(tmp_path, 3)
    shards = write_together(directory, 2, lost=1)
    with pytest.raises(CheckpointError, match="got the shards"):
        checkpoint.commit(directory, 3, shards)
    assert list(tmp_path.iterdir()) == []


# What a save adds to the most memory that the process ever had; 64 MiB is more than what else comes and goes.
MEMORY = """
import resource, sys
import numpy as np
from allred import checkpoint
from allred.checkpoint import whole

checkpoint.commit(directory := checkpoint.begin(sys.argv[1], 0), 0, [checkpoint.write_shard(directory, 0, 1, [])])
array = np.ones((8, 1 << 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
directory = checkpoint.begin(sys.argv[1], 1)
checkpoint.commit(directory, 1, [checkpoint.write_shard(directory, 0, 1, [whole("w", array)])])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_save_does_not_copy_the_arrays(tmp_path):
    run = subprocess.run([sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    assert int(run.stdout) < 16 * 1024  # KiB, of 65536

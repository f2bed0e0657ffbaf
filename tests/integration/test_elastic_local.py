"""Mode local in `allred run --elastic`: a round goes on without a dead rank, and a new one joins at a round."""

import collections
import json
import os
import pathlib
import random
import signal
import threading
import time

import pytest
from harness import BIN, full, run

PROGRAM = pathlib.Path(__file__).with_name("elastic_local_program.py")
STEPS, BATCH, EVERY = 120, 12, 8


def train(directory, *words, deaths, ranks, **given):
    """Run the program, and check what its processes have written. deaths: of ranks that train. ranks: at the end."""
    env = {"ELASTIC_LOCAL": json.dumps(given), "ALLRED_MODE": "local", "XDG_RUNTIME_DIR": str(directory)}
    command = [BIN["mpich"] / "python", "-m", "allred", "run", "--elastic", "--name", "tested", *words]
    result = run([*command, PROGRAM, directory], 60, env)
    assert result.code == 0, result.text
    results = [json.loads(path.read_text()) for path in directory.glob("result-*")]
    assert sorted(each["rank"] for each in results) == list(range(ranks or len(results))), result.text
    assert {each["step"] for each in results} == {STEPS}, result.text
    assert len({each["digest"] for each in results}) == 1, result.text
    used = collections.Counter()
    for path in directory.glob("ledger-*"):
        for line in path.read_text().splitlines():
            step, *ids = line.split()
            used.update((step, each) for each in ids)
    return used, result


def check_samples(used, deaths):
    """A sample of a step is used once. Some are lost with a dead rank: of one round at most."""
    assert set(used.values()) == {1}
    assert STEPS * BATCH - deaths * EVERY * BATCH / 2 <= len(used) <= STEPS * BATCH, len(used)


@pytest.mark.parametrize(
    ("options", "session"),
    [({}, False), ({"fragments": 2, "delay": 3}, True), *(pytest.param(*each, marks=full) for each in [({}, True)])],
)
def test_the_others_go_on(options, session, tmp_path):
    used, result = train(
        tmp_path, "-np", "3", deaths=1, ranks=2, kill=[1, 21], options=options, session=session
    )  # fmt: skip
    check_samples(used, deaths=1)
    assert "2 ranks go on, " in result.err
    assert "step" not in result.err


@pytest.mark.parametrize("session", [True, pytest.param(False, marks=full)])
def test_a_spare_takes_its_place(session, tmp_path):
    used, result = train(tmp_path, "-np", "3", "--spares", "1", deaths=1, ranks=3, kill=[0, 50], session=session)
    check_samples(used, deaths=1)
    assert "3 ranks go on, 1 of them new" in result.err


def test_collectives_of_the_program_notice_a_death(tmp_path):
    """The rank that notices it first goes on after the step of the last one."""
    used, _ = train(tmp_path, "-np", "3", deaths=1, ranks=2, kill=[2, 37], collective=True)
    assert len(used) > STEPS * BATCH * 0.8


@full
@pytest.mark.limit(120)
@pytest.mark.parametrize("seed", range(4))
def test_random_kills(seed, tmp_path):
    """Ranks are killed at random moments, and replaced; with and without session, fragments and delay."""
    rng, killed = random.Random(seed), []

    def kill():
        while len(killed) < 3:
            time.sleep(rng.uniform(0.2, 0.5))
            found = [int(path.name[7:]) for path in tmp_path.glob("ledger-*") if path.stat().st_size]
            alive = [pid for pid in found if pid not in killed and pathlib.Path(f"/proc/{pid}").exists()]
            if len(alive) > 1:
                killed.append(rng.choice(alive))
                os.kill(killed[-1], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    given = {"session": seed % 2 == 1, "options": {"fragments": 3, "delay": 2} if seed % 4 > 1 else {}, "pause_s": 0.02}
    used, _ = train(tmp_path, "-np", "3", "--restarts", "5", "--min-np", "1", deaths=3, ranks=None, **given)
    check_samples(used, deaths=3)

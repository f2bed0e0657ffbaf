"""Mode local in `allred run --elastic`: a round goes on without a dead rank, and a new one joins at a round."""

import collections
import json
import os
import pathlib
import random
import signal
import threading

import pytest
from harness import BIN, full, run

PROGRAM = pathlib.Path(__file__).with_name("elastic_local_program.py")
STEPS, BATCH, EVERY = 120, 12, 8


def train(directory, *words, ranks, **given):
    """Run the program, and check what its processes have written. Returns how often each sample was used, and the
    result. ranks: at the end; None: any number."""
    env = {"ELASTIC_LOCAL": json.dumps(given), "ALLRED_MODE": "local", "XDG_RUNTIME_DIR": str(directory)}
    command = [BIN["mpich"] / "python", "-m", "allred", "run", "--elastic", "--name", "tested", *words]
    result = run([*command, PROGRAM, directory], 60, env)
    assert result.code == 0, result.text
    results = [json.loads(path.read_text()) for path in directory.glob("result-*")]
    assert ranks is None or sorted(each["rank"] for each in results) == list(range(ranks)), result.text
    assert {each["step"] for each in results} == {STEPS}, result.text
    assert len({each["digest"] for each in results}) == 1, result.text
    used = collections.Counter()
    for path in directory.glob("ledger-*"):
        used.update(path.read_text().split())
    return used, result


def check_samples(used, deaths):
    """A sample is used once. Some are lost with a dead rank: of one round at most."""
    assert set(used.values()) == {1}
    assert STEPS * BATCH - deaths * EVERY * BATCH / 2 <= len(used) <= STEPS * BATCH, len(used)


@pytest.mark.parametrize(
    ("options", "session"),
    [({}, False), ({"fragments": 2, "delay": 3}, True), *(pytest.param(*each, marks=full) for each in [({}, True)])],
)
def test_the_others_go_on(options, session, tmp_path):
    used, result = train(
        tmp_path, "-np", "3", ranks=2, kill=[1, 21], options=options, session=session
    )  # fmt: skip
    check_samples(used, deaths=1)
    assert "2 ranks go on, " in result.err
    assert "step" not in result.err


@pytest.mark.parametrize("session", [True, pytest.param(False, marks=full)])
def test_a_spare_takes_its_place(session, tmp_path):
    used, result = train(tmp_path, "-np", "3", "--spares", "1", ranks=3, kill=[0, 50], session=session)
    check_samples(used, deaths=1)
    assert "3 ranks go on, 1 of them new" in result.err


def test_a_new_process_joins_the_last_rank(tmp_path):
    """A round of one rank has no wait that would notice the new process."""
    _, result = train(tmp_path, "-np", "2", "--restarts", "1", ranks=2, kill=[1, 20], pause_s=0.02)
    assert "1 rank goes on" in result.err
    assert "2 ranks go on, 1 of them new" in result.err


@pytest.mark.parametrize("kill", [[2, 37], pytest.param([2, 40], marks=full)])
def test_collectives_of_the_program_notice_a_death(kill, tmp_path):
    """The step in which the ranks notice it is lost and repeated."""
    used, _ = train(tmp_path, "-np", "3", ranks=2, kill=kill, collective=True)
    assert set(used.values()) == {1}
    assert len(used) > STEPS * BATCH * 0.8


@pytest.mark.parametrize(
    ("words", "ranks", "options"),
    [
        (["--spares", "1"], None, {}),  # the round at the end has nothing to do
        pytest.param([], 2, {"fragments": 2}, marks=full),
        pytest.param(["--spares", "1"], 3, {"fragments": 2, "delay": 1}, marks=full),
    ],
)
def test_a_death_before_the_round_at_the_end(words, ranks, options, tmp_path):
    used, result = train(tmp_path, "-np", "3", *words, ranks=ranks, kill=[1, "end"], options=options)
    assert set(used.values()) == {1}, result.text


@full
@pytest.mark.limit(120)
@pytest.mark.parametrize("seed", range(4))
def test_random_kills(seed, tmp_path):
    """Ranks are killed at random moments, and replaced; with and without session, fragments and delay."""
    rng, killed, ended = random.Random(seed), [], threading.Event()

    def kill():
        while len(killed) < 3 and not ended.wait(rng.uniform(0.2, 0.5)):
            found = [int(path.name[7:]) for path in tmp_path.glob("ledger-*") if path.stat().st_size]
            alive = [pid for pid in found if pid not in killed and pathlib.Path(f"/proc/{pid}").exists()]
            if len(alive) > 1:
                killed.append(rng.choice(alive))
                os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    given = {"session": seed % 2 == 1, "options": {"fragments": 3, "delay": 2} if seed % 4 > 1 else {}, "pause_s": 0.02}
    used, _ = train(tmp_path, "-np", "3", "--restarts", "5", "--min-np", "1", ranks=None, **given)
    ended.set()
    thread.join()
    assert killed
    check_samples(used, deaths=len(killed))

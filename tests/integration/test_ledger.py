"""Jobs that are killed and go on with other numbers of ranks: every epoch has every sample exactly once."""

import itertools
import json
import pathlib
import random

import numpy as np
import pytest
from harness import mpirun, remove_mapped

from allred.data import shuffled, write_tfrecord
from allred.data.loader import Sampler

PROGRAM = pathlib.Path(__file__).parent / "ledger_program.py"
ROWS, EPOCHS, SEED = 97, 5, 7
PLACES = ("begin", "ledger", "step", "saving", "saved")
NOBODY = (-1, 0, "begin")


def position(directory):
    path = directory / "position.json"
    return json.loads(path.read_text())["step"] if path.exists() else 0


def ledger(directory, generation, ranks, done):
    """(step, epoch, numbers over all ranks in rank order) of the steps that were completed."""
    parts = {}
    for rank in range(ranks):
        path = directory / f"ledger-{generation}-{rank}.txt"
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry["step"] <= done:
                parts.setdefault((entry["step"], entry["epoch"]), []).append(entry["numbers"])
    assert all(len(shares) == ranks for shares in parts.values())
    whole = itertools.chain.from_iterable
    return [(step, epoch, list(whole(shares))) for (step, epoch), shares in sorted(parts.items())]


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    ("mpi", "source", "places", "full"),  # where a job is killed; with --full there are more jobs, with random places
    [
        ("mpich", "arrays", ("ledger", "saving"), 8),
        ("mpich", "processes", ("begin",), 4),
        ("mpich", "stream", ("step",), 4),
        pytest.param("openmpi", "thread", ("saved",), 4, marks=pytest.mark.full),
    ],
)
def test_killed_and_resized_every_epoch_has_every_sample_exactly_once(mpi, source, places, full, tmp_path, request):
    chance, ranks, completed, largest = random.Random(f"{mpi} {source}"), 0, [], 3
    kill_steps = (17, 20)  # in the second epoch or later; two jobs together make less than the five epochs
    if request.config.getoption("--full"):
        places, largest, kill_steps = (*places, *chance.choices(PLACES, k=full - len(places))), 4, (1, 6)
    write_tfrecord(tmp_path / "numbers", (str(number).encode() for number in range(ROWS)))
    for generation, place in enumerate((*places, None)):
        ranks = chance.choice([other for other in range(1, largest + 1) if other != ranks])
        batch_size = chance.randint(6, 12)
        rank = 0 if place == "saving" else chance.randrange(ranks)
        kill = (rank, chance.randint(*kill_steps), place) if place else NOBODY
        before = position(tmp_path)
        result = mpirun(ranks, PROGRAM, tmp_path, generation, source, batch_size, *kill, mpi=mpi, timeout_s=100)
        remove_mapped(tmp_path)
        assert result.left == [], result.text
        assert (result.code != 0, "done" in result.out) == (bool(place), not place), result.text
        assert "Traceback" not in result.err, result.text
        after = position(tmp_path)
        steps = ledger(tmp_path, generation, ranks, after)
        assert [step for step, _, _ in steps] == list(range(before + 1, after + 1)), result.text
        completed += steps
    seen = {}
    for _, epoch, numbers in completed:
        seen.setdefault(epoch, []).extend(numbers)
    assert sorted(seen) == list(range(EPOCHS))
    for epoch, numbers in seen.items():
        assert np.bincount(numbers, minlength=ROWS).tolist() == [1] * ROWS, f"epoch {epoch}"
        in_order = shuffled(range(ROWS), 16, SEED).of_epoch(epoch)
        expected = in_order if source == "stream" else Sampler(ROWS, 1, EPOCHS, SEED, False).order(epoch)
        assert numbers == list(expected)

"""Times of a recovery in a running job, and of a restart of the same job, interleaved.

    python benchmarks/recovery.py [--rounds 20]

Each round runs every case once, in a job of its own: 4 ranks (2 of the spare's), of which one is killed.

    shrink        --elastic, 1 MB of parameters: the others go on
    shrink 100 MB the same with 100 MB
    spare         --elastic --spares 1, 1 MB: a spare replaces it, and receives the state
    host          --elastic, 1 MB, two hosts (network namespaces; needs root): all processes of one are killed
    restart       --restarts 1 with a session that saves every 5 steps, 1 MB

noticed: from SIGKILL to the exception on the last survivor. next step: to the end of the first new step of all ranks.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "integration" / "elastic_program.py"
sys.path.insert(0, str(PROGRAM.parent))
from hosts import hosts  # noqa: E402

CASES = {
    "shrink": (["--elastic"], 250_000, {}),
    "shrink 100 MB": (["--elastic"], 25_000_000, {"pause_s": 0.01}),
    "spare": (["--elastic", "--spares", "1"], 250_000, {}),
    "host": (["--elastic"], 250_000, {}),
    "restart": (["--restarts", "1"], 250_000, {"session": "ckpt", "save_steps": 5}),
}
KILLED_AT = 12


def measure(name: str) -> tuple[float, float, int]:
    """Run a case. Return the two times, and the steps that were lost."""
    words, elements, more = CASES[name]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        given = {
            "directory": directory, "rows": 96, "batch_size": 8, "epochs": 3, "elements": elements, "form": "dict",
            "pause_s": 0.005, "kill": {"rank": 2, "step": KILLED_AT, "how": "SIGKILL"}, **more,
        }  # fmt: skip
        if "session" in given:
            given["session"] = os.path.join(directory, given["session"])
        environ = {**os.environ, "ELASTIC_PROGRAM": json.dumps(given), "XDG_RUNTIME_DIR": directory}
        prefix: list[str] = []
        if name == "host":
            given["kill"]["how"] = "host"
            here = stack.enter_context(hosts(3, pathlib.Path(directory)))
            prefix, words = here.inside(0), [*words, "--hosts", ",".join(f"{each}:2" for each in here.names[1:])]
            environ["HYDRA_LAUNCHER_EXEC"] = f"{directory}/agent"
            environ["ELASTIC_PROGRAM"] = json.dumps(given)
        command = [*prefix, sys.executable, "-m", "allred", "run", "-np", "4", *words, str(PROGRAM)]
        subprocess.run(command, env=environ, cwd=directory, check=True, capture_output=True, timeout=120)
        events = []
        for path in pathlib.Path(directory).glob("ledger-*"):
            events += [{**json.loads(line), "process": path.name} for line in path.read_text().splitlines()]
    [killed] = [each["time"] for each in events if each["event"] == "fails"]
    noticed = [each["time"] - killed for each in events if each["event"] == "interrupted"]
    commits = [each for each in events if each["event"] == "commit" and each["time"] > killed]
    is_restart = "--restarts" in words
    if is_restart:
        before = {each["process"] for each in events if each["event"] == "commit" and each["time"] < killed}
        commits = [each for each in commits if each["process"] not in before]
    else:
        commits = [each for each in commits if each["world"] > 1]
    first = min(each["step"] for each in commits)
    next_step = max(each["time"] for each in commits if each["step"] == first) - killed
    return max(noticed, default=float("nan")), next_step, KILLED_AT - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    found: dict[str, list[tuple[float, float, int]]] = {
        name: [] for name in CASES if name != "host" or not os.geteuid()
    }
    for _ in range(rounds):
        for name in found:
            found[name].append(measure(name))
    print(f"{'':15} {'noticed, ms':>20} {'next step, ms':>20} {'steps lost':>12}")
    for name, results in found.items():
        noticed, next_step, lost = zip(*results, strict=True)
        ms = [f"{1000 * statistics.median(each):6.0f} max {1000 * max(each):6.0f}" for each in (noticed, next_step)]
        print(f"{name:15} {ms[0]:>20} {ms[1]:>20} {max(lost):>12}")
    ratio = statistics.median(
        restart[1] / shrink[1] for restart, shrink in zip(found["restart"], found["shrink"], strict=True)
    )
    print(f"restart / shrink, median of {rounds} rounds: {ratio:.1f}")


if __name__ == "__main__":
    main()

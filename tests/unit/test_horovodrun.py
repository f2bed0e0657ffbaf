"""The packages `horovod` of allred next to an installed Horovod, and the options of horovodrun. No MPI."""

import importlib
import itertools
import os
import shutil
import subprocess
import sys

import pytest

from allred.compat import horovod_import
from allred.compat.horovodrun import command
from allred.errors import ConfigError

FAKE = """\
__version__ = "0.27.0"
"""
LAUNCH = """\
import sys
def run_commandline():
    print("Horovod's own", sys.argv[1:])
    sys.exit(9)
"""


def python(*words, cwd, first=()):
    """Run Python. first: directories before those of this process. Return exit code, stdout, and stderr's last line."""
    paths = [path for path in sys.path if path not in ("", horovod_import.DIRECTORY)]  # other tests import all packages
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([*first, *paths])}
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A Horovod in a directory of sys.path."""
    (tmp_path / "site/horovod/runner").mkdir(parents=True)
    (tmp_path / "site/horovod/__init__.py").write_text(FAKE)
    (tmp_path / "site/horovod/runner/__init__.py").write_text("")
    (tmp_path / "site/horovod/runner/launch.py").write_text(LAUNCH)
    (tmp_path / "site/horovod-0.27.0.dist-info").mkdir()
    (tmp_path / "site/horovod-0.27.0.dist-info/METADATA").write_text("Name: horovod\nVersion: 0.27.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path


def test_an_installed_horovod_is_not_replaced(installed):
    refusal = f"ImportError: Horovod 0.27.0 ({installed}/site/horovod) is installed, and allred.compat.horovod does not"
    code, _, error = python("-m", "allred.compat.horovod", "-c", "pass", cwd=installed)
    assert (code, error[: len(refusal)]) == (1, refusal)
    code, _, error = python("-c", "import allred.compat.horovod", cwd=installed)
    assert (code, error[: len(refusal)]) == (1, refusal)
    code, output, _ = python("-c", "import allred, horovod; print(horovod.__version__)", cwd=installed)
    assert (code, output) == (0, "0.27.0")


def test_horovodrun_is_that_of_an_installed_horovod(installed):
    code, output, _ = python("-m", "allred.compat.horovodrun", "-np", "2", "python", cwd=installed)
    assert (code, output) == (9, "Horovod's own ['-np', '2', 'python']")


def test_an_installed_horovod_that_is_found_later_is_an_error(installed):
    """As in a process whose PYTHONPATH has the packages of allred, and whose Python has Horovod in site-packages."""
    code, _, error = python("-c", "import horovod", cwd=installed, first=[horovod_import.DIRECTORY])
    assert code == 1
    assert "ImportError: Horovod 0.27.0" in error


def test_the_packages_of_another_allred_are_no_installed_horovod(tmp_path):
    """horovodrun of one environment starts a Python of another one."""
    other = tmp_path / "other/allred/compat/horovod/packages"
    shutil.copytree(horovod_import.DIRECTORY, other)
    code, output, _ = python("-c", "import horovod; print(horovod.__file__)", cwd=tmp_path, first=[str(other)])
    assert (code, output) == (0, f"{other}/horovod/__init__.py")


def test_a_directory_with_this_name_is_no_horovod(tmp_path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod/train.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert horovod_import.find_installed() == ""


def test_without_being_asked_for_there_is_no_horovod(tmp_path):
    code, _, error = python(
        "-c", "import allred, allred.compat, allred.compat.horovodrun.command, horovod", cwd=tmp_path
    )
    assert (code, error) == (1, "ModuleNotFoundError: No module named 'horovod'")


PROGRAM = """\
import multiprocessing, sys
import horovod
if __name__ == "__main__":
    print(sys.argv, sys.path[0], sys.flags.optimize, horovod.__version__)
    worker = multiprocessing.get_context("spawn").Process(target=print, args=["worker"])
    worker.start()
    worker.join()
    sys.exit(worker.exitcode + 7)
"""


def test_a_program_runs_as_under_python(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/train.py").write_text(PROGRAM)
    code, output, _ = python("-Om", "allred.compat.horovod", "lib/train.py", "--lr", "1", cwd=tmp_path)
    assert output.splitlines() == [f"['lib/train.py', '--lr', '1'] {tmp_path}/lib 1 0.28.1", "worker"]
    assert code == 7
    code, output, _ = python("-m", "allred.compat.horovod", "-m", "lib.train", "2", cwd=tmp_path)
    assert output.splitlines() == [f"['{tmp_path}/lib/train.py', '2'] {tmp_path} 0 0.28.1", "worker"]
    assert code == 7
    (tmp_path / "lib/asks.py").write_text("import allred.compat.horovod\n" + PROGRAM)
    assert python("lib/asks.py", cwd=tmp_path)[:2] == (7, f"['lib/asks.py'] {tmp_path}/lib 0 0.28.1\nworker")


@pytest.mark.parametrize(("options", "expected"), [
    (["-m", "{}"], []), (["-m{}"], []), (["-Oum", "{}"], ["-Ou"]), (["-X", "dev", "-um{}"], ["-X", "dev", "-u"]),
])  # fmt: skip
def test_options_of_python_are_kept(options, expected, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # the import changes it
    main = importlib.import_module("allred.compat.horovod.__main__")
    words = [option.format(main.MODULE) for option in options]
    assert main.command(["python", *words, "train.py", "-m"], ["train.py", "-m"]) == [*expected, "train.py", "-m"]


def test_other_frameworks_are_an_error_that_names_what_there_is(tmp_path):
    names = ("mxnet", "spark", "ray")
    code = f"""
import allred.compat.horovod, importlib
for name in {names}:
    try:
        importlib.import_module(f"horovod.{{name}}.sub")
    except ImportError as error:
        print(error)
"""
    _, output, _ = python("-c", code, cwd=tmp_path)
    assert [line.partition(":")[0] for line in output.splitlines()] == [
        f"allred has no horovod.{name}" for name in names
    ]


def make(*words, environ=None):
    return command.make_job(command.parse_options(words), environ or {})


def test_all_modules_of_the_import_hook(tmp_path):
    """Costs 3 s: a process that imports torch."""
    pytest.importorskip("torch")
    code = """
import allred.compat.horovod, importlib, inspect, horovod.torch
from allred.compat.horovod_import import _MODULES
for name in _MODULES:
    if "tensorflow" in name or "keras" in name:  # tests/with_tensorflow
        continue
    module = importlib.import_module(name)
    names = [word for word in vars(module) if word[0] != "_"]
    print(name, module.__doc__ == f"The names of {name}, from allred.", len(names) > 0 or name == "horovod.common")
print(horovod.torch.mpi_ops.allreduce is horovod.torch.allreduce, horovod.torch.compression.Compression.fp16.__name__)
try:
    import horovod.torch.other
except ModuleNotFoundError as error:
    print(error)
"""
    code, output, error = python("-c", code, cwd=tmp_path)
    *modules, torch, missing = output.splitlines()
    assert code == 0, error
    assert len(modules) == 16
    assert all(line.endswith(" True True") for line in modules), output
    assert (torch, missing) == ("True FP16Compressor", "No module named 'horovod.torch.other'")


def test_options_of_hosts_and_sizes(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    job = make("-np", "4", "python", "-u", "train.py", "--min-np", "1")
    assert job.program == ["python", "-u", "train.py", "--min-np", "1"]
    assert job.name == f"train-{os.getpid()}"
    assert make("-np", "3", "python", "-m", "my.train", "x").name == f"my.train-{os.getpid()}"
    assert (job.target, job.find_hosts().slots, job.restarts) == (4, {"localhost": 4}, 0)
    assert (job.min_np, job.max_np, job.watches_hosts) == (None, None, False)
    assert make("--num-proc", "2", "-H", "a:2,b:2", "./train").find_hosts().slots == {"a": 2, "b": 2}
    job = make("-np", "3", "-hostfile", str(tmp_path / "hosts"), "--output-filename", "logs", "train.py")
    assert job.find_hosts().slots == {"a": 2, "b": 2}
    assert job.program[-3:] == [os.path.abspath("logs"), sys.executable, "train.py"]
    assert job.settings["PYTHONPATH"] == horovod_import.DIRECTORY
    assert make("-np", "1", "x", environ={"PYTHONPATH": "/a::/b"}).settings["PYTHONPATH"] == ":".join(
        ["/a", "/b", horovod_import.DIRECTORY]
    )


def test_elastic_options_watch_the_hosts_that_a_script_prints(tmp_path):
    script = tmp_path / "discover.sh"

    def replace(text):
        """Write another script; the one before may be running."""
        new = tmp_path / "new.sh"
        new.write_text(text)
        new.chmod(0o755)
        new.replace(script)

    replace("#!/bin/sh\necho a:4\necho b\n")
    options = ["-np", "2", "--host-discovery-script", str(script)]
    job = make(*options, "--slots-per-host", "3", "--max-np", "6", "--reset-limit", "5", "python", "train.py")
    assert job.find_hosts().slots == {"a": 4, "b": 3}
    replace(f"#!/bin/sh\nwhile [ ! -e {tmp_path}/go ]; do sleep 0.01; done\necho c:1\n")
    assert job.find_hosts().slots == {"a": 4, "b": 3}  # without a wait
    (tmp_path / "go").touch()
    answers = itertools.takewhile(lambda hosts: hosts.slots != {"c": 1}, iter(job.find_hosts, None))
    assert all(hosts.slots == {"a": 4, "b": 3} for hosts in answers)
    assert (job.target, job.min_np, job.max_np, job.restarts, job.watches_hosts) == (2, 2, 6, 5, True)
    job = make("-np", "2", "-H", "a:1,b:1", "--min-np", "1", "python", "train.py")
    assert (job.min_np, job.restarts > 1000, job.watches_hosts) == (1, True, False)
    replace("#!/bin/sh\necho no hosts >&2\nexit 3\n")
    with pytest.raises(ConfigError, match=r"discover.sh failed with exit code 3: no hosts"):
        make(*options, "python", "train.py")


def test_options_become_variables():
    words = ["--fusion-threshold-mb", "32", "--cycle-time-ms", "3.5", "--no-stall-check", "--log-hide-timestamp"]
    words += ["--stall-check-warning-time-seconds", "90", "--timeline-filename", "t.json", "--autotune", "--tcp"]
    words += ["--network-interfaces", "eth0,eth1", "--network-interface", "ib0"]
    settings = make("-np", "2", *words, "python", "train.py").settings
    expected = {
        "HOROVOD_FUSION_THRESHOLD": "33554432", "HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_LOG_HIDE_TIME": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "90", "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_AUTOTUNE": "1", "ALLRED_TRANSPORT": "tcp", "NCCL_IB_DISABLE": "1", "ALLRED_NETWORK": "eth0,eth1,ib0",
    }  # fmt: skip
    assert expected.items() <= settings.items()


def test_options_without_effect_are_named():
    words = ["-np", "1", "--gloo", "--verbose", "--start-timeout", "9", "-prefix-timestamp", "--disable-cache", "--mpi"]
    options = command.parse_options([*words, "--blacklist-cooldown-range", "1", "2", "--", "train.py", "--gloo"])
    assert command.ignored_options(options) == [
        "--gloo", "--start-timeout", "-prefix-timestamp", "--blacklist-cooldown-range"
    ]  # fmt: skip
    assert options.command == ["train.py", "--gloo"]


@pytest.mark.parametrize(("words", "text"), [
    ([], "no command given"),
    (["-np", "2"], "no command given"),
    (["train.py"], "how many ranks"),
    (["-np", "3", "-H", "a:2", "x"], "-np 3 needs 3 slots"),
    (["-np", "3", "-H", "a:2", "-hostfile", "f", "x"], "name the hosts twice"),
    (["-np", "2", "--max-np", "3", "x"], "need --min-np or --host-discovery-script"),
    (["-np", "1", "-p", "2222", "-H", "no-such-host.invalid:2", "x"], "Port and IdentityFile of no-such-host.invalid"),
])  # fmt: skip
def test_options_that_do_not_fit_together_are_an_error(words, text):
    with pytest.raises(ConfigError, match=text):
        make(*words)


@pytest.mark.parametrize("option", ["--mpi-args=-x", "--binding-args=a", "--config-file=f"])
def test_options_that_are_not_supported_are_an_error(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.parse_options(["-np", "2", option, "python", "train.py"])
    assert f"horovodrun: {option.partition('=')[0]} is not supported; " in capsys.readouterr().err


def test_a_port_of_ssh_is_accepted_for_this_host():
    assert make("-np", "1", "-p", "2222", "-i", "key", "-H", "localhost:2", "x").target == 1

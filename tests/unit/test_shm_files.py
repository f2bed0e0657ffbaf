"""allred.watch.shm_files: files of MPICH that are in use are not deleted."""

import mmap
import os
import pathlib
import signal
import subprocess
import sys
import threading
import uuid

import pytest

from allred.watch import shm_files

MAP = """
import mmap, os, sys
mapped = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path():
    path = pathlib.Path(f"/dev/shm/mpich_shm_{uuid.uuid4().hex}_0")
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    yield path
    path.unlink(missing_ok=True)


def file_of(path):
    status = path.stat()
    return shm_files.File(str(path), status.st_dev, status.st_ino)


def test_files_that_this_process_has_mapped_are_deleted(path, tmp_path):
    other, not_mapped = tmp_path / "mpich_shm_1_0", path.with_name(f"{path.name}1")
    for file in (other, not_mapped):
        file.write_bytes(bytes(4096))
    maps = []
    for file in (path, other):
        with file.open("r+b") as opened:
            maps.append(mmap.mmap(opened.fileno(), 4096))
    shm_files.delete_own()
    assert [file.exists() for file in (path, other, not_mapped)] == [False, True, True]
    path.touch()
    shm_files.delete_own()
    assert path.exists()  # another file of the same name
    not_mapped.unlink()
    for each in maps:
        each.close()


@pytest.mark.parametrize("elsewhere", [[], ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]])
def test_a_file_that_any_process_has_mapped_is_in_use(path, elsewhere):
    """Also a process in other namespaces."""
    if elsewhere and subprocess.run([*elsewhere, "true"], timeout=20).returncode:
        pytest.skip("unshare cannot make a PID namespace here")
    file, command = file_of(path), [*elsewhere, sys.executable, "-c", MAP, path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdout.readline() == "mapped\n"
        assert file not in shm_files.unused()
        assert not shm_files.delete(file)
        process.stdin.close()
        process.wait(20)
    assert shm_files.unused()[file] == 4096
    assert shm_files.delete(file)
    assert not path.exists()
    assert shm_files.delete(file), "gone is gone, by whichever watcher"


def test_another_file_of_the_same_name_stays(path):
    file = file_of(path)
    assert shm_files.delete(file._replace(inode=file.inode + 1))
    assert path.exists()


def test_what_is_no_own_file_stays(path):
    file = file_of(path)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        assert not shm_files.delete(file)
        assert file not in shm_files.unused()
    path.unlink()
    path.symlink_to("/dev/null")
    assert not shm_files.delete(file)
    assert str(path) not in [found.path for found in shm_files.unused()]
    assert path.is_symlink()


def test_a_lease_sends_no_signal_when_a_process_opens_the_file(path):
    """The kernel then sends the holder of the lease a signal, SIGIO by default, which would end it."""
    with shm_files._Leased(str(path)):
        opening = threading.Thread(target=lambda: os.close(os.open(path, os.O_RDWR)))
        opening.start()
        opening.join(0.2)
        assert opening.is_alive()
        assert signal.getsignal(signal.SIGIO) == signal.SIG_DFL
    opening.join(20)
    assert not opening.is_alive()

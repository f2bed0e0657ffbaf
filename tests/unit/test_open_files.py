"""The limit of open files."""

import resource
import subprocess
import sys

PROGRAM = """
import resource
from allred.runtime import open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))
assert open_files.allow(10) == ""
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64, "no more than needed"
assert open_files.allow(100) == ""
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 200
print(open_files.allow(1000), open_files.problem(201), open_files.problem(200), sep="; ")
"""


def test_it_is_raised_when_a_process_needs_more():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert "open files are needed, but the limit (ulimit -Hn) is 200; 201 open files are needed" in found.stdout, found
    assert found.stdout.endswith("; \n")


def test_no_limit(monkeypatch):
    from allred.runtime import open_files

    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", None)
    assert open_files.allow(10**9) == ""

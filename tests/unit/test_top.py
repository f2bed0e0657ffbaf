"""`allred top`: the state of a job, its table, and the server of its page, without a job."""

import contextlib
import http.client
import io
import json
import threading

import pytest

from allred.counters import Values
from allred.errors import AllredError, InputError
from allred.monitor import state as states
from allred.monitor import top, web
from allred.page import render, write_page
from allred.watch import job_directory


def snapshot(size=3, time=100.0, hosts=("node1",), **more):
    ranks = [
        {"rank": rank, "host": hosts[rank % len(hosts)], "role": "", "state": f"in Python at train.py:{rank} (step)"}
        | Values(step=64, steps=64, examples=640, seconds=8, waiting_s=4 * (rank != 1), communicating_s=1)._asdict()
        for rank in range(size)
    ]
    delays = [[rank, 1, 2.5] for rank in range(size) if rank != 1 < size]
    late = [[1, len(delays), 2.5 * len(delays)]] if delays else []
    about = {"job": "train-4711", "program": "train.py", "mode": "sync", "starts": 1, "host": "node1"}
    found = {
        "size": size,
        "begun": 90.0,
        "time": time,
        "state": "running",
        "ranks": ranks,
        "delays": delays,
        "late": late,
    }
    return {**about, **found, "messages": [], "history": [], "summaries": [], **more}


def printed(now, width):
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width).print(top.table(now))
    return out.getvalue().splitlines()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("size", "hosts"), [(1, ["a"]), (12, ["a"]), (64, ["node-with-a-name1", "node-with-a-name2"])])
def test_the_table_has_one_line_for_each_rank_at_100_columns(size, hosts):
    now = states.state_of(snapshot(size, time=90.0), snapshot(size, hosts=hosts))
    now["ranks"][-1]["state"] = "stopped (kill -CONT 1234567 continues it), in allreduce 'a long name' #12 for 35 s"
    lines = printed(now, 100)
    assert len(lines) == 2 + size + (size > 1), lines
    assert lines[0].rstrip() == f"train-4711 on node1: {size} ranks, mode sync"
    assert all("node-with" in line for line in lines[2 : 2 + size]) == (len(hosts) > 1)
    assert lines[1 + size].rstrip().endswith("…") or size < 64, lines
    if size > 1:
        assert lines[-1].rstrip() == f"delays while monitored: rank 1 delayed {size - 1} ranks, 2.5 s each"


def test_the_table_of_a_large_job_has_the_ranks_with_a_problem_or_a_delay():
    size = 4096
    now = snapshot(size, late=[[3000, 4095, 9.0]], delays=[])
    now["ranks"][4000]["state"] = "stopped (kill -CONT 1234567 continues it)"
    lines = printed(states.state_of(snapshot(size, time=90.0), now), 100)
    shown = [int(line.split()[0]) for line in lines[2 : 2 + top.MOST_ROWS]]
    assert shown == [*range(top.MOST_ROWS - 2), 3000, 4000]
    assert lines[2 + top.MOST_ROWS].rstrip() == f"and {size - top.MOST_ROWS} more ranks; --web shows all"


def test_rounds_are_a_column_where_there_are_some():
    now = snapshot()
    assert "rounds" not in printed(states.state_of(snapshot(time=90.0), now), 100)[1]
    now["ranks"][1]["rounds"] = 7.0
    _, head, *lines = printed(states.state_of(snapshot(time=90.0), now), 100)
    at = head.index("rounds")
    assert [line[at : at + 6].strip() for line in lines[:3]] == ["0", "7", "0"]


def test_the_state_has_the_speed_of_the_last_seconds_and_leaves_out_what_is_unknown():
    before, now = snapshot(time=99.0), snapshot(time=101.0)
    now["ranks"][0] |= {"steps": 74, "seconds": 10.0, "waiting_s": 5.0, "communicating_s": 1.5}
    first, second, _ = states.state_of(before, now)["ranks"]
    shares = [first[key] for key in ("steps_per_s", "computing", "waiting", "communicating")]
    assert shares == [5.0, 0.25, 0.5, 0.25]
    assert (second["steps_per_s"], second["waiting"], second["computing"]) == (0.0, None, None)


def test_scalars_are_read_as_they_grow_and_again_after_they_were_replaced(tmp_path):
    path, reader = tmp_path / "scalars.jsonl", states.Scalars()
    assert reader.read([str(tmp_path)]) == {}
    lines = [json.dumps({"step": step, "time": 1.0, "loss": "NaN" if step == 2 else step / 2}) for step in range(1000)]
    path.write_text("\n".join(lines[:3]) + '\n{"step": 3, "lo')
    assert reader.read([str(tmp_path)]) == {"loss": [[0, 0.0], [1, 0.5], [2, None]]}
    path.write_text("\n".join(lines) + "\nnonsense\n[]\n")
    points = reader.read([str(tmp_path)])["loss"]
    assert 200 <= len(points) <= states.MOST_POINTS
    assert points[-1] == [999, 499.5]
    new = tmp_path / "new"
    new.write_text('{"step": 1, "time": 1.0, "accuracy": 0.5}\n')
    new.rename(path)
    assert reader.read([str(tmp_path)]) == {"accuracy": [[1, 0.5]]}
    assert list(reader.read([str(tmp_path), str(tmp_path.parent / "no/logs")])) == [f"{tmp_path.name}: accuracy"]


def test_the_newest_jobs_that_have_ended_are_kept(directory):
    for number in range(job_directory.MOST_ENDED + 3):
        job_directory.write_ended(f"job{number}", snapshot())
    assert len(job_directory.ended()) == job_directory.MOST_ENDED
    assert job_directory.ended()[-1] == f"job{job_directory.MOST_ENDED + 2}"
    with pytest.raises(AllredError, match=r"no job 'other'; no job of this user runs on this host .*; ended: job18, "):
        states.resolve("other")
    last = states.state("job22")
    assert last["ended"]
    assert [rank["steps_per_s"] for rank in last["ranks"]] == [8.0, 8.0, 8.0]
    assert last["ranks"][0]["waiting"] == 0.5


@pytest.mark.parametrize("earlier", [False, True])
def test_a_job_whose_watcher_was_killed_keeps_its_last_state(earlier, directory, monkeypatch):
    class Job:
        left, closed = 3, 0

        def snapshot(self):
            self.left -= 1
            if self.left < 0:
                raise AllredError("job demo has ended")
            return snapshot(time=103.0 - self.left)

        def close(self):
            self.closed += 1

    if earlier:
        job_directory.write_ended("demo", snapshot(1, begun=80.0))
    job = Job()
    monkeypatch.setattr(states, "INTERVAL_S", 0.01)
    monkeypatch.setattr(states, "resolve", lambda name: "demo")
    monkeypatch.setattr(states, "open_job", lambda name: job)
    with contextlib.closing(states.follow("")) as found:
        seen = [next(found) for _ in range(4)]
        assert [(each["time"], each["ended"]) for each in seen] == [
            (102, False),
            (103, False),
            (103, True),
            (103, True),
        ]
        assert job.closed == 2  # the second connection has failed at once
        assert all(each["size"] == 3 for each in seen)


def test_text_of_a_job_cannot_leave_the_data_of_the_page(tmp_path):
    text = "</script><script>alert(1)</script><!-- & @DATA@ @NONCE@"
    page = render({"text": text})
    assert page.count("<script") == render(None).count("<script") == 2
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data) == {"text": text}
    with pytest.raises(InputError, match=r"cannot write .*: No such file or directory; choose another path"):
        write_page(str(tmp_path / "no" / "page.html"), {})


def get(port, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    with contextlib.closing(connection):
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read(200)


def test_the_server_answers_only_its_user(directory):
    job_directory.write_ended("demo", snapshot())
    with web.PageServer("demo") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port, token = server.server_port, f"?token={server.token}"
        assert server.socket.getsockname()[0] == "127.0.0.1"
        status, headers, page = get(port, f"/{token}")
        assert (status, page[:15], headers["X-Frame-Options"]) == (200, b"<!doctype html>", "DENY")
        for path in (
            "/",
            "/events",
            "/?token=",
            f"/?token={server.token[:-1]}",
            "/?token=%C3%A9",
            "/?x=" + server.token,
        ):
            assert get(port, path)[0] == 403, path
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example:80", ""):
            assert get(port, f"/{token}", Host=host)[0] == 403, host
        for host in ("localhost", "localhost:9999", f"127.0.0.1:{port}"):  # another port: through ssh -L
            assert get(port, f"/{token}", Host=host)[0] == 200, host
        assert get(port, f"/../etc/passwd{token}")[0] == 404
        assert get(port, f"/events{token}")[2].startswith(b'data: {"kind": "job"')
        with pytest.raises(AllredError, match=f"port {port}: Address already in use; choose"):
            web.PageServer("demo", port)
        server.shutdown()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["demo", "--web", "0"], "argument --web: expected a port from 1 to 65535, got '0'"),
        (["demo", "--web", "--json"], "not allowed with argument"),
        (["nobody", "--html", "x"], "no job 'nobody'; no job of this user runs on this host (no file in "),
        (["nobody", "--web"], "no job 'nobody'; no job of this user runs on this host (no file in "),
        (
            ["demo", "--html", "/no/such/page"],
            "cannot write /no/such/page: No such file or directory; choose another path",
        ),
    ],
)
def test_wrong_input_is_one_line(arguments, error, directory, capsys):
    job_directory.write_ended("demo", snapshot())
    assert top.main(arguments) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert error in err

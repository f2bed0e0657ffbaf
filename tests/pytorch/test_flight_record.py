"""The flight record, read by torch's own analysis. About 12 s."""

import contextlib
import gc
import logging
import pathlib
import pickle
import re
import subprocess
import sys
import types

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.distributed.flight_recorder.fr_trace")  # torch 2.9

import torch
from test_backend import HERE, LIMIT_S, run
from torch.distributed.flight_recorder import fr_trace

from allred.errors import ConfigError, InputError
from allred.torch import flight_recorder


def analyse(directory, caplog):
    """Return what torch's analysis prints, and its table of collectives."""
    output = directory.parent / f"{directory.name}.database"
    with caplog.at_level(logging.INFO):
        try:
            fr_trace.main([str(directory), "-o", str(output)])
        finally:
            gc.enable()  # which the analysis disables
    with output.open("rb") as file:
        return caplog.text, pickle.load(file)[1].collectives


@pytest.mark.limit(LIMIT_S + 10)
def test_torch_finds_the_missing_rank_and_the_operation(tmp_path, caplog):
    prefix = {"TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "timeout/rank_")}
    result = run(3, HERE / "flight_record_program.py", tmp_path, env=prefix)
    assert result.code == 1, result.text
    assert result.err.count("allred: each rank writes its flight record to ") == 1, result.text

    text, found = analyse(tmp_path / "match", caplog)
    assert [each for each in found if not each.pass_check] == [], text
    assert "gloo:all_to_all" in {each.collective_name for each in found}
    kinds = [each.collective_name.partition(" ")[0] for each in found]
    assert kinds.count("gloo:send") + kinds.count("gloo:recv") == 6, kinds
    assert sorted({each.pg_desc.partition(":")[2] for each in found}) == ["default_pg", "pair"]
    assert {each.collective_state for each in found} == {"completed"}
    assert not re.search("Not all ranks|has errors|mismatch", text), text

    caplog.clear()
    text, found = analyse(tmp_path / "mismatch", caplog)
    [each] = [each for each in found if not each.pass_check]
    assert each.pg_desc.endswith(":others"), text
    assert "Expected collective type: 'all_reduce' does not match found collective type: 'broadcast'" in text

    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", tmp_path / "timeout"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    missing = text[text.index("Not all ranks joining collective") :]
    assert re.search(r"group info: \S+:default_pg\n.*collective: gloo:all_reduce\n.*missing ranks: \{1\}", missing), (
        text
    )
    assert "collective state: started" in missing
    line = (HERE / "flight_record_program.py").read_text().splitlines().index("    dist.all_reduce(torch.ones(7))") + 1
    assert f"evaluate at {HERE / 'flight_record_program.py'}:{line}" in missing


@pytest.fixture
def recorder(monkeypatch):
    """A function that sets variables and makes the record of a group with 3 ranks."""
    monkeypatch.setattr(flight_recorder, "_recorder", None)
    monkeypatch.setattr(flight_recorder, "_groups", 0)
    monkeypatch.setattr(
        flight_recorder.world, "current", lambda: types.SimpleNamespace(topology=types.SimpleNamespace(rank=1))
    )
    monkeypatch.setattr(flight_recorder.process_end, "_for_failure", [])
    for name in (*flight_recorder._SIZE, *flight_recorder._PREFIX):
        monkeypatch.delenv(name, raising=False)

    def make(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return flight_recorder.group_record(types.SimpleNamespace(rank=1, ranks=(0, 1, 5)), 60.0)

    return make


@pytest.mark.parametrize("name", flight_recorder._SIZE)
def test_the_ring_keeps_the_last_operations_and_no_tensors(recorder, name, tmp_path):
    group = recorder(**{name: "4"})
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    for _ in range(6):
        group.begin("allreduce", ([x], None), "0", "default_pg").end()
    group.begin("barrier", (None,), "0", "default_pg")
    group.begin("send", ([x], 2, 9), "0", "default_pg").follow([])
    path = pathlib.Path(flight_recorder.write_flight_record(f"{tmp_path}/new/r"))
    assert path == tmp_path / "new/r1"
    found = pickle.loads(path.read_bytes())
    assert [each["record_id"] for each in found["entries"]] == [4, 5, 6, 7]
    assert [each["state"] for each in found["entries"]] == ["completed", "completed", "scheduled", "completed"]
    first, *_, barrier, sent = found["entries"]
    assert (first["input_sizes"], first["output_dtypes"]) == ([[2, 3]], ["bfloat16"])
    assert (barrier["profiling_name"], barrier["input_sizes"], barrier["collective_seq_id"]) == ("gloo:barrier", [], 7)
    assert (sent["profiling_name"], sent["process_group"]) == ("gloo:send 0->1", ("0 from 1 to 5, tag 9", "default_pg"))
    assert found["pg_config"]["0 from 1 to 5, tag 9"]["ranks"] == "[1, 5]"
    assert found["pg_status"]["0"]["last_completed_collective"] == 6
    assert any(frame["name"] == "test_the_ring_keeps_the_last_operations_and_no_tensors" for frame in first["frames"])
    assert not [each for each in gc.get_referrers(x) if isinstance(each, (list, tuple))]


def test_recording_is_off_without_a_variable_and_a_wrong_one_is_an_error(recorder, tmp_path):
    assert recorder() is None
    with pytest.raises(InputError, match="TORCH_FR_BUFFER_SIZE=2000 before init_process_group"):
        flight_recorder.write_flight_record()
    assert recorder(TORCH_NCCL_DEBUG_INFO_TEMP_FILE=f"{tmp_path}/old_") is not None
    assert pathlib.Path(flight_recorder.write_flight_record()) == tmp_path / "old_1"


def test_a_size_of_zero_switches_it_off_and_a_wrong_one_is_an_error(recorder, tmp_path):
    assert recorder(TORCH_FR_BUFFER_SIZE="0", TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/x") is None
    with pytest.raises(ConfigError, match="TORCH_FR_BUFFER_SIZE='many' is not a whole number"):
        recorder(TORCH_FR_BUFFER_SIZE="many")


def test_a_file_that_cannot_be_written_is_one_line(recorder, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    recorder(TORCH_FR_DUMP_TEMP_FILE=f"{tmp_path}/file/rank_")
    with contextlib.suppress(ValueError):
        flight_recorder.process_end.call_for_failure()
    assert re.fullmatch(r"allred: cannot write the flight record of rank 1: .*file.*\n", capfd.readouterr().err)

"""Torch optimizers in a job of `allred run --elastic`: a rank dies, and the others go on. About 35 s in two processes.

tests/integration/test_elastic.py has the deaths, and what ranks without torch compute.
"""

import json
import pathlib
import sys

import numpy as np
import pytest
import recovery_program

from allred.testing.job_runner import run

PROGRAM = pathlib.Path(recovery_program.__file__)
EPOCHS = 3
full = pytest.mark.full
STEPS = EPOCHS * recovery_program.ROWS // recovery_program.BATCH


def train(directory, *words, program=PROGRAM, **env):
    own = {"DIRECTORY": str(directory), "EPOCHS": str(EPOCHS), "XDG_RUNTIME_DIR": str(directory), **env}
    command = [sys.executable, "-m", "allred", "run", "--elastic", "--name", "tested", *words, program]
    result = run(command, 90, own, cwd=directory)
    assert result.code == 0, result.text
    assert result.left == [], result.text
    found = [json.loads(path.read_text()) for path in directory.glob("result-*")]
    return result, sorted(found, key=lambda each: each["rank"])


def check(result, found, ranks, halves=7):
    """All ranks have the parameters of a serial training."""
    assert [each["rank"] for each in found] == list(range(ranks)), result.text
    assert {each["step"] for each in found} == {STEPS}, (found, result.text)
    assert all(each["parameters"] == found[0]["parameters"] for each in found), result.text
    for parameter, expected in zip(found[0]["parameters"], recovery_program.serial(EPOCHS, halves), strict=True):
        np.testing.assert_allclose(parameter, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("overlap", ["always", pytest.param("never", marks=full)])
@pytest.mark.parametrize("where", ["backward", pytest.param("update", marks=full)])
def test_the_others_go_on(overlap, where, tmp_path):
    result, found = train(tmp_path, "-np", 3, KILL="1,8", WHERE=where, ALLRED_OVERLAP=overlap)
    check(result, found, 2)
    assert "2 ranks go on" in result.err, result.text
    assert where == "update" or {each["lost"] for each in found} == {1}, (found, result.text)


@full  # by default in test_a_data_loader_starts_again_behind_the_last_step
@pytest.mark.parametrize("step", [8, 1, STEPS])
def test_a_spare_receives_model_and_optimizer(step, tmp_path):
    env = {"KILL": f"0,{step}", "SESSION": str(tmp_path / "ckpt")}
    result, found = train(tmp_path, "-np", 2, "--spares", 1, **env)
    check_spare(result, found)


def check_spare(result, found):
    """Two ranks, one of which was a spare, with the state of the scheduler."""
    check(result, found, 2)
    assert {(each["scheduler"], each["rate"]) for each in found} == {(STEPS + 1, 0.02 * 0.5 ** (STEPS // 7))}, found
    assert "2 ranks go on, 1 of them new" in result.err, result.text


@pytest.mark.parametrize("rank", ["1", pytest.param("0", marks=full)])
def test_mode_local_goes_on_at_a_round(rank, tmp_path):
    """A spare takes the place of the dead rank; the scheduler of all ranks makes the same steps."""
    env = {"KILL": f"{rank},10", "SESSION": str(tmp_path / "ckpt"), "ALLRED_MODE": "local", "ALLRED_LOCAL_STEPS": "4"}
    result, found = train(tmp_path, "-np", 3, "--spares", 1, **env)
    assert [each["rank"] for each in found] == [0, 1, 2], result.text
    assert {each["step"] for each in found} == {STEPS}, (found, result.text)
    assert all(each["parameters"] == found[0]["parameters"] for each in found), result.text
    assert {(each["scheduler"], each["rate"]) for each in found} == {(STEPS + 1, 0.02 * 0.5 ** (STEPS // 7))}, found
    assert "3 ranks go on, 1 of them new" in result.err, result.text


@pytest.mark.parametrize("killed", [pytest.param("0", marks=full), "1"])
def test_the_processes_of_hvd_elastic_go_on_from_the_last_commit(killed, tmp_path):
    """Each sample is counted once in each epoch; updates after the last commit are not."""
    program = PROGRAM.with_name("recovery_horovod_program.py")
    result, found = train(tmp_path, "-np", 2, "--spares", 1, program=program, KILL=killed)
    assert [each["rank"] for each in found] == [0, 1], result.text
    assert sorted(each["starts"] for each in found) == [1, 2], (found, result.text)
    for each in found:
        assert each["seen"] == [3.0] * 60, (each, result.text)
        assert each["weight"] == found[0]["weight"], result.text


@pytest.mark.parametrize("has_session", [pytest.param(False, marks=full), True])
@pytest.mark.parametrize("workers", ["2", pytest.param("0", marks=full)])
def test_a_data_loader_starts_again_behind_the_last_step(workers, has_session, tmp_path):
    """The workers fetch ahead; the position is that of the batches that the program has received."""
    if has_session:
        env = {"SESSION": str(tmp_path / "ckpt")}
        check_spare(*train(tmp_path, "-np", 2, "--spares", 1, KILL="1,14", WORKERS=workers, **env))
    else:  # a spare would lack the state of the scheduler
        check(*train(tmp_path, "-np", 3, KILL="1,14", WORKERS=workers), 2)


DDP_OPTIONS = [
    {"hook": True},
    {},
    {"static_graph": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


@pytest.mark.parametrize("options", [DDP_OPTIONS[0], *(pytest.param(each, marks=full) for each in DDP_OPTIONS[1:])])
@pytest.mark.parametrize("killed", [pytest.param("0,8", marks=full), "1,8", pytest.param("1,1", marks=full)])
def test_ddp_goes_on_with_other_ranks(killed, options, tmp_path):
    result, found = train(tmp_path, "-np", 3, KILL=killed, DDP=json.dumps(options))
    check(result, found, 2)
    assert [each["group"] for each in found] == [[0, 2], [1, 2]], (found, result.text)
    assert {each["lost"] for each in found} == {1}, (found, result.text)


@pytest.mark.parametrize("has_session", [pytest.param(False, marks=full), True])
@pytest.mark.parametrize("where", [pytest.param("backward", marks=full), "update"])
@pytest.mark.parametrize("killed", ["0,8", pytest.param("1,1", marks=full)])
def test_a_spare_constructs_ddp_while_the_others_train(killed, where, has_session, tmp_path):
    halves = 7 if has_session else 1000  # without a session, a process that joins has a new scheduler
    env = {"SESSION": str(tmp_path / "ckpt")} if has_session else {}
    result, found = train(
        tmp_path, "-np", 2, "--spares", 1, KILL=killed, WHERE=where, DDP="{}", HALVES=str(halves), **env
    )
    check(result, found, 2, halves)
    assert "2 ranks go on, 1 of them new" in result.err, result.text


@pytest.mark.parametrize("what", ["inner module", *(pytest.param(each, marks=full) for each in ("new_group", "FSDP"))])
def test_refusals(what, tmp_path):
    code = """if True:
        import sys, torch, torch.distributed as dist, allred
        allred.init(banner=False)
        dist.init_process_group("allred")
        net = torch.nn.Linear(3, 2)
        if sys.argv[1] == "new_group":
            dist.new_group([0])
        if sys.argv[1] == "FSDP":
            from torch.distributed.fsdp import fully_shard
            fully_shard(net)
        else:
            ddp = torch.nn.parallel.DistributedDataParallel(net)
        opt = allred.distributed(torch.optim.SGD(net.parameters(), lr=0.1))
        opt.allred.broadcast(net)
    """
    (tmp_path / "program.py").write_text(code)
    command = [sys.executable, "-m", "allred", "run", "--elastic", "-np", 1, "program.py", what]
    result = run(command, 60, {"XDG_RUNTIME_DIR": str(tmp_path)}, cwd=tmp_path)
    expected = {
        "inner module": "without that (pass this DDP itself to broadcast or track) cannot be used",
        "new_group": "groups beside the default group cannot be used with `allred run --elastic`",
        "FSDP": "parameters that FSDP splits over the ranks (a death loses a part of them) cannot be used",
    }[what]
    assert result.code == 1, result.text
    assert expected in result.err, result.text

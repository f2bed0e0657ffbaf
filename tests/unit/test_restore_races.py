"""Restores while another job replaces or deletes checkpoints, and damage that only one rank sees."""

import shutil
import socket

import numpy as np
import pytest

import allred
from allred import checkpoint, testing


def save(directory, step, value):
    unfinished = checkpoint.begin(directory, step)
    shard = checkpoint.write_shard(unfinished, 0, 1, [checkpoint.whole("w", np.full(3, value))])
    state = allred.optim.SGD(lr=0.1).state_dict()
    state.pop("slots")
    return checkpoint.commit(unfinished, step, [shard], {"optimizer": {**state, "global_step": step}})


def restore(directory):
    opt, params = allred.distributed(allred.optim.SGD(lr=0.1)), {"w": np.zeros(3)}
    step = opt.restore(directory, params)
    return step, params["w"].tolist()


@pytest.fixture
def meanwhile(monkeypatch):
    """Calls a function once: after rank 0 has read a checkpoint, and before rank 1 does."""
    read, calls = checkpoint.read_committed, []

    def read_late(path):
        if allred.rank() == 0:
            content = read(path)
            if calls:
                calls.pop()(path)
            allred.barrier()
            return content
        allred.barrier()
        return read(path)

    monkeypatch.setattr(checkpoint, "read_committed", read_late)
    return calls


def test_a_checkpoint_that_is_replaced_meanwhile(tmp_path, meanwhile):
    save(tmp_path, 1, 1.0)
    meanwhile.append(lambda path: save(tmp_path, 1, 7.0))
    assert testing.threads(2, restore, tmp_path) == [(1, [7.0] * 3)] * 2


def test_a_checkpoint_that_is_deleted_meanwhile(tmp_path, meanwhile, capfd):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 2.0)
    meanwhile.append(shutil.rmtree)
    assert testing.threads(2, restore, tmp_path) == [(1, [1.0] * 3)] * 2
    assert "skipped" not in capfd.readouterr().err


def test_damage_that_only_another_rank_sees(tmp_path, monkeypatch, capfd):
    save(tmp_path, 1, 1.0)
    newest, read = save(tmp_path, 2, 2.0), checkpoint.read_committed

    def read_with_damage(path):
        if allred.rank() == 1 and path == newest:
            raise allred.CheckpointError(f"{path} is damaged")
        return read(path)

    monkeypatch.setattr(checkpoint, "read_committed", read_with_damage)
    assert testing.threads(2, restore, tmp_path) == [(1, [1.0] * 3)] * 2
    where = f"(rank 1 on {socket.gethostname()})"
    text = f"a newer checkpoint, which is damaged, is skipped: {newest} is damaged {where}"
    assert text in capfd.readouterr().err


def test_no_checkpoint_that_all_ranks_can_read(tmp_path, monkeypatch):
    save(tmp_path, 1, 1.0)
    read = checkpoint.read_committed
    monkeypatch.setattr(checkpoint, "read_committed", lambda path: read(path / "x" if allred.rank() else path))
    with pytest.raises(
        allred.CheckpointError, match=r"no checkpoint in .* can be read; the newest one: .*\(rank 1 on "
    ):
        testing.threads(2, restore, tmp_path)

"""Sync on parameter servers: examples of tokens, as in SyncReplicasOptimizer. All else: test_consistency.py."""

from allred.ps.consistency import Sync


def give(machine, *workers):
    """Each has its gradient accepted and done."""
    for worker in workers:
        assert machine.begin(worker)
        machine.done(worker)


def test_sync_a_worker_may_take_several_tokens_of_a_step():
    machine = Sync(2).coordinator(3)
    give(machine, 0, 1)
    machine.ready()
    give(machine, 0)
    assert machine.ready() == [(0, 1)]  # the token that the slow worker 2 did not come for
    give(machine, 0)
    assert machine.global_step == 2
    assert not machine.begin(1)
    assert machine.ready() == [(0, 2), (1, 2)]
    assert machine.accepted == [3, 1, 0]


def test_sync_with_more_gradients_than_workers_starts_with_the_missing_tokens():
    machine = Sync(3).coordinator(2)
    assert (machine.needed, machine.issued) == (3, 1)
    give(machine, 0)
    assert machine.ready() == [(0, 0)]
    give(machine, 1)
    assert machine.ready() == []
    give(machine, 0)
    assert (machine.global_step, machine.issued) == (1, 4)
    assert machine.ready() == [(1, 1), (0, 1)]
    give(machine, 0)
    assert machine.ready() == [(0, 1)]


def test_sync_tokens_of_a_past_step_are_void():
    """One worker of five does all the work. With TensorFlow's queue four of five of its gradients would be dropped."""
    machine = Sync(1).coordinator(5)
    for step in range(1, 50):
        give(machine, 0)
        assert machine.ready() == [(0, step)]
    assert (machine.global_step, machine.issued) == (49, 49 * 5)
    for worker in (1, 2, 3, 4):
        assert not machine.begin(worker)
    assert machine.ready() == [(1, 49), (2, 49), (3, 49), (4, 49)]  # tokens of the step; worker 0 holds the fifth


def test_sync_tokens_follow_the_live_workers():
    machine = Sync(1).coordinator(4)
    machine.leave(3)
    give(machine, 0)
    assert machine.issued == 3
    machine.leave(2)  # before anybody has taken one
    machine.leave(1)
    for worker_gives in range(5):
        assert machine.ready() == [(0, 1 + worker_gives)]
        give(machine, 0)
    assert machine.issued == 3 + 5


def test_sync_a_leaving_worker_removes_its_token_if_it_is_not_needed():
    """Else another would give two gradients of the step, and a third worker's would be dropped."""
    machine = Sync(2).coordinator(3)
    give(machine, 0, 1)
    assert not machine.begin(2)
    machine.leave(1)  # the step has ended, and nobody has been told
    assert machine.ready() == [(0, 1), (2, 1)]
    give(machine, 0)
    assert machine.ready() == []
    give(machine, 2)
    assert machine.global_step == 2


def test_sync_backup_workers_keep_their_tokens_when_another_leaves():
    machine = Sync(3).coordinator(5)
    give(machine, 0, 1, 2)
    assert machine.ready() == [(0, 1), (1, 1), (2, 1)]
    machine.leave(4)  # 3 and 4 have not come for their tokens
    give(machine, 0, 1)
    assert machine.ready() == [(0, 1)]  # with that of 3; that of 4 is gone
    assert machine.begin(2)
    assert not machine.begin(0)
    assert not machine.begin(3)
    machine.leave(2)
    assert machine.ready() == [(1, 1)]  # three live, two have given
    give(machine, 1)
    assert (machine.global_step, machine.issued) == (2, 5 + 3)
    assert machine.ready() == [(0, 2), (3, 2), (1, 2)]


def test_sync_a_leave_takes_no_token_from_another_worker():
    machine = Sync(4).coordinator(5)
    give(machine, 0, 1, 2, 3)
    machine.ready()
    give(machine, 0)
    assert machine.ready() == [(0, 1)]  # all five tokens are held or used
    machine.leave(4)  # and for four workers there would be four
    give(machine, 1, 2)
    assert machine.ready() == []
    give(machine, 3)
    assert machine.ready() == [(1, 2), (2, 2), (3, 2)]

"""Sync on parameter servers: the rules of TensorFlow's SyncReplicasOptimizer, and what becomes of who leaves."""

from allred.ps.consistency import Sync


def give(machine, *workers):
    """Each has its gradient accepted and done."""
    for worker in workers:
        assert machine.begin(worker)
        machine.done(worker)


def test_sync_takes_one_gradient_of_each_worker_and_all_continue_together():
    machine = Sync().coordinator(3)
    assert (machine.asks, machine.waits, machine.needed, machine.issued) == (True, True, 3, 0)
    give(machine, 2, 0)
    assert (machine.ready(), machine.global_step) == ([], 0)
    assert machine.begin(1)
    assert (machine.ready(), machine.global_step) == ([], 0)  # not yet in at all servers
    machine.done(1)
    assert (machine.global_step, machine.issued) == (1, 3)
    assert machine.ready() == [(2, 1), (0, 1), (1, 1)]
    assert (machine.accepted, machine.dropped) == ([1, 1, 1], [0, 0, 0])


def test_sync_drops_the_gradient_of_a_backup_worker():
    machine = Sync(2).coordinator(3)
    give(machine, 0, 1)
    assert machine.ready() == [(0, 1), (1, 1)]
    assert not machine.begin(2)  # local step 0, global step 1
    assert machine.ready() == [(2, 1)]  # it is not punished further
    give(machine, 2)
    assert (machine.accepted, machine.dropped, machine.issued) == ([1, 1, 1], [0, 0, 1], 3)


def test_sync_accepts_no_more_than_needed_and_dropped_workers_wait():
    machine = Sync(2).coordinator(4)
    give(machine, 0, 1)
    assert machine.ready() == [(0, 1), (1, 1)]  # of four tokens
    assert machine.begin(0)
    assert machine.begin(1)
    assert not machine.begin(3)
    machine.done(0)
    assert machine.ready() == []  # though two tokens are left: the step has its gradients
    machine.done(1)
    assert machine.global_step == 2
    assert machine.ready() == [(3, 2), (0, 2), (1, 2)]
    assert machine.dropped == [0, 0, 0, 1]


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


def test_sync_with_all_live_workers_shrinks_and_the_step_ends():
    machine = Sync().coordinator(3)
    give(machine, 0, 2)
    machine.leave(1)  # the only one missing
    assert (machine.needed, machine.global_step, machine.issued) == (2, 1, 2)
    assert machine.ready() == [(0, 1), (2, 1)]


def test_sync_a_gradient_stays_in_the_step_when_its_worker_finishes():
    machine = Sync().coordinator(3)
    give(machine, 0)
    machine.leave(0)
    assert machine.needed == 3
    give(machine, 1, 2)
    assert (machine.global_step, machine.accepted, machine.needed) == (1, [1, 1, 1], 2)


def test_sync_the_last_step_ends_when_all_have_finished():
    machine = Sync().coordinator(2)
    give(machine, 0)
    machine.leave(0)
    machine.leave(1)
    assert (machine.global_step, machine.needed) == (1, 0)
    nobody = Sync().coordinator(1)
    nobody.leave(0)
    assert nobody.global_step == 0


def test_sync_survivors_give_several_when_a_token_holder_leaves():
    """tensorflow issues 20342, 11660: this hangs there."""
    machine = Sync(3).coordinator(3)
    give(machine, 0)
    machine.leave(1)
    assert machine.ready() == [(0, 0)]
    give(machine, 2)
    machine.leave(2)
    assert machine.needed == 3
    give(machine, 0)
    assert (machine.global_step, machine.accepted) == (1, [2, 0, 1])
    for _ in range(3):
        assert machine.ready() == [(0, 1)]
        give(machine, 0)
    assert machine.global_step == 2


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


def test_sync_withdraws_what_is_not_known_to_have_arrived():
    machine = Sync(2).coordinator(4)
    assert machine.begin(0)
    assert machine.begin(1)
    assert not machine.begin(2)  # the step has its two
    assert not machine.begin(3)
    machine.leave(1)
    assert machine.accepted == [1, 0, 0, 0]
    assert machine.ready() == [(2, 0), (3, 0)]  # one of them is needed after all; who comes first
    machine.done(0)
    give(machine, 3)
    assert (machine.global_step, machine.accepted, machine.dropped) == (1, [1, 0, 0, 1], [0, 0, 1, 1])


def test_sync_counts_what_has_arrived_everywhere():
    machine = Sync(2).coordinator(3)
    give(machine, 0)
    assert machine.begin(1)
    machine.leave(1, sent=True)
    assert (machine.global_step, machine.accepted, machine.live) == (1, [1, 1, 0], {0, 2})
    assert machine.ready() == [(0, 1)]


def test_sync_of_all_live_workers_withdraws_too():
    machine = Sync().coordinator(3)
    give(machine, 0, 2)
    assert machine.begin(1)
    machine.leave(1)
    assert (machine.global_step, machine.accepted) == (1, [1, 0, 1])
    assert machine.ready() == [(0, 1), (2, 1)]

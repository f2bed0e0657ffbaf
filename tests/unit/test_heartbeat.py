"""The message that a host is unreachable, and that it answers again."""

from allred.watch.heartbeat import Heartbeat


def test_silence_is_reported_once_and_its_end_too():
    heartbeat = Heartbeat(now=10.0, limit_s=60, host="b")
    heartbeat.ranks |= {2, 3}
    assert heartbeat.heard(12.0) == heartbeat.check(16.9) == ""
    assert heartbeat.check(17.0).startswith("host b (ranks 2-3) has been unreachable for 5 s: ")
    assert heartbeat.check(18.0) == ""
    assert heartbeat.heard(20.0) == "host b (ranks 2-3) answers again, after 8 s"
    assert heartbeat.heard(21.0) == heartbeat.check(25.0) == ""
    assert "within 60 s (ALLRED_TIMEOUT_S, at least 10)" in heartbeat.check(26.0)


def test_a_host_is_lost_at_the_time_limit_but_not_before_10_s():
    heartbeat = Heartbeat(now=0.0, limit_s=60, host="b")
    assert not heartbeat.is_lost(59.9)
    assert heartbeat.is_lost(60.0)
    assert heartbeat.lost(60.0).startswith("host b has been unreachable for 60 s: ")
    heartbeat.heard(60.0)
    assert not heartbeat.is_lost(119.0)
    assert [Heartbeat(now=0.0, limit_s=1).is_lost(now) for now in (9.9, 10.0)] == [False, True]

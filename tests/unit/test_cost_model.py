"""python -m allred model: units, properties of the formulas, and the output of the command."""

import itertools

import pytest

from allred.cost_model import command, costs, measurement, units
from allred.cost_model.costs import ALGORITHMS, Machine, flat_ring, two_level_recursive, two_level_ring

FAST = Machine(5e-6, 12.5e9)
SLOW = Machine(1e-3, 12.5e6)
WIRE = Machine(0.0, 1e6, overhead_s=0.0, python_s=0.0)  # only the wire takes time
HOSTS = [1, 2, 3, 4, 5, 6, 7, 8, 16, 100, 512]
SIZES = [0, 4, 2**11, 2**14 + 4, 2**16, 2**20, 2**20 + 4, 10**8]


@pytest.mark.parametrize("text", ["", "5", "us", "5 Us", "-5us", "1e999us", "nanus", "1.2.3us", "5us 5us"])
def test_wrong_units_are_refused(text):
    with pytest.raises(ValueError, match="expected a number and one of ns, us, ms, s, got"):
        units.parse(text, units.TIMES)


def test_microseconds_have_three_spellings():
    assert len({units.parse(f"5{unit}", units.TIMES) for unit in ("us", "\u00b5s", "\u03bcs")}) == 1


@pytest.mark.parametrize("value", [1e-9, 5e-6, 0.2, 1.0, 3600.0])
def test_a_shown_time_can_be_given_again(value):
    assert units.parse(units.show(value, units.TIMES), units.TIMES) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_rank_communicates_nothing(name):
    cost = ALGORITHMS[name](1, 1, 10**8, WIRE)
    assert (cost.latency_s, cost.wire_s) == (0, 0)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_host_needs_no_network(name, ranks):
    far, near = Machine(1.0, 1.0), Machine(0.0, 1e12)
    assert ALGORITHMS[name](1, ranks, 10**8, far) == ALGORITHMS[name](1, ranks, 10**8, near)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("machine", [FAST, SLOW])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_more_bytes_take_no_less_time(name, machine, hosts, ranks):
    for sizes in ([4, 100, 2**11], [2**14 + 4, *SIZES[4:]]):  # with the headers; in windows
        found = [ALGORITHMS[name](hosts, ranks, nbytes, machine) for nbytes in sizes]
        for less, more in itertools.pairwise(found):
            assert less.total_s <= more.total_s * (1 + 1e-9)
            assert less.wire_s <= more.wire_s * (1 + 1e-9)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_time_is_at_least_that_of_each_resource(name, hosts):
    for nbytes, machine in itertools.product(SIZES, [FAST, SLOW]):
        cost = ALGORITHMS[name](hosts, 4, nbytes, machine)
        assert cost.total_s >= max(cost.latency_s, cost.wire_s, cost.memory_s, cost.python_s) * (1 - 1e-9)


@pytest.mark.parametrize("hosts", [2, 3, 4, 6, 8, 60, 64])
def test_the_recursive_exchange_sends_the_bytes_of_the_ring(hosts):
    ring, recursive = (function(hosts, 2, 2**26, WIRE) for function in (two_level_ring, two_level_recursive))
    assert ring.wire_s == pytest.approx(recursive.wire_s)
    payload_s = 2 * (hosts - 1) / hosts * 2**26 / WIRE.payload_bytes_per_s
    assert ring.wire_s == pytest.approx(payload_s, rel=1e-3)  # and the headers
    assert [ring.total_s, recursive.total_s] == pytest.approx([payload_s] * 2, rel=1e-3)


def test_eleven_hosts_are_ten_and_one_that_takes_part_through_another():
    assert costs.levels(11) == ([2, 5], True)
    sent = two_level_recursive(11, 1, 2**24, WIRE).wire_s * WIRE.payload_bytes_per_s
    assert sent == pytest.approx((2 * 9 / 10 + 1) * 2**24, rel=1e-3)
    messages, one = len(costs.header_messages(11)), Machine(1.0, 1e12, overhead_s=0.0, python_s=0.0)
    assert two_level_recursive(11, 1, 2**16, one).total_s == pytest.approx(messages + 2 + 2 * 2, rel=1e-3)


@pytest.mark.parametrize(
    ("hosts", "messages"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 1), (8, 3), (11, 4), (512, 9), (1000, 6)]
)
def test_small_sums_take_one_message_for_each_level(hosts, messages):
    assert len(costs.header_messages(hosts)) == messages
    assert two_level_ring(hosts, 8, 4, SLOW) == two_level_recursive(hosts, 8, 4, SLOW)


@pytest.mark.parametrize("machine", [FAST, SLOW])
@pytest.mark.parametrize("hosts", [2, 8, 512])
@pytest.mark.parametrize("nbytes", [4, 2**14])
def test_the_flat_ring_is_slower_with_many_ranks_and_few_bytes(machine, hosts, nbytes):
    two_level = min(function(hosts, 8, nbytes, machine).total_s for function in (two_level_ring, two_level_recursive))
    assert two_level < flat_ring(hosts, 8, nbytes, machine).total_s


def test_a_ring_with_large_blocks_hides_the_latency_of_all_steps_but_the_last():
    far = Machine(1e-3, WIRE.link_bytes_per_s, overhead_s=0.0, python_s=0.0)
    headers = len(costs.header_messages(4))
    assert two_level_ring(4, 1, 2**22, far).total_s - two_level_ring(4, 1, 2**22, WIRE).total_s == pytest.approx(
        (headers + 1) * 1e-3
    )


@pytest.mark.parametrize(
    ("hosts", "ranks", "most"), [(2, 1, 0), (3, 1, 2**16), (8, 1, 2**18), (8, 2, 2**19), (11, 1, 7 * 2**15)]
)
def test_allred_uses_the_ring_for_more_bytes_than_csrc_network_schedule(hosts, ranks, most):
    assert costs.algorithm_used(hosts, ranks, most) == "two-level recursive"
    assert costs.algorithm_used(hosts, ranks, most + 4) == "two-level ring"


def test_the_sizes_of_windows_are_the_ones_of_the_backend():
    from allred.comm.backends import tcp

    for hosts, ranks in itertools.product(HOSTS, [1, 2, 8]):
        assert costs.window_bytes(hosts, ranks) == tcp.window_bytes([[0] * ranks] * hosts)


ISSUE = ["--hosts", "512", "--ranks", "8", "--link", "100Gbit/s", "--latency", "5us", "--set", "resnet50"]


def test_the_command_shows_costs_winners_and_what_limits(capsys):
    assert command.main(ISSUE) == 0
    out = capsys.readouterr().out
    assert out.startswith("resnet50 (97.5 MiB in 161 tensors) on 512 hosts with 8 ranks each\n")
    table = out.split("\n\n")[1].splitlines()
    assert table[0].split() == ["time", "latency", "wire", "memory", "Python", "limit"]
    limits = {line[:20].strip(): line.split()[-1] for line in table[1:]}
    assert limits == {"flat ring": "latency", "two-level ring": "latency", "two-level recursive": "memory"}
    assert "fastest by size:\n  two-level recursive  from 4 B to " in out
    assert "fastest for resnet50 (97.5 MiB in 161 tensors): two-level recursive; memory limits it\n" in out
    assert "allred uses: two-level recursive\n" in out
    assert "an efficiency of 90% needs " in out


def test_the_efficiency_with_a_time_of_computation(capsys):
    assert command.main([*ISSUE, "--compute", "100ms", "--set", "4B"]) == 0
    assert "efficiency with 100 ms of computation: 99.8%, with overlap 100.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--link", "100", "argument --link: expected a number and one of B/s, "),
        ("--link", "0bit/s", "argument --link: expected more than 0, got '0bit/s'"),
        ("--latency", "5", "argument --latency: expected a number and one of ns, us, ms, s, got '5'"),
        ("--hosts", "1025", "argument --hosts: allred has at most 1024 hosts, and as many ranks on each, got '1025'"),
        ("--packet", "52", "argument --packet: expected more than 52, the bytes of IP and TCP headers, got '52'"),
        ("--hosts", "0", "argument --hosts: expected a whole number > 0, got '0'"),
        ("--set", "vgg", "--set: expected resnet50, transformer, small, or a size such as 64MiB, got 'vgg'"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(option, value, message, capsys):
    assert command.main([*ISSUE, option, value]) == 2
    err = capsys.readouterr().err
    assert f"python -m allred model: {message}" in err
    assert err.count("\n") == 1


def test_measured_constants_are_printed_as_options_and_can_be_given_again(capsys, monkeypatch):
    found = {"overhead_s": 7e-6, "stream_bytes_per_s": 7.5e9, "copy_bytes_per_s": 25e9, "sum_bytes_per_s": 26e9}
    monkeypatch.setattr(measurement, "measure", lambda ranks: {**found, "python_s": 50e-6})
    assert command.main([*ISSUE, "--measure"]) == 0
    first, rest = capsys.readouterr().out.split("\n\n", 1)
    options = first.removeprefix("measured on this host: ")
    assert options == "--overhead 7us --stream 7.5GB/s --copy 25GB/s --sum 26GB/s --python 50us"
    assert command.main([*ISSUE, *options.split()]) == 0
    assert capsys.readouterr().out == rest


def test_the_constants_of_this_host_are_plausible():
    found = {
        "overhead_s": measurement._overhead_s(), "stream_bytes_per_s": measurement._stream_bytes_per_s(),
        "copy_bytes_per_s": measurement._memory_bytes_per_s(1, lambda window, piece: window.__setitem__(..., piece)),
    }  # fmt: skip
    assert 1e-7 < found["overhead_s"] < 0.1
    assert found["stream_bytes_per_s"] > 1e7
    assert found["copy_bytes_per_s"] > 1e8

"""Properties of placements over random sets of tensors, TensorFlow's rules on examples made by hand, and the errors."""

import os
import subprocess
import sys

import numpy as np
import pytest

from allred.bench.verify import SETS
from allred.errors import InputError
from allred.fusion import Tensor
from allred.ps.placement import SMALL_BYTES, Piece, Placement, place

F4 = np.dtype("float32")
DTYPES = [np.dtype(name) for name in ("uint8", "float16", "float32", "float64")]
TABLE = [Tensor("table", (100_000, 128), F4), *(Tensor(f"w{i}", (250, 256), F4) for i in range(40))]  # 83 % in one


def random_tensors(rng):
    """Empty, 0-d, tiny and up to 8 MB, in all orders; a few of them far larger than the others."""
    shapes = [tuple((rng.integers(0, 40, size=rng.integers(0, 4))).tolist()) for _ in range(rng.integers(0, 40))]
    shapes += [(int(10 ** rng.uniform(3, 6)),) for _ in range(rng.integers(0, 6))]
    rng.shuffle(shapes)
    return [Tensor(f"t{i}", shape, DTYPES[rng.integers(4)]) for i, shape in enumerate(shapes)]


def some_ways(rng, tensors, servers):
    named = {tensor.name: int(rng.integers(servers)) for tensor in tensors if rng.random() < 0.2}
    return ["bytes", "round_robin", "greedy", named, lambda tensor: tensor.elements % servers]


def nbytes(tensor):
    return tensor.elements * tensor.dtype.itemsize


def sized(*sizes):
    return [Tensor(f"t{i}", (size,), np.dtype("uint8")) for i, size in enumerate(sizes)]


def servers_of(placement):
    """The server of each tensor; all are whole."""
    assert [piece.tensor for piece in placement.pieces] == list(range(len(placement.tensors)))
    return [piece.server for piece in placement.pieces]


@pytest.mark.parametrize("seed", range(60))
def test_every_element_is_in_one_piece(seed):
    rng = np.random.default_rng(seed)
    tensors, servers = random_tensors(rng), int(rng.integers(1, 10))
    for how in some_ways(rng, tensors, servers):
        for split in (True, False):
            placement = place(tensors, servers, how, split)
            counts = [np.zeros(tensor.elements, int) for tensor in tensors]
            for piece in placement.pieces:
                assert 0 <= piece.start <= piece.stop <= tensors[piece.tensor].elements
                assert 0 <= piece.server < servers
                counts[piece.tensor][piece.start : piece.stop] += 1
            assert all((count == 1).all() for count in counts)
            assert {piece.tensor for piece in placement.pieces} == set(range(len(tensors)))
            keys = [(piece.tensor, piece.start) for piece in placement.pieces]
            assert keys == sorted(set(keys))  # in order; an empty tensor has one piece, no other has an empty one
            assert sum(placement.loads[server] for server in range(servers)) == sum(map(nbytes, tensors))
            by_server = [piece for server in range(servers) for piece in placement.of(server)]
            assert sorted(by_server, key=lambda piece: (piece.tensor, piece.start)) == list(placement.pieces)
            if how in ("round_robin", "greedy") or callable(how) or not split:
                assert len(placement.pieces) == len(tensors)


@pytest.mark.parametrize("seed", range(60))
def test_cuts_are_few_spare_small_tensors_and_balance(seed):
    """What the module's docstring promises."""
    rng = np.random.default_rng(seed)
    tensors, servers = random_tensors(rng), int(rng.integers(1, 10))
    placement = place(tensors, servers)
    mean = sum(map(nbytes, tensors)) / servers
    slack = max(SMALL_BYTES, 0.02 * mean)
    assert max(placement.loads[server] for server in range(servers)) <= mean + slack + 1
    assert len(placement.pieces) - len(tensors) <= servers - 1
    for index, tensor in enumerate(tensors):
        parts = [piece for piece in placement.pieces if piece.tensor == index]
        assert len(parts) == 1 or nbytes(tensor) > SMALL_BYTES
        assert len({piece.server for piece in parts}) == len(parts)
        if len(parts) > 1:  # and no part is a sliver
            *firsts, last = [(piece.stop - piece.start) * tensor.dtype.itemsize for piece in parts]
            assert min(firsts) > SMALL_BYTES / servers - tensor.dtype.itemsize
            assert last > SMALL_BYTES


@pytest.mark.parametrize("seed", range(30))
def test_named_tensors_are_where_they_were_put_and_the_others_around_them(seed):
    rng = np.random.default_rng(seed)
    tensors, servers = random_tensors(rng), int(rng.integers(2, 7))
    named = {tensor.name: int(rng.integers(servers)) for tensor in tensors if rng.random() < 0.3}
    placement = place(tensors, servers, named)
    given = [0] * servers
    for piece in placement.pieces:
        tensor = tensors[piece.tensor]
        if tensor.name in named:
            assert piece == Piece(piece.tensor, 0, tensor.elements, named[tensor.name])
            given[piece.server] += nbytes(tensor)
    mean = sum(map(nbytes, tensors)) / servers
    slack = max(SMALL_BYTES, 0.02 * mean) + 1
    assert len(placement.pieces) - len(tensors) <= servers - 1
    took = [placement.loads[server] for server in range(servers) if placement.loads[server] > given[server]]
    if took:  # who took any of the others has no more than the emptiest, and the slack
        assert max(took) <= min(placement.loads[server] for server in range(servers)) + servers * slack
    if max(given) <= mean:
        assert max(placement.loads[server] for server in range(servers)) <= mean + slack


def test_a_server_with_more_than_its_share_gets_no_more_and_the_others_are_even():
    placement = place(TABLE, 4, {"table": 2})
    assert [piece.tensor for piece in placement.of(2)] == [0]
    assert {placement.loads[server] for server in (0, 1, 3)} == {13 * 256_000, 14 * 256_000}


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize(("name", "limit"), [("resnet50", 0.001), ("transformer", 0.01)])
def test_real_models_are_balanced_without_a_cut(name, limit, servers):
    tensors = [Tensor(f"p{i}", shape, F4) for i, shape in enumerate(SETS[name]())]
    placement = place(tensors, servers)
    assert placement.imbalance < limit
    assert len(placement.pieces) == len(tensors)


def test_bert_on_eight_servers_has_its_word_embeddings_on_two():
    tensors = [Tensor(f"p{i}", shape, F4) for i, shape in enumerate(SETS["transformer"]())]
    placement = place(tensors, 8)
    assert placement.imbalance < 0.02
    assert [piece.server for piece in placement.pieces if piece.tensor == 0] == [0, 1]
    assert len(placement.pieces) == len(tensors) + 2
    assert place(tensors, 8, split=False).imbalance > 0.7


def test_one_large_table_is_split_over_all_servers():
    """Where TensorFlow's rules send 82 % of the traffic to one of four (tensorflow/tensorflow#24953)."""
    assert place(TABLE, 4, "round_robin").imbalance > 0.82 * 4 - 1
    assert place(TABLE, 4, "greedy").imbalance > 0.82 * 4 - 1
    placement = place(TABLE, 4)
    assert placement.imbalance < 0.001
    assert {piece.server for piece in placement.pieces if piece.tensor == 0} == {0, 1, 2, 3}
    assert len(placement.pieces) == len(TABLE) + 3


def test_round_robin_takes_no_account_of_size():
    assert servers_of(place(sized(9, 0, 1, 5, 7), 2, "round_robin")) == [0, 1, 0, 1, 0]
    resnet50 = [Tensor(f"p{i}", shape, F4) for i, shape in enumerate(SETS["resnet50"]())]
    assert place(resnet50, 3, "round_robin").imbalance > 1.9  # convolution, weight, bias: server 0 has all convolutions


def test_greedy_takes_tensors_in_order_and_the_first_of_equal_servers():
    #             loads: 5 0 0, 5 3 0, 5 3 3, 5 4 3, 5 4 7, 5 6 7
    assert servers_of(place(sized(5, 3, 3, 1, 4, 2), 3, "greedy")) == [0, 1, 2, 1, 2, 1]
    assert servers_of(place(sized(1, 1, 1, 1), 3, "greedy")) == [0, 1, 2, 0]
    assert servers_of(place(sized(0, 0, 2), 2, "greedy")) == [0, 0, 0]
    shapes = [Tensor("a", (3,), np.dtype("f8")), Tensor("b", (5,), np.dtype("f4")), Tensor("c", (), F4)]
    assert servers_of(place(shapes, 2, "greedy")) == [0, 1, 1]  # 24, 20 and 4 bytes


def test_whole_tensors_are_placed_largest_first_on_the_least_loaded():
    sizes = [1 << 20, 5 << 20, 3 << 20, 3 << 20, 2 << 20]
    assert servers_of(place(sized(*sizes), 2, split=False)) == [1, 0, 1, 1, 0]


def test_a_function_is_asked_once_for_each_tensor():
    asked = []

    def last_digit(tensor):
        asked.append(tensor)
        return np.int64(tensor.name[-1])

    placement = place(sized(1, 2, 3), 3, last_digit)
    assert servers_of(placement) == [0, 1, 2]
    assert asked == list(placement.tensors)
    assert all(type(piece.server) is int for piece in placement.pieces)
    assert "last_digit" in placement.how
    assert "0x" not in place(sized(1), 3, CallableObject()).how  # an address would differ from rank to rank


class CallableObject:
    def __call__(self, tensor):
        return 0


def test_no_tensors_and_no_elements():
    assert place([], 3).pieces == ()
    assert place([], 3).imbalance == 0
    assert place([], 3).report().startswith("0 tensors, 0 B, on 3 servers")
    empty = [Tensor("a", (0, 5), F4), Tensor("b", (), F4)]
    assert place(empty, 2).pieces == (Piece(0, 0, 0, 1), Piece(1, 0, 1, 0))
    assert place(empty[:1], 2).imbalance == 0


def test_the_fingerprint_depends_on_every_field():
    base = place(TABLE, 4)
    others = [
        place(TABLE, 3),
        place(TABLE, 4, "greedy"),
        place(TABLE[:-1], 4),
        place([TABLE[0]._replace(name="tables"), *TABLE[1:]], 4),
        place([TABLE[0]._replace(shape=(128, 100_000)), *TABLE[1:]], 4),
        place([TABLE[0]._replace(dtype=np.dtype("int32")), *TABLE[1:]], 4),
        place([TABLE[0]._replace(dtype=np.dtype(">f4")), *TABLE[1:]], 4),
        Placement(base.tensors, 4, (*base.pieces[:-1], Piece(40, 0, 64_000, 0)), base.how),
        Placement(base.tensors, 4, base.pieces, "otherwise"),
    ]
    prints = {placement.fingerprint for placement in [base, *others]}
    assert len(prints) == 1 + len(others)
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in prints)
    # Names cannot be made to look like a boundary.
    assert place([Tensor('a", "b', (), F4)], 1).fingerprint != place([Tensor("a", (), F4)] * 2, 1).fingerprint
    assert place(list(TABLE), 4).fingerprint == base.fingerprint


def test_another_process_with_another_hash_seed_finds_the_same():
    code = (
        "import numpy as np; from allred.bench.verify import SETS; from allred.fusion import Tensor\n"
        "from allred.ps.placement import place\n"
        "tensors = [Tensor(f'p{i}', shape, np.dtype('f4')) for i, shape in enumerate(SETS['transformer']())]\n"
        "ways = ['bytes', 'round_robin', 'greedy', {'p3': 1, 'p0': 7}, lambda tensor: len(tensor.name)]\n"
        "print([place(tensors, 9, how).fingerprint for how in ways])\n"
    )
    found = set()
    for seed in ("1", "2", "3"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        found.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert len(found) == 1


def test_the_report_lists_the_tensors_of_each_server():
    assert place(TABLE, 4).report().splitlines() == [
        "41 tensors, 61.44 MB, on 4 servers, by bytes; imbalance 0.0%, 1 split",
        "server 0: 0 tensors, 1 part, 15.36 MB, 25.0%",
        "server 1: 0 tensors, 1 part, 15.36 MB, 25.0%",
        "server 2: 0 tensors, 1 part, 15.36 MB, 25.0%",
        "server 3: 40 tensors, 1 part, 15.36 MB, 25.0%",
        "split: 'table' float32 (100000, 128) in 4: 15.36 MB on 0, 15.36 MB on 1, 15.36 MB on 2, 5.12 MB on 3",
    ]
    assert place(TABLE, 2, {"w3": 1}).report().startswith("41 tensors, 61.44 MB, on 2 servers, 1 by name, 40 by bytes;")
    assert place(TABLE, 1).report().splitlines()[1:] == ["server 0: 41 tensors, 61.44 MB, 100.0%"]


def test_the_report_stays_short():
    many = [Tensor(f"t{i}", (200_000 + i,), F4) for i in range(1000)]
    lines = place(many, 3000).report().splitlines()
    assert len(lines) == 13
    assert lines[8].startswith("2993 others: ")
    assert lines[9].startswith("split: 't999' float32 (200999,) in 3: ")
    fullest = place(sized(*range(1, 31)), 30, lambda tensor: tensor.elements - 1).report().splitlines()
    assert [line.split(":")[0] for line in fullest[1:]] == [*(f"server {i}" for i in range(23, 30)), "23 others"]


def test_a_thousand_tensors_are_dealt_evenly():
    tensors = [Tensor(f"p{i}", shape, F4) for i, shape in enumerate(SETS["small"]())]
    assert [len(place(tensors, 4).of(server)) for server in range(4)] == [250] * 4


@pytest.mark.parametrize("servers", [0, -1, 1.0, True, "2", None])
def test_servers_is_a_positive_whole_number(servers):
    with pytest.raises(InputError, match=r"place: servers must be an integer >= 1, but is .*; pass"):
        place(TABLE, servers)


@pytest.mark.parametrize("how", ["byte", "", None, 3, ["bytes"]])
def test_an_unknown_way_lists_the_known(how):
    with pytest.raises(InputError, match=r"must be 'bytes', 'round_robin', 'greedy', a function .* or a dict"):
        place(TABLE, 2, how)


def test_a_name_that_no_tensor_has_suggests_near_ones():
    with pytest.raises(InputError, match=r"place: no tensor has the name 'tabel'; did you mean 'table'\?"):
        place(TABLE, 2, {"w1": 0, "tabel": 0})
    with pytest.raises(InputError, match=r"no tensor has the name None; the tensors are 'table', 'w0', .* \.\.\.$"):
        place(TABLE, 2, {None: 0})
    with pytest.raises(InputError, match=r"the tensors are 't0', 't1'$"):
        place(sized(1, 2), 2, {"embedding": 0})


@pytest.mark.parametrize("index", [-1, 4, 1.0, True, np.True_, "1", None])
def test_an_index_is_a_server(index):
    expected = r"on server .*, but the servers are 0 to 3; give one of these, as an int"
    with pytest.raises(InputError, match=f"place: the dict places 'w1' {expected}"):
        place(TABLE, 4, {"w0": 1, "w1": index})
    with pytest.raises(InputError, match=rf"function .*<lambda> places 'table' float32 \(100000, 128\) {expected}"):
        place(TABLE, 4, lambda tensor: index)


def test_the_error_of_a_function_names_the_tensor():
    def lookup(tensor):
        return {"table": 0}[tensor.name]

    with pytest.raises(InputError, match=r"lookup raised KeyError\('w0'\) for 'w0' float32 \(250, 256\)") as caught:
        place(TABLE, 2, lookup)
    assert isinstance(caught.value.__cause__, KeyError)

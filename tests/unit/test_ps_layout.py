"""How a server's parameters lie in memory and pass in cells; and what a Shard makes of an optimizer's state."""

import ml_dtypes
import numpy as np
import pytest

from allred import optim
from allred.errors import InputError
from allred.fusion import Tensor
from allred.optim.base import splittable
from allred.ps.placement import place
from allred.ps.shard import CELL_BYTES, Shard, lay_out

DTYPES = [np.dtype(name) for name in ("float16", "float32", "float64", ml_dtypes.bfloat16)]


def random_tensors(rng):
    """Empty, 0-d, tiny ones, and some of more than a cell."""
    shapes = [tuple(rng.integers(0, 20, size=rng.integers(0, 4)).tolist()) for _ in range(rng.integers(1, 12))]
    shapes += [(int(rng.integers(10**5, 4 * 10**5)),) for _ in range(rng.integers(0, 3))]
    return [Tensor(f"t{i}", shape, DTYPES[rng.integers(len(DTYPES))]) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("seed", range(20))
def test_cells_cover_every_element_of_every_piece_once(seed):
    rng = np.random.default_rng(seed)
    tensors, servers = random_tensors(rng), int(rng.integers(1, 4))
    placement, elements = place(tensors, servers), 0
    for server in range(servers):
        layout = lay_out(tensors, placement.of(server))
        assert set(layout.pieces) == set(placement.of(server))
        memory = bytearray(layout.nbytes)
        groups = layout.groups_of(memory)
        counts = [np.zeros(group.elements, int) for group in layout.groups]
        for (at, size), up, cell in zip(layout.down, layout.up, layout.cells, strict=True):
            counts[cell.group][cell.start : cell.stop] += 1
            group = layout.groups[cell.group]
            assert size == (cell.stop - cell.start) * group.dtype.itemsize
            assert at == group.offset + cell.start * group.dtype.itemsize
            assert at + size <= layout.nbytes
            assert 0 < up == (cell.stop - cell.start) * group.gradient.itemsize <= CELL_BYTES
        assert all((count == 1).all() for count in counts)
        for index, piece in enumerate(layout.pieces):
            part = layout.piece_of(groups, index)
            assert part.dtype == tensors[piece.tensor].dtype
            assert part.size == piece.stop - piece.start
            part[...] = index % 50 + 1
            elements += part.size
        for index in range(len(layout.pieces)):  # none lies on another
            assert (layout.piece_of(groups, index) == index % 50 + 1).all()
        assert all(group.offset % 64 == 0 for group in layout.groups)
    assert elements == sum(tensor.elements for tensor in tensors)


def test_gradients_of_16_bits_travel_in_float32():
    layout = lay_out([Tensor("h", (5,), DTYPES[0]), Tensor("b", (3,), DTYPES[3])], place_all(2))
    assert [group.gradient.name for group in layout.groups] == ["float32", "float32"]
    assert layout.up.tolist() == [20, 12]
    assert layout.down[:, 1].tolist() == [10, 6]
    assert layout.has_bfloat16
    assert not lay_out([Tensor("h", (5,), DTYPES[0])], place_all(1)).has_bfloat16


def place_all(count, shape=(5,)):
    return place([Tensor(f"t{i}", shape if i == 0 else (3,), DTYPES[1]) for i in range(count)], 1).of(0)


def test_a_server_without_pieces():
    layout = lay_out([Tensor("a", (3,), DTYPES[1])], ())
    assert (layout.nbytes, layout.cells, layout.groups_of(b"")) == (0, (), [])
    assert layout.up.shape == (0,)
    assert layout.down.shape == (0, 2)
    assert layout.up.dtype == layout.down.dtype == np.int64


# ---- a shard's state

TENSORS = [
    Tensor("w", (3000, 100), np.dtype("float32")),
    Tensor("b", (7,), np.dtype("float64")),
    Tensor("s", (), np.dtype("float32")),
]


class Whole(optim.Optimizer):
    """One that needs whole tensors."""

    def slots(self, param):
        return {"sum": np.zeros_like(param), "count": np.zeros((1, 1))}

    def update(self, param, grad, slots, lr, step):
        slots["sum"] += grad
        slots["count"] += 1
        param -= lr * slots["sum"] / slots["count"][0, 0]


class Own:
    """A user's own."""

    def __init__(self):
        self.count = 0

    def step(self, params, grads):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


MAKERS = {
    "adam": lambda: optim.Adam(lr=0.01),
    "momentum": lambda: optim.SGD(lr=0.1, momentum=0.9),
    "plain": lambda: optim.SGD(lr=0.1),
    "whole": lambda: Whole(lr=0.1),
}


def shards(make, servers=2):
    """The shards of all servers."""
    optimizers = [make() for _ in range(servers)]
    placement = place(TENSORS, servers, split=splittable(optimizers[0]))
    found = []
    for server, optimizer in enumerate(optimizers):
        layout = lay_out(TENSORS, placement.of(server))
        found.append(Shard(layout, bytearray(layout.nbytes), optimizer, {"w": 0, "b": 1, "s": 2}))
    return found


def step(shard, seed):
    update = shard.begin()
    for number, cell in enumerate(shard.layout.cells):
        data = np.random.default_rng((seed, number)).normal(size=cell.stop - cell.start)
        shard.apply(update, number, data.astype(shard.layout.groups[cell.group].gradient).tobytes())
    shard.finish(update)


@pytest.mark.parametrize("name", MAKERS)
def test_a_shard_continues_from_the_state_of_another_bit_for_bit(name):
    for shard, other in zip(shards(MAKERS[name]), shards(MAKERS[name]), strict=True):
        for number in range(3):
            step(shard, number)
        state, parts = shard.state()
        assert state == {"global_step": 3}
        for mine, others in zip(other.params, shard.params, strict=True):
            mine[...] = others
        other.load(state, {i: {n: slot.copy() for n, slot in part.items()} for i, part in parts.items()})
        for each in (shard, other):
            step(each, 4)
        assert other.state()[0] == {"global_step": 4}
        assert all((a == b).all() for a, b in zip(shard.params, other.params, strict=True))


def test_state_is_of_the_shape_of_the_tensor_where_that_is_whole():
    (shard,) = shards(MAKERS["adam"], 1)
    step(shard, 0)
    _, parts = shard.state()
    names = {TENSORS[piece.tensor].name: index for index, piece in enumerate(shard.layout.pieces)}
    for tensor in TENSORS:
        assert {slot.shape for slot in parts[names[tensor.name]].values()} == {tensor.shape}


def test_state_of_a_part_of_a_tensor_is_flat():
    for shard in shards(MAKERS["adam"]):
        (index,) = (i for i, piece in enumerate(shard.layout.pieces) if piece.tensor == 0)
        piece = shard.layout.pieces[index]
        assert 0 < piece.stop - piece.start < TENSORS[0].elements
        assert {slot.shape for slot in shard.state()[1][index].values()} == {(piece.stop - piece.start,)}


def test_a_fresh_start_forgets_what_was():
    for shard, fresh in zip(shards(MAKERS["adam"]), shards(MAKERS["adam"]), strict=True):
        step(shard, 0)
        shard.load(None, {})
        state, parts = shard.state()
        assert state == {"global_step": 0}
        for index, part in fresh.state()[1].items():
            for name, slot in part.items():
                assert (parts[index][name] == slot).all()


def test_state_of_another_optimizer_is_refused_and_changes_nothing():
    (shard,) = shards(MAKERS["adam"], 1)
    (other,) = shards(MAKERS["momentum"], 1)
    for each in (shard, other):
        step(each, 0)
    before = {(i, n): slot.copy() for i, part in shard.state()[1].items() for n, slot in part.items()}
    with pytest.raises(InputError, match=r"the state of 'w' must have the slots .*it belongs to another optimizer"):
        shard.load(*other.state())
    state, parts = shard.state()
    assert state == {"global_step": 1}
    assert all((parts[i][n] == slot).all() for (i, n), slot in before.items())
    wrong = {0: {name: slot.reshape(-1)[:-1] for name, slot in parts[0].items()}}
    with pytest.raises(InputError, match="of the parameter's size"):
        shard.load({"global_step": 1}, wrong)


def test_state_of_a_users_own_optimizer_is_its_own():
    (shard,) = shards(Own, 1)
    step(shard, 0)
    assert shard.state() == ({"count": 1}, {})
    shard.load({"count": 7}, {})
    shard.load(None, {})
    assert shard.state() == ({"count": 7}, {})


def test_one_without_a_state_dict():
    class Bare:
        def step(self, params, grads):
            pass

    assert shards(Bare, 1)[0].state() == (None, {})
    assert not splittable(Bare())

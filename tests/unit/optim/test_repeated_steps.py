"""Steps with input like that of the step before: one call of C updates all tensors, and all input is still checked."""

import collections

import numpy as np
import pytest

from allred import arrays, native, nest, optim
from allred.errors import InputError
from allred.fusion import Plan, Tensor
from allred.modes.detect.drift_window import window_hash, windows_differ
from allred.native import twins

F4 = np.float32
pytestmark = pytest.mark.skipif(not native.available, reason=native.reason)


def model(rng, dtype=F4):
    return {"a": [rng.normal(size=(2, 3)).astype(dtype), rng.normal(size=4)], "b": rng.normal(size=5).astype(dtype)}


def gradients(rng, params):
    return nest.rebuild(params, [rng.normal(size=leaf.shape).astype(leaf.dtype) for _, leaf in nest.leaves(params)])


def bits(optimizer, params):
    slots = [slot.tobytes() for held in optimizer.live_state()["slots"].values() for slot in held.values()]
    return [leaf.tobytes() for _, leaf in nest.leaves(params)] + slots


@pytest.fixture
def groups(monkeypatch):
    """How many tensors each call of update_group has updated."""
    done, update_group = [], native.update_group

    def recorded(*args):
        end = update_group(*args)
        done.append(end - (args[6] if len(args) > 6 else 0))
        return end

    monkeypatch.setattr(native, "update_group", recorded)
    return done


CHANGES = {
    "nothing": lambda p, g: (p, g),
    "None": lambda p, g: (p, g | {"b": None}),
    "other arrays": lambda p, g: (p | {"b": p["b"].copy()}, g | {"b": g["b"].copy()}),
    "a gradient's dtype": lambda p, g: (p, g | {"b": g["b"].astype(float)}),
    "a gradient's layout": lambda p, g: (p, g | {"a": [np.asfortranarray(g["a"][0]), g["a"][1]]}),
    "a parameter's layout": lambda p, g: (p | {"a": [np.asfortranarray(p["a"][0]), p["a"][1]]}, g),
    "a name": lambda p, g: ({"a": p["a"], "c": p["b"]}, {"a": g["a"], "c": g["b"]}),
    "a tuple": lambda p, g: (p | {"a": tuple(p["a"])}, g | {"a": tuple(g["a"])}),
    "one less": lambda p, g: ({"a": p["a"]}, {"a": g["a"]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_input_gives_the_bits_of_single_updates(case, change, rng, monkeypatch):
    found = []
    for group in (native.update_group, twins.update_group):
        monkeypatch.setattr(native, "update_group", group)
        rng = np.random.default_rng(3)
        optimizer, params = case.make(), model(rng)
        for step in range(7):
            given = params, gradients(rng, params)
            optimizer.step(*(CHANGES[change](*given) if step in (3, 4) else given))
        found.append(bits(optimizer, params))
    assert found[0] == found[1]


def test_all_tensors_are_updated_in_one_call(case, groups, rng):
    optimizer, params = case.make(), model(rng)
    for _ in range(3):
        optimizer.step(params, gradients(rng, params))
    assert groups == [3, 3]


def test_tensors_that_c_does_not_support_are_updated_by_numpy(case, groups, rng):
    optimizer = case.make()
    params = [rng.normal(size=3), np.array(1.0), rng.normal(size=3).astype(np.float16), rng.normal(size=4)]
    for _ in range(3):
        optimizer.step(params, gradients(rng, params))
    assert groups == [1, 0, 1] * 2


MISTAKES = {
    "shape": lambda p, g: (p, g | {"b": np.zeros(6, F4)}),
    "structure": lambda p, g: (p, {"a": g["a"]}),
    "one more": lambda p, g: (p, g | {"c": np.zeros(1)}),
    "a shorter list": lambda p, g: (p, g | {"a": g["a"][:1]}),
    "integers": lambda p, g: (p, g | {"b": np.zeros(5, int)}),
    "another shape of a parameter": lambda p, g: (p | {"b": 1.0}, g),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_after_good_steps_change_nothing_and_have_the_same_text(case, mistake, rng):
    texts = []
    for steps in (0, 3):
        optimizer, params = case.make(), model(rng)
        for _ in range(steps):
            optimizer.step(params, gradients(rng, params))
        before = bits(optimizer, params)
        with pytest.raises(InputError) as raised:
            optimizer.step(*MISTAKES[mistake](params, gradients(rng, params)))
        texts.append(str(raised.value))
        assert (bits(optimizer, params), optimizer.global_step) == (before, steps)
    assert texts[0] == texts[1]


def test_a_read_only_parameter_and_a_bad_schedule_change_nothing(case, rng):
    optimizer, params = case.make(), model(rng)
    for _ in range(2):
        optimizer.step(params, gradients(rng, params))
    before, optimizer.lr = bits(optimizer, params), lambda step: -1.0
    with pytest.raises(InputError, match="learning rate of step 2"):
        optimizer.step(params, gradients(rng, params))
    params["b"].flags.writeable = False
    with pytest.raises(InputError, match="'b' must be writable"):
        optimizer.step(params, gradients(rng, params))
    assert (bits(optimizer, params), optimizer.global_step) == (before, 2)


def test_schedules_and_loaded_states_are_used(groups):
    optimizer, params = optim.SGD(lr=lambda step: float(step), momentum=0.5), [np.zeros(2)]
    for _ in range(3):
        optimizer.step(params, [np.ones(2)])
    assert params[0].tolist() == [-(1.5 + 2 * 1.75)] * 2
    optimizer.load_state_dict({"global_step": 1, "slots": {"0": {"momentum_buffer": np.zeros(2)}}})
    params = [np.zeros(2)]
    for _ in range(2):
        optimizer.step(params, [np.ones(2)])
    assert params[0].tolist() == [-(1.0 + 2 * 1.5)] * 2
    assert groups == [1, 1, 1]


def test_a_subclass_with_its_own_update_has_no_kernel(groups):
    class Halved(optim.SGD):
        def update(self, param, grad, slots, lr, step):
            super().update(param, grad, slots, lr / 2, step)

    optimizer, params = Halved(lr=1.0), [np.zeros(2), np.zeros(3)]
    for _ in range(3):
        optimizer.step(params, [np.ones(2), np.ones(3)])
    assert params[0].tolist() == [-1.5] * 2
    assert groups == []


def arguments():
    arrays = [[np.ones(3, F4), np.ones((2, 2), float)] for _ in range(3)]
    return arrays[0], arrays[1], [{"b": slot} for slot in arrays[2]]


def column(index, values):
    def change(columns):
        columns[index][1] = values(columns)

    return change


UNSUPPORTED = {
    "a list": column(0, lambda c: [1.0]),
    "None": column(1, lambda c: None),
    "another shape": column(1, lambda c: np.ones((4, 1))),
    "another dtype": column(1, lambda c: np.ones((2, 2), F4)),
    "integers": column(0, lambda c: np.ones((2, 2), int)),
    "not contiguous": column(1, lambda c: np.ones((2, 4))[:, ::2]),
    "read-only": column(0, lambda c: np.frombuffer(bytes(32)).reshape(2, 2)),
    "the same memory": column(1, lambda c: c[0][1]),
    "no slot": column(2, lambda c: {}),
    "a slot of another shape": column(2, lambda c: {"b": np.ones(4)}),
    "slots that are no dict": column(2, lambda c: None),
}


@pytest.mark.parametrize("change", UNSUPPORTED)
def test_update_group_stops_at_a_tensor_that_it_does_not_support(change):
    columns = arguments()
    UNSUPPORTED[change](columns)
    second = [np.array(value) for value in (columns[0][1], columns[1][1]) if isinstance(value, np.ndarray)]
    done = native.update_group("sgd", *columns, ("b",), (0.5, 0.5, 0.0, 0.0))
    assert done == 1
    assert columns[0][0].tolist() == [0.25] * 3  # 1 - 0.5 * (0.5 * 1 + 1)
    kept = [value for value in (columns[0][1], columns[1][1]) if isinstance(value, np.ndarray)]
    for value, before in zip(kept, second, strict=True):
        np.testing.assert_array_equal(value, before)


@pytest.mark.parametrize("number", [np.float64(0.5), 1, 1e300])
def test_update_group_leaves_other_numbers_to_numpy(number):
    assert native.update_group("sgd", *arguments(), ("b",), (number, 0.5, 0.0, 0.0)) == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({0: "sgdd"}, ValueError),
        ({2: []}, ValueError),
        ({3: []}, ValueError),
        ({3: ()}, TypeError),
        ({4: ()}, ValueError),
        ({5: (0.5,)}, ValueError),
        ({6: -1}, ValueError),
    ],
)
def test_wrong_arguments_of_update_group_change_nothing(change, error):
    columns = arguments()
    given = ["sgd", *columns, ("b",), (0.5, 0.5, 0.0, 0.0), 0]
    for index, value in change.items():
        given[index] = value
    with pytest.raises(error):
        native.update_group(*given)
    assert all((param == 1).all() for param in columns[0])


def test_update_group_needs_the_slots_of_the_rule():
    with pytest.raises(ValueError, match="adam needs slot 1"):
        native.update_group("adam", *arguments(), ("b", None), (0.5,) * 6)


@pytest.mark.parametrize("leaves_of", [native.leaves_of, twins.leaves_of])
def test_leaves_of_a_known_structure(leaves_of):
    tree = {"b": [1, (2, {"c": 3})], "a": 4, 7: 5}
    known = nest.structure(tree)
    assert leaves_of(known, tree) == [leaf for _, leaf in nest.leaves(tree)]
    for other in ({"b": [1, (2, {"c": 3})], "a": 4}, {**tree, "b": [1]}, {**tree, "b": (1, (2, {"c": 3}))}, [1], None):
        assert leaves_of(known, other) is None
    assert leaves_of(nest.structure(3.0), 4.0) == [4.0]
    assert leaves_of(nest.structure({1: collections.OrderedDict()}), {1: 2}) is None


def test_a_structure_of_something_else_is_an_error():
    for wrong in (3, (), (dict, ("a",), None)):
        with pytest.raises(TypeError, match="a structure is None or"):
            native.leaves_of(wrong, {"a": 1})


@pytest.mark.parametrize("disjoint", [native.disjoint, twins.disjoint])
def test_arrays_that_share_no_memory(disjoint):
    whole, one = np.zeros((64, 4), np.float32), np.ones((), np.float16)
    assert disjoint([])
    assert disjoint([whole[row] for row in range(64)])
    assert disjoint([*reversed([whole[row : row + 1] for row in range(64)]), whole[5:5], one, np.zeros((2, 3)).T])
    assert not disjoint([whole, whole[:1]])
    assert not disjoint([one, one])
    assert not disjoint([one, one[()], one.reshape(1), one.reshape(1, 1)])
    assert not disjoint([whole[2:], np.zeros(3), whole[:3]])
    assert not disjoint([whole, 1.0])
    assert not disjoint([whole[:, ::2]])  # strided arrays are left to `pairs_sharing_memory`
    assert not disjoint([np.frombuffer(bytes(8))])


def test_overlaps_are_those_of_the_elements():
    """Random views of one buffer: the pairs, and arrays that overlap themselves, are found by their elements."""
    random, buffer = np.random.default_rng(0), np.arange(48, dtype=np.int16)
    for _ in range(300):
        views = []
        for _ in range(random.integers(1, 6)):
            start, count, step = (int(n) for n in random.integers([0, 0, 1], [24, 5, 6]))
            view = buffer[start:][: count * step : step]
            rows, hop = (int(n) for n in random.integers([1, 0], [4, 7]))
            kind = random.integers(3)
            if kind and view.size:
                last = start + (view.size - 1) * step + (rows - 1) * hop
                rows = rows if last < buffer.size else 1
                view = np.lib.stride_tricks.as_strided(view, (rows, view.size), (2 * hop, 2 * step))
            views.append(view[..., ::-1].T if kind == 2 else view)
        elements = [view.reshape(-1).tolist() for view in views]
        pairs = {(i, j) for i in range(len(views)) for j in range(i) if set(elements[i]) & set(elements[j])}
        repeated = {i for i, each in enumerate(elements) if len(set(each)) < len(each)}
        found = set(arrays.pairs_sharing_memory(views))
        assert {(j, i) for i, j in found if i != j} == pairs
        assert repeated <= {i for i, j in found if i == j}
        assert not any(views[i].flags.forc for i, j in found if i == j)


def test_the_hash_of_a_window_is_the_same_in_c_and_numpy():
    random = np.random.default_rng(1)
    kinds = [(5, "f4"), (0, "f8"), (3000, "f2"), (1, "i8"), (1090, "f8")]  # 4096 elements
    group = [random.normal(size=n).astype(dtype) for n, dtype in kinds] + [random.normal(size=(4, 4))]
    starts = np.cumsum([0, *(array.size for array in group)]).tobytes()
    for step in range(12):
        assert native.hash_window(group, starts, step) == twins.hash_window(group, starts, step)
    for other in (group[5].T, 3.0, None):
        mixed = [*group[:5], other]
        for step in range(4):
            assert native.hash_window(mixed, starts, step) == twins.hash_window(group, starts, step)
        assert native.hash_window(mixed, starts, 4) is twins.hash_window(mixed, starts, 4) is None
    for empty in ([], [np.zeros((0, 3))]):
        starts = bytes(8 * (len(empty) + 1))
        assert native.hash_window(empty, starts, 7) == twins.hash_window(empty, starts, 7) == 0


@pytest.mark.parametrize("order", ["C", "F"])
def test_the_window_covers_each_element_once(order):
    random, shapes = np.random.default_rng(2), [(50, 30), (), (0, 4), (1023,), (700, 2), (1,)]
    params = [np.array(random.normal(size=shape), np.float32, order=order) for shape in shapes]
    plan = Plan(tuple(Tensor(str(i), param.shape, param.dtype) for i, param in enumerate(params)), 2**20)
    windows = -(-sum(param.size for param in params) // 1024)

    def hashes(plain):
        return [window_hash(step, plan, params, params, plain) for step in range(windows)]

    before = hashes(True)
    assert before == hashes(False)
    for param in params:
        for index in {0, param.size // 2, param.size - 1} if param.size else ():
            param[np.unravel_index(index, param.shape)] += 1
            after = hashes(order == "C")
            assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
            before = after


@pytest.mark.parametrize(
    ("hashes", "expected"),
    [
        ([5 << 16] * 3, False),
        ([5 << 16, 6 << 16], True),
        ([5 << 16, 0], False),
        ([0, 0], False),
        ([5 << 16 | 1, 6 << 16 | 2], False),
        ([5 << 16 | 1, 7 << 16 | 2, 6 << 16 | 1], True),
    ],
)
def test_only_ranks_that_lack_the_same_gradients_are_compared(hashes, expected):
    assert windows_differ(hashes) is expected

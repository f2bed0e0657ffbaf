"""opt.save and opt.restore in a world of one: which checkpoints fit which optimizer and parameters, and which is the
newest. tests/parallel/test_training.py has ranks."""

import json
import os
import pathlib

import numpy as np
import pytest
from checkpoints import save

import allred
from allred import checkpoint, optim
from allred.checkpoint import whole, writing
from allred.errors import CheckpointError, InputError


@pytest.fixture(autouse=True)
def world():
    allred.init(banner=False)
    yield
    allred.shutdown()


class MyAdam(optim.Adam):
    """Another update with the same slots."""

    def update(self, param, grad, slots, lr, step):
        super().update(param, -grad, slots, lr, step)


class RenamedAdam(optim.Adam):
    kind = "Adam"


class Own:
    """Not of allred.optim, and counts nothing."""

    def __init__(self):
        self.state = {}

    def step(self, params, grads):
        params["w"] -= grads["w"]

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, state):
        self.state = dict(state)


class RenamedOwn(Own):
    kind = "Own"


def sgd(momentum=0.0):
    return lambda: optim.SGD(lr=1.0, momentum=momentum)


def adam(cls=optim.Adam):
    return lambda: cls(lr=0.1)


def trained(make, steps=2, value=1.0):
    params, opt = {"w": np.full(3, value)}, allred.distributed(make())
    for _ in range(steps):
        opt.step(params, {"w": np.ones(3)})
    return params, opt


def forget_meta(path, *keys):
    """Rewrite a manifest as earlier versions of allred have written it."""
    manifest = pathlib.Path(path, "manifest.json")
    content = json.loads(manifest.read_text())
    for key in keys:
        del content["meta"][key]
    found = checkpoint.read_manifest(path)
    manifest.write_bytes(checkpoint.Manifest(found.step, found.time, found.shards, content["meta"]).encode())


KINDS = [
    (sgd(), adam(), "was saved with SGD, but this one is Adam; restore it with SGD"),
    (sgd(), adam(optim.AdamW), "SGD, but this one is AdamW"),
    (sgd(), lambda: optim.Adagrad(lr=1.0), "SGD, but this one is Adagrad"),
    (sgd(), lambda: optim.RMSProp(lr=1.0), "SGD, but this one is RMSProp"),
    (adam(), adam(optim.AdamW), "Adam, but this one is AdamW"),
    (adam(), adam(MyAdam), "If MyAdam is Adam under another name, give its class the attribute kind = 'Adam'"),
    (adam(MyAdam), adam(), "MyAdam, but this one is Adam"),
    (adam(), Own, "Adam, but this one is Own"),
    (Own, adam(), "Own, but this one is Adam"),
    (sgd(0.9), sgd(), r"needs the slots \{\}, but the state holds \{'momentum_buffer': \(3,\)\}"),
    (adam(), adam(), ""),
    (adam(), adam(RenamedAdam), ""),
    (adam(RenamedAdam), adam(), ""),
    (Own, RenamedOwn, ""),
    (sgd(), sgd(0.9), ""),  # the buffer starts at zero, as at step 0
]


@pytest.mark.parametrize(("saved", "restoring", "words"), KINDS)
@pytest.mark.parametrize("steps", [0, 2])
def test_the_kind_of_optimizer_is_compared(saved, restoring, words, steps, tmp_path):
    params, opt = trained(saved, steps)
    opt.save(tmp_path, params)
    own, other = trained(restoring, 0, 5.0)
    if words and (steps or "slots" not in words):  # before the first step there are none
        with pytest.raises(CheckpointError, match=rf"step-\d+ is of another optimizer: .*{words}"):
            other.restore(tmp_path, own)
        assert own["w"].tolist() == [5, 5, 5]
        assert other.global_step == 0
        return
    assert other.restore(tmp_path, own) == steps
    assert own["w"].tolist() == params["w"].tolist()


EARLIER = [
    (sgd(), adam(), r"Adam: parameter 'w' needs the slots .*exp_avg.* holds \{\}"),
    (sgd(), sgd(0.9), r"SGD: parameter 'w' needs the slots .*momentum_buffer.* holds \{\}"),
    (adam(), sgd(), r"SGD: parameter 'w' needs the slots \{\}, .* holds .*exp_avg"),
    (adam(), Own, "was saved with an optimizer of allred.optim, but this one is Own"),
    (Own, adam(), "was saved with an optimizer that is not of allred.optim, but this one is Adam"),
    (sgd(), sgd(), ""),
    (adam(), adam(), ""),
    (Own, RenamedOwn, ""),
]


@pytest.mark.parametrize(("saved", "restoring", "words"), EARLIER)
@pytest.mark.parametrize("steps", [0, 2])
def test_checkpoints_of_earlier_versions_do_not_name_the_kind(saved, restoring, words, steps, tmp_path):
    params, opt = trained(saved, steps)
    forget_meta(opt.save(tmp_path, params), "kind", "training")
    own, other = trained(restoring, 0, 5.0)
    if words and (steps or "slots" not in words):
        with pytest.raises(CheckpointError, match=rf"is of another optimizer: .*{words}"):
            other.restore(tmp_path, own)
        assert own["w"].tolist() == [5, 5, 5]
        return
    assert other.restore(tmp_path, own) == steps
    assert own["w"].tolist() == params["w"].tolist()
    if not words:  # the state too
        other.step(own, {"w": np.ones(3)})
        opt.step(params, {"w": np.ones(3)})
        assert own["w"].tolist() == params["w"].tolist()


def names(root):
    return [path.name for path in checkpoint.list_complete(root)]


@pytest.mark.parametrize("back", ["restore", "load_state_dict", "a new optimizer"])
def test_a_save_after_a_rollback_is_the_newest(back, tmp_path, capfd):
    params, opt = trained(sgd(), 2)
    opt.save(tmp_path / "best", params)
    state, kept = opt.state_dict(), params["w"].copy()
    for _ in range(3):
        opt.step(params, {"w": np.ones(3)})
        opt.save(tmp_path, params)
    if back == "a new optimizer":
        params, opt = trained(sgd(), 0)
    if back == "load_state_dict":
        opt.load_state_dict(state)
        params["w"][:] = kept
    else:
        assert opt.restore(tmp_path / "best", params) == 2
    opt.step(params, {"w": np.full(3, 7.0)})
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    opt.save(tmp_path, params)
    assert names(tmp_path) == ["step-00000003"]
    assert len([name for name in os.listdir(tmp_path) if ".outdated-" in name]) == 2
    assert capfd.readouterr().err.count("which was just saved; renamed to step-0000000") == 2
    again, other = trained(sgd(), 0)
    assert other.restore(tmp_path, again) == 3
    assert again["w"].tolist() == [-8, -8, -8]
    other.step(again, {"w": np.ones(3)})
    other.save(tmp_path, again)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    assert not capfd.readouterr().err


def test_only_later_checkpoints_of_other_trainings_are_renamed(tmp_path):
    """Such as damaged ones, and one that is being replaced; the last save of a failing rank may come before that of
    the chief, of an earlier step."""
    for step, meta in ((1, {}), (3, {"training": "mine"}), (4, {"training": "other"}), (5, None), (6, None)):
        save(tmp_path, step, [whole("w", np.ones(2))], meta=meta)
    (tmp_path / "step-00000005" / "manifest.json").write_text("damaged")
    (tmp_path / "step-00000006").rename(tmp_path / "step-00000006.replaced")
    (tmp_path / "step-7").write_text("mine")
    save(tmp_path, 2, [whole("w", np.zeros(2))], meta={"training": "mine"})
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
    renamed = sorted(name.partition(".outdated-")[0] for name in os.listdir(tmp_path) if "outdated" in name)
    assert renamed == ["step-00000004", "step-00000005", "step-00000006.replaced"]
    assert (tmp_path / "step-7").read_text() == "mine"
    save(tmp_path, 0, [whole("w", np.zeros(2))])  # of no training
    assert len(names(tmp_path)) == 4
    assert [checkpoint.has(tmp_path, step, "mine") for step in range(5)] == [False, False, True, True, False]


def test_a_checkpoint_itself_is_not_a_directory_of_checkpoints(tmp_path):
    params, opt = trained(sgd(), 1)
    path = opt.save(tmp_path, params)
    with pytest.raises(
        CheckpointError, match=f"{path} is a checkpoint, not a directory of checkpoints; pass {tmp_path}"
    ):
        opt.restore(path, params)


def test_a_writer_that_fails_leaves_the_later_checkpoints(tmp_path, monkeypatch):
    """Until its own is in place: otherwise the directory would have none."""
    save(tmp_path, 4, [whole("w", np.ones(2))], meta={"training": "other"})
    with monkeypatch.context() as patched:
        patched.setattr(writing, "_rename", lambda *_: os.rename(tmp_path / "missing", tmp_path / "x"))
        with pytest.raises(allred.CheckpointError):
            save(tmp_path, 2, [whole("w", np.zeros(2))], meta={"training": "mine"})
    assert names(tmp_path) == ["step-00000004"]
    save(tmp_path, 2, [whole("w", np.zeros(2))], meta={"training": "mine"})
    assert names(tmp_path) == ["step-00000002"]


class OddSlots(optim.Optimizer):
    """Slots with names that the format of checkpoints uses itself."""

    elementwise = True
    names = ("", "extra", "state", "\0", "\0extra", "m")
    dtype = np.float64

    def slots(self, param):
        return {name: np.full(param.shape, number, self.dtype) for number, name in enumerate(self.names)}

    def update(self, param, grad, slots, lr, step):
        for name in self.names:
            slots[name] += 1
        param -= grad


class OddBytes(OddSlots):
    dtype = np.uint8


@pytest.mark.parametrize("cls", [OddSlots, OddBytes])
@pytest.mark.parametrize("container", [np.asarray, lambda w: {"": w}, lambda w: {"w": w}, lambda w: [w]])
@pytest.mark.parametrize("extra", [None, {"of": "a session"}])
def test_slots_may_have_any_name(cls, container, extra, tmp_path):
    w, opt = np.full(4, 7.0), allred.distributed(cls(lr=1.0))
    opt.step(container(w), container(np.ones(4)))
    opt.saving(container(w), extra)(str(tmp_path))
    other, again = np.zeros(4), allred.distributed(cls(lr=1.0))
    assert again.restore_all(tmp_path, container(other)) == (1, extra)
    assert other.tolist() == [6] * 4
    [slots] = again.state_dict()["slots"].values()
    assert {name: slot.tolist() for name, slot in slots.items()} == {
        name: [number + 1] * 4 for number, name in enumerate(cls.names)
    }


def variables(*named):
    return [allred.variable(np.full(2, value), name=name) for name, value in named]


def test_variables_are_saved_and_restored_by_their_names(tmp_path):
    """Not by their order in the list of parameters; parameters and slots."""
    w, b = variables(("w", 1.0), ("b", 2.0))
    opt = allred.distributed(optim.SGD(lr=1.0, momentum=0.9))
    opt.step([w, b], [np.full(2, 0.25), np.full(2, 0.5)])
    opt.save(tmp_path, [w, b])
    content = checkpoint.read_checkpoint(checkpoint.newest(tmp_path))
    assert (set(content.params), set(content.slots)) == ({"w", "b"}, {"w", "b"})
    b, w = variables(("b", 0.0), ("w", 0.0))
    again = allred.distributed(optim.SGD(lr=1.0, momentum=0.9))
    assert again.restore(tmp_path, [b, w]) == 1
    assert (w.tolist(), b.tolist()) == ([0.75] * 2, [1.5] * 2)
    again.step([b, w], [np.zeros(2), np.zeros(2)])
    assert (w.tolist(), b.tolist()) == ([0.75 - 0.225] * 2, [1.5 - 0.45] * 2)
    odd = variables(("b", 0.0), ("v", 0.0))
    with pytest.raises(CheckpointError, match="parameter 'v' of this model has shape"):
        again.restore(tmp_path, odd)
    with pytest.raises(CheckpointError, match="parameter '0' of this model has shape"):
        again.restore(tmp_path, [np.zeros(2), np.zeros(2)])


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda w, b: [w, b], {"w", "b"}),
        (lambda w, b: (w, [b]), {"w", "b"}),
        (lambda w, b: w, {"w"}),
        (lambda w, b: {"b": w, "w": [b]}, {"b", "w.0"}),  # the program has named them by keys
        (lambda w, b: [w, {"c": b}], {"w", "1.c"}),
        (lambda w, b: [w, *variables(("w", 0.0), ("", 1.0), ("4", 2.0)), b.copy()], {"0", "1", "2", "3", "4"}),
        (lambda w, b: [w[:1], b.copy()], {"0", "1"}),  # other arrays
    ],
)
def test_names_in_checkpoints(make, names, tmp_path):
    params = make(*variables(("w", 1.0), ("b", 2.0)))
    opt = allred.distributed(optim.Adam())
    opt.save(tmp_path, params)
    content = checkpoint.read_checkpoint(checkpoint.newest(tmp_path))
    assert set(content.params) == names
    assert opt.restore(tmp_path, params) == 0


def test_variables_of_checkpoints_of_earlier_versions(tmp_path):
    """They were saved by their paths."""
    opt = allred.distributed(optim.SGD(lr=1.0, momentum=0.9))
    plain = [np.full(2, 3.0), np.full(2, 4.0)]
    opt.step(plain, [np.ones(2), np.ones(2)])
    opt.save(tmp_path, plain)
    w, b = variables(("w", 0.0), ("b", 0.0))
    assert opt.restore(tmp_path, [w, b]) == 1
    assert (w.tolist(), b.tolist()) == ([2, 2], [3, 3])


def test_a_slot_of_integers_does_not_take_floats(tmp_path):
    class Floats(OddSlots):
        kind = "OddBytes"

    params, opt = trained(lambda: Floats(lr=1.0))
    opt.save(tmp_path, params)
    own, other = trained(lambda: OddBytes(lr=1.0), 0)
    with pytest.raises(CheckpointError, match=r"slot '' of parameter 'w' must be a uint8 .* but is a float64"):
        other.restore(tmp_path, own)


def test_slots_and_pickles_of_earlier_versions(tmp_path):
    """They have not escaped slots, nor named the kind. A slot of floats named "extra" was no pickle either."""
    extra = checkpoint.pickled_extra(["a session"])
    entries = [whole("", np.ones(2)), (checkpoint.Entry("", "state", "float64", (2,), 0, 2), np.full(2, 3.0)), extra]
    save(tmp_path / "both", 4, entries, meta={"optimizer": {"global_step": 4}})
    content = checkpoint.read_checkpoint(tmp_path / "both" / "step-00000004")
    assert content.slots[""]["state"].tolist() == [3, 3]
    assert checkpoint.unpickle_extra(content.pickled) == ["a session"]
    assert checkpoint.unpickle_state(content.pickled) is None
    entries = [whole("", np.ones(2)), checkpoint.pickled_state({"a": 1}), extra]
    save(tmp_path / "own", 4, entries, meta={"optimizer": None})
    w, opt = np.zeros(2), allred.distributed(Own())
    assert opt.restore_all(tmp_path / "own", w) == (4, ["a session"])
    assert (w.tolist(), opt.state_dict()) == ([1, 1], {"a": 1})


@pytest.mark.parametrize("container", [np.asarray, lambda w: {"w": w}, lambda w: [w]])
@pytest.mark.parametrize(
    ("saved", "dtype", "fits"),
    [
        (np.array([0.5, 2.0]), "float32", True),
        (np.array([0.1, np.inf, np.nan], np.float32), "float16", True),
        (np.array([1e5], np.float32), "float16", False),  # infinity
        (np.array([1e300]), "float32", False),
        (np.array([0.5, 2.0]), "int64", False),
        (np.array([2.0]), "int64", False),
        (np.array([1.0]), "bool", False),
        (np.array([1.0], np.float16), "uint8", False),
        (np.array([1, -2]), "float32", True),
        (np.array([2**53 + 1]), "float64", False),
        (np.array([100, -100]), "int8", True),
        (np.array([300]), "uint8", False),
        (np.array([-1], np.int8), "uint8", False),
        (np.array([255], np.uint8), "int8", False),
        (np.array([2**63], np.uint64), "int64", False),
        (np.array([True]), "int32", True),
        (np.array([2]), "bool", False),
        (np.zeros((0, 3)), "float32", True),
        (np.array(0.5), "int32", False),
    ],
)
def test_parameters_hold_the_values_or_it_is_an_error(container, saved, dtype, fits, tmp_path):
    opt = allred.distributed(optim.SGD(lr=1.0))
    opt.save(tmp_path, container(saved))
    own = np.full(saved.shape, 1, dtype)
    if fits:
        assert opt.restore(tmp_path, container(own)) == 0
        np.testing.assert_array_equal(own, saved.astype(dtype))
        return
    words = f"is {dtype} in this model, which cannot hold the {saved.dtype} values of the checkpoint"
    with pytest.raises(CheckpointError, match=words):
        opt.restore(tmp_path, container(own))
    assert (own == 1).all()


def test_a_byte_swapped_parameter_is_refused_before_anything_is_restored(tmp_path):
    saved, other = allred.distributed(optim.SGD(lr=1.0)), allred.distributed(optim.SGD(lr=1.0))
    saved.step({"w": np.zeros(3)}, {"w": np.ones(3)})
    saved.save(tmp_path, {"w": np.zeros(3)})
    own = {"w": np.ones(3, ">f8")}
    with pytest.raises(InputError, match="restore: parameter 'w': dtype >f8 is byte-swapped"):
        other.restore(tmp_path, own)
    assert own["w"].tolist() == [1, 1, 1]
    assert other.global_step == 0

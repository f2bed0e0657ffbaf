"""Checkpoint files in one process: what comes back bit for bit, and what is refused."""

import itertools
import json
import zlib

import ml_dtypes
import numpy as np
import pytest
from checkpoints import E, M, W, bits, names_in, piece, same, save, save_one

from allred import checkpoint
from allred.checkpoint import Entry, ShardInfo, whole
from allred.errors import CheckpointError, InputError

DTYPES = [
    *(np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64),
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128),
]
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (5, 4), (2, 3, 5)]
NAMES = [
    "fc1.weight",
    "a/b",
    "..",
    "../../x",
    "",
    " ",
    "Größe",
    "層",
    "😀",
    "\udc80",
    'q"\\\n\0',
    "__metadata__",
    "x" * 999,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_and_shape_is_restored_bit_for_bit(tmp_path, dtype):
    arrays = {f"{shape}": bits(shape, dtype, seed) for seed, shape in enumerate(SHAPES)}
    path = save(tmp_path, 400, [whole(name, array) for name, array in arrays.items()])
    back = checkpoint.read_checkpoint(path)
    assert (path, back.step, back.slots, back.meta) == (tmp_path / "step-00000400", 400, {}, {})
    assert back.params.keys() == arrays.keys()
    for name, array in arrays.items():
        same(back.params[name], array)
        assert back.params[name].flags.writeable


def test_layouts_and_byte_orders_are_restored_by_value(tmp_path):
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    layouts = {"t": base.T, "s": base[::2, ::-3], "f": np.asfortranarray(base), "b": base.astype(">f4"), "n": base[1:1]}
    back = checkpoint.read_checkpoint(save(tmp_path, 1, [whole(name, array) for name, array in layouts.items()]))
    for name, array in layouts.items():
        np.testing.assert_array_equal(back.params[name], array)
        assert back.params[name].dtype == np.float32  # native, whatever it was


def test_any_text_is_a_name_and_none_becomes_a_file_name(tmp_path):
    entries = [whole(name, np.array([i, j]), slot) for i, name in enumerate(NAMES) for j, slot in enumerate(NAMES)]
    path = save(tmp_path / "root", 0, entries)
    back = checkpoint.read_checkpoint(path)
    held = {"": back.params}
    for name, slots in back.slots.items():
        for slot, array in slots.items():
            held.setdefault(slot, {})[name] = array
    for i, name in enumerate(NAMES):
        for j, slot in enumerate(NAMES):
            assert held[slot][name].tolist() == [i, j]
    assert names_in(tmp_path) == ["root"]
    assert names_in(path) == ["manifest.json", "shard-00000-of-00001.safetensors"]


@pytest.mark.parametrize("servers", [1, 2, 3, 7])
def test_pieces_of_any_number_of_servers_make_whole_tensors(tmp_path, servers):
    rng = np.random.default_rng(servers)
    whole_w, whole_m = bits((13, 5), np.float32), bits((13, 5), ml_dtypes.bfloat16, 1)
    shards = [[] for _ in range(servers)]
    for slot, array in (("", whole_w), ("m", whole_m)):
        cuts = [0, *sorted(rng.integers(0, array.size + 1, servers - 1)), array.size]  # some pieces may be empty
        for server, (start, stop) in enumerate(itertools.pairwise(cuts)):
            shards[rng.integers(servers) if servers > 2 else server].append(piece("w", array, start, stop, slot))
    shards[-1] += [whole("w", bits((13,), np.float64), slot="rows"), whole("w", 7, slot="count")]  # of other shapes
    back = checkpoint.read_checkpoint(save(tmp_path, 5, *shards, meta={"server": servers}))
    same(back.params["w"], whole_w)
    same(back.slots["w"]["m"], whole_m)
    same(back.slots["w"]["rows"], bits((13,), np.float64))
    assert back.slots["w"]["count"] == np.array(7)
    assert back.meta == {"server": servers}


def test_empty_pieces_of_a_tensor_may_lie_anywhere(tmp_path):
    path = save(tmp_path, 1, [piece("w", W, 3, 3), piece("w", W, 0, 5)], [piece("w", W, 5, 10), piece("w", W, 10, 10)])
    same(checkpoint.read_checkpoint(path).params["w"], W)


def test_other_programs_read_a_shard_that_holds_whole_tensors(tmp_path):
    from safetensors.numpy import load_file

    path = save(tmp_path, 1, [whole("fc1.weight", np.eye(3))])
    np.testing.assert_array_equal(load_file(path / "shard-00000-of-00001.safetensors").popitem()[1], np.eye(3))


def test_shard_info_survives_json_and_describes_the_file(tmp_path):
    directory = checkpoint.begin(tmp_path, 1)
    shard = checkpoint.write_shard(directory, 0, 1, [whole("層", np.ones((2, 3)), "m"), whole("s", 1.5)])
    raw = (directory / shard.file).read_bytes()
    assert (shard.nbytes, shard.checksum) == (len(raw), f"{zlib.crc32(raw):08x}")
    assert ShardInfo.from_json(json.loads(json.dumps(shard.to_json()))) == shard
    checkpoint.abandon(directory)
    assert names_in(tmp_path) == []


def test_a_shard_from_json_names_no_file_elsewhere():
    with pytest.raises(ValueError, match="not the name of a file"):
        ShardInfo.from_json({"file": "../x", "nbytes": 0, "checksum": "", "entries": []})


def test_meta_is_restored_as_json(tmp_path):
    meta = {"rng": 2**127, "policy": ("sync", 3), "lr": 0.1, "none": None, "層": "\udc80", "nan": float("inf")}
    path = save(tmp_path, 3, [], meta=meta)
    assert checkpoint.read_checkpoint(path).meta == {**meta, "policy": ["sync", 3]}
    directory = checkpoint.begin(tmp_path, 4)
    with pytest.raises(InputError, match="meta must hold only"):
        checkpoint.commit(directory, 4, [checkpoint.write_shard(directory, 0, 1, [])], {"array": np.ones(2)})
    assert names_in(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ([[piece("w", W, 0, 4)], [piece("w", W, 5, 10)]], "elements 4 to 5 of 'w', .* are in no shard"),
        ([[piece("w", W, 1, 10)], []], "elements 0 to 1 of 'w', .* are in no shard"),
        ([[], [piece("w", W, 0, 9, "m")]], "elements 9 to 10 of slot 'm' of 'w', .* are in no shard"),
        ([[piece("w", W, 0, 0)]], "elements 0 to 10 of 'w', .* are in no shard"),
        (
            [[piece("w", W, 0, 5)], [piece("w", W, 3, 10)]],
            "elements 3 to 5 of 'w', .* are in two shards, between shard-",
        ),
        ([[whole("w", W)], [whole("w", W)]], "elements 0 to 10 of 'w', .* in two shards"),
        (
            [[piece("w", W, 0, 5)], [piece("w", W.astype("f8"), 5, 10)]],
            "float32 .* in shard-00000.*float64 .* in shard-00001",
        ),
        ([[piece("w", M, 0, 3)], [piece("w", M.T, 3, 6)]], r"\(2, 3\) in shard-00000.*\(3, 2\) in shard-00001"),
        ([[whole("e", E)], [whole("e", E)]], "'e', which is empty, is in shard-00000.*, shard-00001"),
    ],
)
def test_shards_that_do_not_make_whole_tensors_are_not_committed(tmp_path, shards, text):
    save_one(tmp_path, 1)
    with pytest.raises(CheckpointError, match=f"^commit: .*{text}"):
        save(tmp_path, 2, *shards)
    assert names_in(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("given", [[], [0, 0], [0, 2], [1]])
def test_a_shard_missing_from_the_list_is_an_error(tmp_path, given):
    directory = checkpoint.begin(tmp_path, 2)
    shards = [checkpoint.write_shard(directory, i, 3, []) for i in range(3)]
    with pytest.raises(CheckpointError, match="each once"):
        checkpoint.commit(directory, 2, [shards[i] for i in given])
    assert names_in(tmp_path) == []


def test_a_shard_on_a_disk_of_another_host_is_missed(tmp_path):
    directory = checkpoint.begin(tmp_path, 2)
    shard = checkpoint.write_shard(directory, 0, 1, [whole("w", W)])
    (directory / shard.file).unlink()
    with pytest.raises(CheckpointError, match=r"shard-00000.* No such file .* a file system that all share"):
        checkpoint.commit(directory, 2, [shard])


@pytest.mark.parametrize(
    ("entry", "array", "text"),
    [
        (whole("w", W)[0], W[:9], r"has 10 float32, but its array is float32 \(9,\)"),
        (whole("w", W)[0], W.astype("f8"), r"has 10 float32, but its array is float64 \(10,\)"),
        (whole("w", W)[0], np.array(["x"]), "has 10 float32, but its array is <U1"),
    ],
)
def test_an_array_that_does_not_fit_its_entry_is_refused(tmp_path, entry, array, text):
    directory = checkpoint.begin(tmp_path, 1)
    with pytest.raises(InputError, match=text):
        checkpoint.write_shard(directory, 0, 1, [(entry, array)])
    assert names_in(directory) == ["manifest.json"]
    checkpoint.abandon(directory)


def test_what_cannot_be_described_is_refused(tmp_path):
    for array in (np.ones(2, np.longdouble), np.array(["x"]), np.array([1.0], [("f", "f4")])):
        with pytest.raises(InputError, match=r"'w' has dtype .* cannot be saved; convert it to one of bfloat16, bool"):
            whole("w", array)
    for start, stop in ((-1, 2), (3, 2), (0, 11)):
        with pytest.raises(InputError, match="expected 0 <= start <= stop <= 10"):
            Entry("w", "", "float32", (10,), start, stop)
    with pytest.raises(InputError, match="step=-1"):
        checkpoint.begin(tmp_path, -1)
    with pytest.raises(InputError, match="index=2 of=2"):
        checkpoint.write_shard(tmp_path, 2, 2, [])
    with pytest.raises(InputError, match="elements 0 to 10 of 'w' are given twice"):
        checkpoint.write_shard(tmp_path, 0, 2, [whole("w", W), whole("w", W)])
    with pytest.raises(InputError, match="directory that begin returned for step 3"):
        checkpoint.commit(tmp_path, 3, [])
    with pytest.raises(InputError, match="directory that begin returned"):
        checkpoint.abandon(tmp_path)
    assert names_in(tmp_path) == []

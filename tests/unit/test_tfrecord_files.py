"""TFRecord files and tf.train.Example, against bytes that tensorboard and protobuf wrote (tfrecord_fixture.py)."""

import base64
import contextlib
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
from tfrecord_fixture import FEATURES, SIZES, record

from allred.data import example, make_example, tfrecord, tfrecord_files, write_tfrecord
from allred.errors import DataError, InputError

FIXTURE = json.loads(pathlib.Path(__file__).with_name("tfrecord.json").read_text())
FOREIGN = {name: base64.b64decode(text) for name, text in FIXTURE.items()}
RECORDS = [record(size) for size in SIZES]


# ---- CRC-32C: the vectors of RFC 3720, B.4


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_known_checksums(data, crc):
    assert tfrecord_files.masked_crc32c(data) == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def without(package, code):
    """Run code in a Python that cannot import a package; its stdout and stderr."""
    code = f"import sys; sys.modules[{package!r}] = None; from allred import data\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)


def test_without_google_crc32c_the_error_names_the_extra(path):
    for call in (f"tfrecord({str(path)!r})", f"write_tfrecord({str(path)!r}, [b''])"):
        result = without("google_crc32c", f"try: data.{call}\nexcept ImportError as error: print(error)")
        assert "TFRecord files need google-crc32c: pip install google-crc32c protobuf" in result.stdout


def test_without_protobuf_the_error_names_the_extra():
    for call in ("example(b'')", "make_example({})"):
        result = without("google.protobuf", f"try: data.{call}\nexcept ImportError as error: print(error)")
        assert "need Google's protobuf: pip install google-crc32c protobuf" in result.stdout


# ---- TFRecord


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.tfrecord"
    path.write_bytes(FOREIGN["tfrecord"])
    return path


def offset_of(number):
    return sum(16 + size for size in SIZES[:number])


def test_files_of_others_and_for_others(path, tmp_path):
    reader = tfrecord(path)
    assert list(reader) == list(reader) == RECORDS
    assert reader.skipped == 0
    assert write_tfrecord(tmp_path / "own", iter(RECORDS)) == len(RECORDS)
    assert (tmp_path / "own").read_bytes() == FOREIGN["tfrecord"]
    (tmp_path / "empty").write_bytes(b"")
    assert list(tfrecord([path, str(tmp_path / "empty"), path])) == RECORDS * 2


def damage(path, place, byte=0x40):
    content = bytearray(path.read_bytes())
    content[place] ^= byte
    path.write_bytes(content)


@pytest.mark.parametrize("place", [12, 12 + 299, 12 + 300, 12 + 303])
def test_a_wrong_record_is_named_or_left_out(path, place):
    damage(path, offset_of(7) + place)
    got = []
    pattern = (
        rf"{re.escape(str(path))}: record at offset {offset_of(7)}: "
        r"expected masked CRC 0x[0-9a-f]{8} of 300 bytes of data, got 0x[0-9a-f]{8}"
    )
    with pytest.raises(DataError, match=pattern):
        got.extend(tfrecord(path))
    assert got == RECORDS[:7]
    reader = tfrecord([path, path], corrupt="skip")
    left = RECORDS[:7] + RECORDS[8:]
    with pytest.warns(RuntimeWarning, match=pattern) as caught:
        assert list(reader) == left * 2
    assert len(caught) == 1
    assert reader.skipped == 2
    assert list(reader) == left * 2  # it has been said
    assert reader.skipped == 2


@pytest.mark.parametrize("place", [0, 7, 8, 11])
def test_behind_a_wrong_length_nothing_can_be_found(path, place):
    damage(path, offset_of(4) + place)
    pattern = rf"record at offset {offset_of(4)}: expected masked CRC .* of the length, got .*; "
    with pytest.raises(DataError, match=f"{pattern}the following records cannot be located"):
        list(tfrecord(path))
    reader = tfrecord([path, path], corrupt="skip")
    rest = len(FOREIGN["tfrecord"]) - offset_of(4)
    with pytest.warns(RuntimeWarning, match=f"{pattern}the rest of this file, {rest} bytes, is skipped") as caught:
        assert list(reader) == RECORDS[:4] * 2
    assert len(caught) == 2
    assert reader.skipped == 2


def test_every_cut_is_corruption(path):
    whole = path.read_bytes()
    ends = {offset_of(number) for number in range(len(SIZES))}
    for end in [*range(offset_of(6)), len(whole) - 1, len(whole) - 5, len(whole) - 1003]:
        path.write_bytes(whole[:end])
        number = sum(e <= end for e in ends) - 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            reader = tfrecord(path, corrupt="skip")
            assert list(reader) == RECORDS[:number]
        assert reader.skipped == len(caught) == (end not in ends)
        if end not in ends:
            with pytest.raises(DataError, match=rf"offset {max(e for e in ends if e <= end)}: expected .* got"):
                list(tfrecord(path))


def test_every_flipped_bit_is_found(path):
    whole = path.read_bytes()
    for place in range(0, offset_of(7), 3):
        path.write_bytes(whole)
        damage(path, place, 1 << place % 8)
        with pytest.raises(DataError, match="record at offset"):
            list(tfrecord(path))


def test_a_length_that_would_fill_memory_is_not_tried(path):
    length = struct.pack("<Q", 2**62)
    path.write_bytes(length + struct.pack("<I", tfrecord_files.masked_crc32c(length)) + b"abc")
    with pytest.raises(DataError, match=rf"expected {2**62} bytes of data and 4 of CRC, got 3: the file is cut short"):
        list(tfrecord(path))


def test_other_errors(path, tmp_path):
    path.write_bytes(b"\x1f\x8b\x08" + bytes(30))
    with pytest.raises(DataError, match="looks compressed with gzip: unpack it first"):
        list(tfrecord(path))
    with pytest.raises(InputError, match="corrupt='ignore' must be one of 'raise', 'skip'"):
        tfrecord(path, corrupt="ignore")
    with pytest.raises(InputError, match="at least one file"):
        tfrecord([])
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR)), pytest.raises(DataError, match="pipe: expected a regular file"):
        list(tfrecord(tmp_path / "pipe"))
    with pytest.raises(FileNotFoundError, match="missing"):
        list(tfrecord(tmp_path / "missing"))


# ---- tf.train.Example


def check_features(got):
    assert set(got) == set(FEATURES)
    for name, values in FEATURES.items():
        assert got[name].tolist() == values
        assert got[name].ndim == 1
    kinds = {name: array.dtype for name, array in got.items() if name != "empty"}
    assert kinds == {"label": np.int64, "image": object, "weights": np.float32, "größe": np.int64, "one": np.float32}


@pytest.mark.parametrize("name", ["example", "example_not_packed"])
def test_examples_that_protobuf_wrote(name):
    check_features(example(FOREIGN[name]))


def test_examples_of_our_own():
    check_features(example(make_example(FEATURES)))
    features = {
        "scalar": 3.5,
        "matrix": np.arange(6, dtype=np.uint8).reshape(2, 3),
        "flags": [True, False],
        "half": np.ones(2, np.float16),
        "text": "grün",
        "texts": ["a", "b"],
        "array": np.array([["c"], ["d"]]),
        "objects": np.array([b"a", b"b\0"], object),
    }
    got = example(make_example(features))
    assert {name: (array.dtype.name, array.tolist()) for name, array in got.items()} == {
        "scalar": ("float32", [3.5]),
        "matrix": ("int64", [0, 1, 2, 3, 4, 5]),
        "flags": ("int64", [1, 0]),
        "half": ("float32", [1.0, 1.0]),
        "text": ("object", ["grün".encode()]),
        "texts": ("object", [b"a", b"b"]),
        "array": ("object", [b"c", b"d"]),
        "objects": ("object", [b"a", b"b\0"]),
    }
    assert example(b"") == example(make_example({})) == {}


def test_the_last_of_two_counts_and_other_fields_are_passed_over():
    two = make_example({"a": 1}) + make_example({"a": 2, "b": 3})
    other = b"\x10\x05" + b"\x1d\x00\x00\x00\x00" + b"\x21" + bytes(8) + b"\x2a\x01x"
    assert {name: array.tolist() for name, array in example(other + two).items()} == {"a": [2], "b": [3]}


def test_long_lists():
    features = {"floats": np.linspace(-1, 1, 784, dtype=np.float32), "ids": np.arange(-300, 300), "words": [b"x"] * 99}
    got = example(make_example(features))
    assert {name: array.dtype for name, array in got.items()} == {
        "floats": np.float32,
        "ids": np.int64,
        "words": object,
    }
    assert all(got[name].tolist() == list(features[name]) for name in features)
    assert all(array.flags.writeable for array in got.values())


def test_invalid_examples_are_errors():
    with pytest.raises(
        DataError, match=r"tf.train.Example: expected a serialized message, got 7 bytes that begin with b'"
    ):
        example(b"\xff\xd8\xffJPEG")


@pytest.mark.parametrize("name", ["example", "example_not_packed"])
def test_whatever_the_bytes_are_it_is_features_or_an_error(name):
    good = FOREIGN[name]
    chance = np.random.default_rng(0)
    for trial in range(3000):
        bad = bytearray(good[: chance.integers(len(good) + 1)] if trial % 2 else good)
        for _ in range(chance.integers(1, 4)):
            if bad:
                bad[chance.integers(len(bad))] = chance.integers(256)
        with contextlib.suppress(DataError):
            assert all(array.ndim == 1 for array in example(bytes(bad)).values())


@pytest.mark.parametrize("value", [None, 1j, [b"a", 1.0], np.array([2**64 - 1], np.uint64), 2**70, [["a"], ["b", "c"]]])
def test_features_that_cannot_be_written(value):
    with pytest.raises(InputError, match="'x'"):
        make_example({"x": value})

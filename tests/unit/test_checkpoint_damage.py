"""Every damage of a checkpoint is told, with the file, and with what to restore instead."""

import json
import os
import sys

import ml_dtypes
import numpy as np
import pytest
from checkpoints import M, W, bits, piece, save, save_one

import allred
from allred import checkpoint, testing
from allred.checkpoint import files, whole
from allred.errors import CheckpointError


@pytest.fixture
def damaged(tmp_path):
    """An older and a newer checkpoint, of which the newer one is to be damaged."""
    older = save_one(tmp_path, 1)
    return older, save(tmp_path, 2, [piece("w", W, 0, 5)], [piece("w", W, 5, 10), whole("w", M, "m")])


def flip(path, position, bit):
    """In place: ext4 puts a truncated and rewritten file on disk at once, and here are thousands."""
    with open(path, "r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        byte = file.read(1)[0] ^ (1 << bit)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte]))


def test_every_flipped_bit_is_found(damaged):
    """One bit of every byte of every file. Some in the manifest change nothing: the case of a hex digit of \\u00e9."""
    older, path = damaged
    rng, unseen, good = np.random.default_rng(0), 0, checkpoint.read_checkpoint(path)
    for file in sorted(path.iterdir()):
        for position in range(file.stat().st_size):
            bit = int(rng.integers(8))
            flip(file, position, bit)
            found = checkpoint.verify(path)
            assert checkpoint.newest(path.parent) in (older, path)
            if found:
                with pytest.raises(CheckpointError) as told:
                    checkpoint.read_checkpoint(path)
                assert str(told.value) == f"{found[0]}; restore {older}, which is complete and undamaged"
                assert str(file) in found[0]
            else:
                unseen += 1
                assert file.name == "manifest.json"
                back = checkpoint.read_checkpoint(path)
                assert (back.step, back.meta, back.params.keys()) == (good.step, good.meta, good.params.keys())
            flip(file, position, bit)
    assert checkpoint.verify(path) == []
    assert unseen <= 3


@pytest.mark.parametrize(
    "name", ["manifest.json", "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]
)
def test_a_truncated_longer_or_missing_file_is_found_and_is_not_the_newest(damaged, name):
    older, path = damaged
    raw = (path / name).read_bytes()
    for content in (b"", raw[:1], raw[: len(raw) // 2], raw[:-1], raw + b"x", None):
        if content is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{path / name}.*; restore {older}, which is complete"):
            checkpoint.read_checkpoint(path)
        assert len(checkpoint.verify(path)) == 1
        assert checkpoint.newest(path.parent) == older
        assert checkpoint.list_complete(path.parent) == [older]


def test_the_error_reports_that_no_other_checkpoint_is_complete(damaged):
    older, path = damaged
    flip(older / "shard-00000-of-00001.safetensors", -1, 0)
    flip(path / "shard-00000-of-00002.safetensors", -1, 0)
    with pytest.raises(CheckpointError, match=f"no other checkpoint in {path.parent} is complete"):
        checkpoint.read_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"nowhere.*No such file or directory"):
        checkpoint.read_checkpoint(path.parent / "nowhere")


def rewrite(path, **changes):
    """Change the manifest, with the right checksum."""
    content = {**json.loads((path / "manifest.json").read_bytes()), **changes}
    del content["checksum"]
    text = json.dumps({**content, "checksum": files._content_checksum(content)})
    (path / "manifest.json").write_text(text)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"version": 2},
            "has version 2 of the format, but this allred reads version 1; install the allred that wrote it",
        ),
        ({"format": "x"}, "json is 'x'; expected 'allred checkpoint'"),
        ({"shards": [{}]}, "does not have the fields that allred writes: KeyError"),
        ({"shards": []}, None),
    ],
)
def test_a_manifest_of_another_version_or_kind(damaged, changes, text):
    _, path = damaged
    rewrite(path, **changes)
    if text is None:
        assert checkpoint.read_checkpoint(path).params == {}  # the rewriting itself is no damage
    else:
        with pytest.raises(CheckpointError, match=text):
            checkpoint.read_checkpoint(path)


@pytest.mark.parametrize("text", ["[]", "1", "{}", "[" * 10**5, "\udc80", '{"version": 1}'])
def test_a_manifest_that_is_something_else(damaged, text):
    _, path = damaged
    (path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        checkpoint.read_checkpoint(path)


def test_bfloat16_without_ml_dtypes(tmp_path, monkeypatch):
    path = save(tmp_path, 1, [whole("w", bits((4,), ml_dtypes.bfloat16))])
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    save_one(tmp_path, 0)  # which is not restored instead
    opt = allred.distributed(allred.optim.SGD(lr=0.1))
    for call in (
        lambda: checkpoint.read_checkpoint(path),
        lambda: checkpoint.read_newest(tmp_path),
        lambda: testing.threads(1, lambda: opt.restore(tmp_path, {"w": np.zeros(4)})),
    ):
        with pytest.raises(CheckpointError, match="holds bfloat16, which needs ml_dtypes; pip install ml_dtypes"):
            call()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "v"}, r'the file does not have tensor \["v", "", 0, 10\]'),
        ({"dtype": "int32"}, r"is float32 \(10,\), expected int32 \(10,\)"),
        ({"shape": [5, 2]}, r"is float32 \(10,\), expected float32 \(5, 2\)"),
    ],
)
def test_a_manifest_that_describes_other_tensors(tmp_path, change, text):
    path = save(tmp_path, 1, [whole("w", bits((10,), np.float32))])
    [shard] = json.loads((path / "manifest.json").read_bytes())["shards"]
    [entry] = shard["entries"]
    rewrite(path, shards=[{**shard, "entries": [{**entry, **change}]}])
    with pytest.raises(CheckpointError, match=f"differs from its manifest: .*{text}"):
        checkpoint.read_checkpoint(path)

"""Writes tests/unit/tfrecord.json: TFRecord files and Examples made by others, for test_tfrecord_files.py.

The records by tensorboard's RecordWriter, the Examples by Google's protobuf; tensorboard's reader reads ours. Run it
where both are installed, with this project's root on PYTHONPATH: python tests/unit/tfrecord_fixture.py
"""

import base64
import io
import json
import pathlib
import sys
import tempfile

SIZES = (0, 1, 3, 8, 63, 64, 65, 300, 1000)
FEATURES = {
    "label": [3, -1, 0, 127, 128, 2**63 - 1, -(2**63)],
    "image": [b"", b"\x00\xff\x80", b"abc\x00"],
    "weights": [0.0, -1.5, 3.25, float("inf")],
    "größe": [300],
    "empty": [],
    "one": [2.5],
}


def record(size):
    """`size` bytes, no two sizes alike."""
    return bytes((7 * i + size) % 256 for i in range(size))


def message_classes():
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="e.proto", package="t", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto
    for name, kind, packed in (
        ("BytesList", field.TYPE_BYTES, None),
        ("FloatList", field.TYPE_FLOAT, True),
        ("Int64List", field.TYPE_INT64, True),
        ("LooseFloatList", field.TYPE_FLOAT, False),
        ("LooseInt64List", field.TYPE_INT64, False),
    ):
        values = file.message_type.add(name=name).field.add(name="value", number=1, label=3, type=kind)
        if packed is not None:
            values.options.packed = packed
    for loose in ("", "Loose"):
        feature = file.message_type.add(name=f"{loose}Feature")
        feature.oneof_decl.add(name="kind")
        for number, name in enumerate(("BytesList", f"{loose}FloatList", f"{loose}Int64List"), start=1):
            feature.field.add(name=f"k{number}", number=number, label=1, type=11, type_name=f".t.{name}", oneof_index=0)
        features = file.message_type.add(name=f"{loose}Features")
        entry = features.nested_type.add(name="FeatureEntry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=1, type=field.TYPE_STRING)
        entry.field.add(name="value", number=2, label=1, type=11, type_name=f".t.{loose}Feature")
        kind = f".t.{loose}Features.FeatureEntry"
        features.field.add(name="feature", number=1, label=3, type=11, type_name=kind)
        example = file.message_type.add(name=f"{loose}Example")
        example.field.add(name="features", number=1, label=1, type=11, type_name=f".t.{loose}Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return [message_factory.GetMessageClass(pool.FindMessageTypeByName(f"t.{name}Example")) for name in ("", "Loose")]


def serialized(message_class):
    message = message_class()
    for name, values in FEATURES.items():
        kind = 1 if isinstance((values or [0])[0], bytes) else 2 if isinstance((values or [0])[0], float) else 3
        lists = getattr(message.features.feature[name], f"k{kind}")
        lists.SetInParent()
        lists.value.extend(values)
    return message.SerializeToString(deterministic=True)


def main():
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New
    from tensorboard.summary.writer.record_writer import RecordWriter

    from allred import data

    packed, loose = (serialized(message_class) for message_class in message_classes())
    own = message_classes()[0].FromString(data.make_example(FEATURES)).features.feature
    assert {name: list(getattr(f, f.WhichOneof("kind") or "k3").value) for name, f in own.items()} == FEATURES
    written = io.BytesIO()
    writer = RecordWriter(written)
    for size in SIZES:
        writer.write(record(size))
    with tempfile.TemporaryDirectory() as directory:
        ours = pathlib.Path(directory) / "ours"
        assert data.write_tfrecord(ours, map(record, SIZES)) == len(SIZES)
        assert ours.read_bytes() == written.getvalue()
        reader = PyRecordReader_New(str(ours))
        for size in SIZES:
            reader.GetNext()
            assert reader.record() == record(size)
    found = {"tfrecord": written.getvalue(), "example": packed, "example_not_packed": loose}
    text = json.dumps({name: base64.b64encode(value).decode() for name, value in found.items()}, indent=1)
    pathlib.Path(__file__).with_name("tfrecord.json").write_text(text + "\n")
    print({name: len(value) for name, value in found.items()}, file=sys.stderr)


if __name__ == "__main__":
    main()

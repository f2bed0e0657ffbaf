"""`python -m allred checkpoint ls|show|verify DIR`: lists checkpoints, shows the content of one, verifies all bytes.

Does not start MPI. Exit code 0; 1: `verify` has found damage; 2: DIR is not and does not hold a checkpoint.
"""

import argparse
import io
import json
import os
import pathlib
import sys
import time

from allred import arrays
from allred.checkpoint.directory import examine, list_committed, list_unfinished, newest
from allred.checkpoint.entry import Entry
from allred.checkpoint.files import MANIFEST, Manifest, read_manifest
from allred.checkpoint.restore import verify
from allred.command_line import Parser, program
from allred.errors import CheckpointError
from allred.wording import count


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names are any text
    path = pathlib.Path(options.directory)
    try:
        found = _checkpoints(path)
        return {"ls": _ls, "show": _show, "verify": _verify}[options.command](path, found)
    except CheckpointError as error:
        print(f"{program('checkpoint')}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=program("checkpoint"), description="Inspect checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="ls|show|verify")
    for name, text in (
        ("ls", "print a line for each checkpoint; compares the lengths of the shards"),
        ("show", "print parameters and slots of a checkpoint: the given one, or the newest complete one"),
        ("verify", "read every byte of each checkpoint and print all damage"),
    ):
        directory = "the directory of all checkpoints of a training, or of one checkpoint"
        commands.add_parser(name, help=text, description=text).add_argument("directory", metavar="DIR", help=directory)
    return parser


def _checkpoints(path: pathlib.Path) -> list[pathlib.Path]:
    """Return `path`, or the checkpoints in it. Raises CheckpointError if there is none."""
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give the directory that checkpoints were saved to, or one of them")
    absolute = pathlib.Path(os.path.abspath(path))
    if (path / MANIFEST).exists() or absolute in list_committed(absolute.parent).values():
        return [path]
    if found := list(list_committed(path).values()):
        return found
    number = len(list_unfinished(path))
    unfinished = f", only {number} unfinished: being written, or left by a dead writer" if number else ""
    raise CheckpointError(f"{path} holds no checkpoint{unfinished}; they are directories named step-00000400 and so on")


def _ls(path: pathlib.Path, found: list[pathlib.Path]) -> int:
    print(f"{'step':>13}  {'saved':<19}  {'size':>10}  shards  state")
    for each in found:
        manifest, problem = examine(each)
        if manifest is None:
            row = f"{each.name:>13}  {'-':<19}  {'-':>10}  {'-':>6}"
        else:
            row = f"{manifest.step:>13}  {_time(manifest)}  {_amount(manifest):>10}  {len(manifest.shards):>6}"
        print(f"{row}  {f'damaged: {problem}' if problem else 'complete'}")
    for each in list_unfinished(path):
        print(f"{each.name}: unfinished: being written, or left by a dead writer")
    return 0


def _show(path: pathlib.Path, found: list[pathlib.Path]) -> int:
    chosen = path if found == [path] else newest(path)
    if chosen is None:
        raise CheckpointError(f"no checkpoint in {path} is complete; `verify` prints the damage")
    manifest, problem = examine(chosen)
    if manifest is None:
        raise CheckpointError(problem)
    tensors = {(entry.name, entry.slot): entry for shard in manifest.shards for entry in shard.entries}
    pickled = [entry for entry in tensors.values() if entry.is_pickled]
    params = [entry for entry in tensors.values() if not entry.slot]
    slots: dict[str, list[Entry]] = {}
    for entry in tensors.values():
        if entry.slot and not entry.is_pickled:
            slots.setdefault(entry.name, []).append(entry)
    print(f"{chosen}: step {manifest.step}, saved {_time(manifest)}, {_size(manifest)}")
    if problem:
        print(f"damaged: {problem}")
    print(f"meta: {json.dumps(manifest.meta)}")
    print(f"{count(len(params), 'parameter')}, {sum(entry.elements for entry in params)} numbers:")
    width = max((len(_printable(entry.name)) for entry in params), default=0)
    for param in params:
        listed = ", ".join(f"{_printable(entry.slot_name)} {_type(entry)}" for entry in slots.get(param.name, []))
        print(f"  {_printable(param.name):<{width}}  {_type(param)}{f'; slots: {listed}' if listed else ''}")
    for entry in pickled:
        what = "state of the session" if entry.is_extra else "state of the user's own optimizer"
        print(f"{what}, pickled: {arrays.amount(entry.elements)}")
    return 0


def _verify(path: pathlib.Path, found: list[pathlib.Path]) -> int:
    damaged = False
    for each in found:
        problems = verify(each)
        damaged = damaged or bool(problems)
        for line in problems or [f"complete and undamaged, {_size(read_manifest(each))}"]:
            print(f"{each.name or each}: {line}", flush=True)
    return int(damaged)


def _size(manifest: Manifest) -> str:
    return f"{_amount(manifest)} in {count(len(manifest.shards), 'shard')}"


def _amount(manifest: Manifest) -> str:
    return arrays.amount(sum(shard.nbytes for shard in manifest.shards))


def _time(manifest: Manifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))


def _type(entry: Entry) -> str:
    return f"{entry.dtype} {entry.shape}"


def _printable(name: str) -> str:
    return name if name.isprintable() and name else repr(name)

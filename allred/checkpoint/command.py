"""`python -m allred checkpoint ls|show|verify DIR`: which checkpoints there are, what one holds, whether it is right.

Needs no MPI. Exit code 0; 1: `verify` has found damage; 2: DIR is no checkpoint and holds none.
"""

import argparse
import io
import json
import os
import pathlib
import sys
import time
from typing import NoReturn

from allred import arrays
from allred.checkpoint.entry import Entry
from allred.checkpoint.manifest import NAME, Manifest, load
from allred.checkpoint.own import is_own_state
from allred.checkpoint.restoring import verify
from allred.checkpoint.root import damage, newest, present, unfinished
from allred.errors import CheckpointError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help lists what there is\n")


def main(arguments: list[str]) -> int:
    """Do what the arguments ask for; the exit code."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names are any text
    path = pathlib.Path(options.directory)
    try:
        found = _checkpoints(path)
        return {"ls": _ls, "show": _show, "verify": _verify}[options.what](path, found)
    except CheckpointError as error:
        print(f"python -m allred checkpoint: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m allred checkpoint", description="Look at checkpoints.")
    what = parser.add_subparsers(dest="what", required=True, metavar="ls|show|verify")
    directory = "of all checkpoints of a training, or of one of them"
    for name, text in (
        ("ls", "a line for each checkpoint; shards' lengths are compared"),
        ("show", "parameters and slots of the newest complete checkpoint, or of the one given"),
        ("verify", "read every byte of each, and say what is damaged"),
    ):
        what.add_parser(name, help=text, description=text).add_argument("directory", metavar="DIR", help=directory)
    return parser


def _checkpoints(path: pathlib.Path) -> list[pathlib.Path]:
    """The path itself, or those in it. Raises CheckpointError where there is none."""
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}; give the directory that checkpoints were saved to, or one of them")
    whole = pathlib.Path(os.path.abspath(path))
    if (path / NAME).exists() or whole in present(whole.parent).values():
        return [path]
    if found := list(present(path).values()):
        return found
    left = len(unfinished(path))
    begun = f", only {left} not complete: being written, or left by a writer that died" if left else ""
    raise CheckpointError(f"{path} holds no checkpoint{begun}; they are directories named step-00000400 and so on")


def _ls(path: pathlib.Path, found: list[pathlib.Path]) -> int:
    print(f"{'step':>13}  {'saved':<19}  {'size':>10}  shards  state")
    for each in found:
        wrong = damage(each)
        try:
            manifest = load(each)
        except CheckpointError:
            row = f"{each.name:>13}  {'-':<19}  {'-':>10}  {'-':>6}"
        else:
            nbytes = arrays.amount(sum(shard.nbytes for shard in manifest.shards))
            row = f"{manifest.step:>13}  {_when(manifest)}  {nbytes:>10}  {len(manifest.shards):>6}"
        print(f"{row}  {f'damaged: {wrong}' if wrong else 'complete'}")
    for each in unfinished(path):
        print(f"{each.name}: not complete: being written, or left by a writer that died")
    return 0


def _show(path: pathlib.Path, found: list[pathlib.Path]) -> int:
    chosen = path if found == [path] else newest(path)
    if chosen is None:
        raise CheckpointError(f"no checkpoint in {path} is complete; `verify` says what is damaged")
    manifest = load(chosen)
    tensors = {(entry.name, entry.slot): entry for shard in manifest.shards for entry in shard.entries}
    own = [entry for entry in tensors.values() if is_own_state(entry)]
    params = [entry for entry in tensors.values() if not entry.slot]
    print(f"{chosen}: step {manifest.step}, saved {_when(manifest)}, {_amount(manifest)}")
    if wrong := damage(chosen):
        print(f"damaged: {wrong}")
    print(f"meta: {json.dumps(manifest.meta)}")
    print(f"{len(params)} parameter{'s' * (len(params) != 1)}, {sum(entry.elements for entry in params)} numbers:")
    width = max((len(_name(entry.name)) for entry in params), default=0)
    for param in params:
        slots = [e for (name, slot), e in tensors.items() if name == param.name and slot and e not in own]
        listed = ", ".join(f"{_name(entry.slot)} {_kind(entry)}" for entry in slots)
        print(f"  {_name(param.name):<{width}}  {_kind(param)}{f'; slots: {listed}' if listed else ''}")
    for entry in own:
        what = "what the session added" if entry.slot == "extra" else "the state of the user's own optimizer"
        print(f"{what}, pickled: {arrays.amount(entry.elements)}")
    return 0


def _verify(path: pathlib.Path, found: list[pathlib.Path]) -> int:
    damaged = False
    for each in found:
        problems = verify(each)
        damaged = damaged or bool(problems)
        for line in problems or [f"complete and undamaged, {_amount(load(each))}"]:
            print(f"{each.name or each}: {line}", flush=True)
    return int(damaged)


def _amount(manifest: Manifest) -> str:
    count = len(manifest.shards)
    return f"{arrays.amount(sum(shard.nbytes for shard in manifest.shards))} in {count} shard{'s' * (count != 1)}"


def _when(manifest: Manifest) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))


def _kind(entry: Entry) -> str:
    return f"{entry.dtype} {entry.shape}"


def _name(name: str) -> str:
    return name if name.isprintable() and name else repr(name)

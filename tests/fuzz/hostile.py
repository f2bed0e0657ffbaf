"""Fuzzer of untrusted input: mutated bytes for the ports that listen and for the parsers of files.

    python tests/fuzz/hostile.py --seconds 1800          all targets, one after the other
    python tests/fuzz/hostile.py --targets page --seed 7 --executions 1000
    python tests/fuzz/hostile.py --targets page --input FILE          one input again

An input is a defect if the target raises another error than the documented ones, takes 10 s, uses more memory than its
bound, or lets a peer without the secret reach pickle. It is written to build/hostile/TARGET-HASH, and printed.

The targets are in hostile_targets.py. Inputs are chosen by coverage: an input that reaches a new line of allred is
mutated further. With atheris (`pip install atheris`) libFuzzer does this, from a seed of its own; without it, or with
--seed, this program itself.
"""

import argparse
import faulthandler
import hashlib
import importlib.util
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc

HERE = pathlib.Path(__file__).parent
FOUND = HERE.parents[1] / "build" / "hostile"
LIMIT_S, HANG_S, ADDRESS_SPACE, LONGEST = 10, 120, 3 << 30, 1 << 15
INSTRUMENTED = [  # for libFuzzer; all of allred takes 20 s
    "allred.runtime", "allred.launch", "allred.monitor", "allred.checkpoint", "allred.timeline", "allred.run.host_list",
    "allred.cluster.spec", "allred.data", "allred.config", "allred.watch.rank", "allred.watch.job_directory",
]  # fmt: skip
_NUMBERS = ["0", "-1", "1e999", "2147483648", "9223372036854775808", "9" * 5000, "NaN", "Infinity", "00", "1.5", "true"]
_VALUES = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**30,
    1.5,
    float("inf"),
    float("nan"),
    "",
    "\ud800",
    "x",
    [],
    {},
    [[]],
    [1],
]
_PIECES = [
    b"\0", b"\xff", b"\n", b"\r\n", b"=", b":", b",", b'"', b"{}", b"[]", b"null", b"NaN", b"-1", b"\xff\xff\xff\x7f",
    b"\0\0\0\x80", b"\xff" * 8, b"\xed\xa0\x80", b"[" * 4000, b'{"a":' * 2000, b"9" * 5000, b" " * 4200,
    b"(\xff\xff\xff\x0f",
]  # fmt: skip


class DefectError(Exception):
    """An input for which a target does not do what it promises."""


class Hang(BaseException):
    pass


def execute(target, data: bytes) -> None:
    """Run a target. Raises DefectError."""

    def hang(number, frame):
        raise Hang

    before, (left_s, _) = signal.signal(signal.SIGALRM, hang), signal.setitimer(signal.ITIMER_REAL, LIMIT_S, 1)
    tracemalloc.start()
    try:
        target.run(data)
    except target.expected:
        pass
    except Hang as error:
        raise DefectError(f"takes {LIMIT_S} s") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise DefectError(f"{type(error).__name__}: {error}"[:300]) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if peak > (bound := target.nbytes + target.factor * len(data)):
        raise DefectError(f"uses {peak} bytes of memory for {len(data)} bytes; at most {bound} are allowed")


class Mutator:
    """Changes inputs at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, data: bytes, other: bytes) -> bytes:
        for _ in range(self._rng.choice((1, 1, 2, 4))):
            change = self._rng.choice(
                (self._bits, self._cut, self._insert, self._copy, self._number, self._json, self._json)
            )
            data = change(bytearray(data), other)[:LONGEST]
        return bytes(data)

    def _range(self, data: bytes) -> tuple[int, int]:
        at = self._rng.randint(0, len(data))
        return at, min(len(data), at + self._rng.choice((1, 2, 4, 8, 64, len(data))))

    def _bits(self, data: bytearray, other: bytes) -> bytes:
        for _ in range(self._rng.choice((1, 3)) if data else 0):
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return data

    def _cut(self, data: bytearray, other: bytes) -> bytes:
        first, last = self._range(data)
        del data[first:last]
        return data

    def _insert(self, data: bytearray, other: bytes) -> bytes:
        at = self._rng.randint(0, len(data))
        over = self._rng.choice((0, 0, 1, 4, 8))
        data[at : at + over] = self._rng.choice(_PIECES)
        return data

    def _copy(self, data: bytearray, other: bytes) -> bytes:
        """Repeat a part, or take one of another input."""
        source = data if self._rng.random() < 0.5 else other
        (first, last), at = self._range(source), self._rng.randint(0, len(data))
        data[at:at] = source[first:last] * self._rng.choice((1, 1, 2, 50))
        return data

    def _number(self, data: bytearray, other: bytes) -> bytes:
        if not (found := [*re.finditer(rb"\d+", data[:4096])]):
            return self._bits(data, other)
        match = self._rng.choice(found)
        data[match.start() : match.end()] = self._rng.choice(_NUMBERS).encode()
        return data

    def _json(self, data: bytearray, other: bytes) -> bytes:
        """Replace, remove or repeat a part of a JSON document in a line."""
        lines = bytes(data).split(b"\n")
        number = self._rng.randrange(len(lines))
        try:
            holder = [json.loads(lines[number])]
        except (ValueError, RecursionError):
            return self._copy(data, other)
        node, key = holder, 0
        while isinstance(node[key], (dict, list)) and node[key] and self._rng.random() < 0.8:
            node = node[key]
            key = self._rng.choice([*node]) if isinstance(node, dict) else self._rng.randrange(len(node))
        if self._rng.random() < 0.2 and node is not holder:
            del node[key]
        elif isinstance(node, list) and self._rng.random() < 0.2:
            node.append(node[key])
        else:
            node[key] = self._rng.choice(_VALUES)
        lines[number] = json.dumps(holder[0]).encode() if holder else b""
        return b"\n".join(lines)


class Lines:
    """The lines of allred that have run: `with lines: ...`; then `is_new` says whether one is new."""

    def __init__(self) -> None:
        self._seen, self._before = set(), 0

    def _trace(self, frame, event, argument):
        return self._line if "/allred/" in frame.f_code.co_filename else None

    def _line(self, frame, event, argument):
        self._seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    def __enter__(self) -> None:
        self._before = len(self._seen)
        sys.settrace(self._trace)

    def __exit__(self, *error) -> None:
        sys.settrace(None)

    @property
    def is_new(self) -> bool:
        return len(self._seen) > self._before


def report(name: str, data: bytes, error: DefectError) -> None:
    """Print a defect and keep its input."""
    FOUND.mkdir(parents=True, exist_ok=True)
    path = FOUND / f"{name}-{hashlib.sha1(data).hexdigest()[:8]}"
    path.write_bytes(data)
    place, trace = "", error.__cause__.__traceback__ if error.__cause__ else None
    while trace is not None:
        if "/allred/" in (file := trace.tb_frame.f_code.co_filename):
            place = f" in {file.rpartition('/allred/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    print(f"{name}: {error}{place}; input: {path} {data[:80]!r}", flush=True)


def fuzz(name: str, target, seed: int, seconds: float, executions: int) -> tuple[int, int]:
    """Run a target with changed inputs. Return the numbers of executions and of different defects."""
    rng, corpus, lines, defects, until = (
        random.Random(f"{seed} {name}"),
        target.seeds(),
        Lines(),
        set(),
        time.monotonic() + seconds,
    )
    mutate, queue, number = Mutator(rng), [b"", *corpus], 0
    while number < executions and time.monotonic() < until:
        data = queue.pop() if queue else mutate(rng.choice(corpus), rng.choice(corpus))
        number += 1
        try:
            with lines:
                execute(target, data)
        except DefectError as error:
            where = error.__cause__.__traceback__ if error.__cause__ else None
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            kind = (str(error)[:20], where and where.tb_lineno)
            if kind not in defects:
                defects.add(kind)
                report(name, data, error)
        if lines.is_new and data not in corpus:
            corpus.append(data)
    return number, len(defects)


def fuzz_by_atheris(name: str, target, seconds: float) -> None:
    """The same by libFuzzer; ends this process. Prints the executions of each second line to stderr."""
    import atheris

    rng, corpus = random.Random(), FOUND / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    mutate, defects, inputs = Mutator(rng), set(), [*corpus.iterdir()]

    def one(data: bytes) -> None:
        try:
            execute(target, data)
        except DefectError as error:
            if (kind := re.sub(r"[\d'\"].*", "", str(error))[:40]) not in defects:
                defects.add(kind)
                report(name, data, error)

    def custom(data: bytes, most: int, seed: int) -> bytes:
        if seed % 2:
            return atheris.Mutate(data, most)
        return mutate(data, rng.choice(inputs).read_bytes())[:most]

    options = [f"-max_total_time={int(seconds)}", f"-max_len={LONGEST}", "-rss_limit_mb=0", "-timeout=60",
               "-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={FOUND}/{name}-", str(corpus)]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=custom)
    atheris.Fuzz()


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # files in memory are removed
    sys.path.insert(0, str(HERE))
    guided = arguments.seed is None and arguments.input is None
    with_atheris = guided and importlib.util.find_spec("atheris") is not None
    if with_atheris and not arguments.child:
        return _children(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, -1))
    if with_atheris:
        import atheris

        with atheris.instrument_imports(include=INSTRUMENTED, enable_loader_override=False):
            import hostile_targets
    else:
        import hostile_targets
    faulthandler.enable()
    hostile_targets.quiet()
    seed, failed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed, 0
    names = arguments.targets or [*hostile_targets.TARGETS]
    print(f"seed {seed}", flush=True)
    try:
        for name in names:
            target = hostile_targets.TARGETS[name]
            if arguments.input:
                execute(target, arguments.input.read_bytes())
            elif with_atheris:
                fuzz_by_atheris(name, target, arguments.seconds)
            else:
                share = (arguments.seconds / len(names)) if arguments.seconds else float("inf")
                number, defects = fuzz(name, target, seed, share, arguments.executions or sys.maxsize)
                failed += defects
                print(f"{name}: {number} executions, {defects} defects", flush=True)
    finally:
        hostile_targets.remove_directory()
    print(f"{len(names)} targets, {failed} defects")
    return bool(failed)


def _children(arguments: argparse.Namespace) -> int:
    """Run a process of atheris for each target."""
    import hostile_targets

    names, failed = arguments.targets or [*hostile_targets.TARGETS], 0
    for name in names:
        words = ["--child", "--targets", name, "--seconds", str(arguments.seconds / len(names))]
        with tempfile.TemporaryDirectory(prefix="allred-hostile-", dir=hostile_targets.memory()) as directory:
            env = {**os.environ, "HOSTILE_DIRECTORY": directory}  # atheris ends the process without `finally`
            limit = ["timeout", "--foreground", "-k", "5", str(arguments.seconds / len(names) + HANG_S)]
            done = subprocess.run([*limit, sys.executable, __file__, *words], capture_output=True, text=True, env=env)
        found = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
        defects = [line for line in done.stdout.splitlines() if line.startswith(f"{name}: ")]
        crashed = found is None or done.returncode != 0
        failed += len(defects) + crashed
        print(*defects, *([done.stdout, done.stderr[-3000:]] if crashed else []), sep="\n", end="\n" * bool(defects))
        print(f"{name}: {found[1] if found else '?'} executions, {len(defects) + crashed} defects", flush=True)
    print(f"{len(names)} targets, {failed} defects")
    return bool(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0, help="duration of all targets together")
    parser.add_argument("--executions", type=int, default=0, help="inputs of each target at most")
    parser.add_argument("--seed", type=int, help="of the inputs; without atheris")
    parser.add_argument("--targets", nargs="+", help="only these")
    parser.add_argument("--input", type=pathlib.Path, help="run the target with the bytes of this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Ranks that are children of multiprocessing: two tasks of allred.Server for each case, all at once. Prints as JSON the
exit code and standard error of each. Arguments: the start method, a directory, the cases."""

import json
import multiprocessing
import os
import pathlib
import sys
import threading
import time

import numpy as np
from ports import reserved_ports

import allred


def end(index, queue):
    queue.put(index)  # multiprocessing sends it at the end of the process
    if index == 0:
        time.sleep(1)  # the other has left


def end_with_callback(index, queue):
    from allred.watch import exit_callbacks

    exit_callbacks.register(lambda error: queue.put(("callback", index, str(error))))


def shut_down(index, queue):
    allred.shutdown()
    if index == 0:
        time.sleep(1)


def thread(index, queue):
    def reduce():
        time.sleep(0.5)
        queue.put(float(allred.allreduce(np.ones(1), op=allred.Sum)[0]))

    threading.Thread(target=reduce).start()


def child_of_rank(index, queue):
    child = multiprocessing.get_context("fork").Process(target=queue.put, args=("child",))
    child.start()
    child.join()
    assert child.exitcode == 0
    allred.barrier()


def fails(index, queue):
    if index == 1:
        raise KeyError("no such word")
    allred.barrier()


def exits(index, queue):
    if index == 1:
        try:
            sys.exit(2)
        finally:
            time.sleep(0.1)
    allred.barrier()


def exits_with_text(index, queue):
    if index == 1:
        raise SystemExit("no data")
    allred.barrier()


def exits_after_error(index, queue):
    """As the function that torch.multiprocessing.spawn wraps around its target."""
    try:
        fails(index, queue)
    except Exception:
        sys.exit(1)


def dies(index, queue):
    if index == 1:
        os._exit(3)
    allred.barrier()


def task(case, cluster, index, queue, directory):
    where = f"{directory}/{case}-{index}"
    os.dup2(os.open(where, os.O_WRONLY | os.O_CREAT), 2)
    os.environ["ALLRED_TIMELINE"] = f"{directory}/timeline-{case}"
    allred.Server(cluster, "worker", index)
    allred.barrier()
    globals()[case](index, queue)


def main(method, directory, *cases):
    context = multiprocessing.get_context(method)
    queue, started = context.SimpleQueue(), {}  # `put` returns when the value is in the pipe, also at the exit
    ports = reserved_ports(2 * len(cases))
    for number, case in enumerate(cases):
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[2 * number : 2 * number + 2]]}
        for index in range(2):
            started[case, index] = context.Process(target=task, args=(case, cluster, index, queue, directory))
    try:
        raise ValueError("an exception that is handled while the children are forked is not theirs")
    except ValueError:
        for process in started.values():
            process.start()
    for process in started.values():
        process.join(60)
        process.kill()
    ends = {"-".join(map(str, key)): process.exitcode for key, process in started.items()}
    found = {name: (code, pathlib.Path(directory, name).read_text()) for name, code in ends.items()}
    results = []
    while not queue.empty():
        results.append(queue.get())
    print(json.dumps([found, results]))


if __name__ == "__main__":
    main(*sys.argv[1:])

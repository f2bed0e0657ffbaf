"""Ranks of torch.distributed that are children of torch.multiprocessing, for each start method and case at once.
Prints the end of each job. Arguments: a directory for the files of the rendezvous; pairs method:case."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def end(rank):
    if rank == 0:
        time.sleep(1)  # the other has left


def destroy(rank):
    dist.destroy_process_group()
    end(rank)


def fails(rank):
    if rank == 1:
        raise KeyError("no such word")
    dist.barrier()


def run(rank, case, where):
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent reports its error
    dist.init_process_group("allred", init_method=f"file://{where}", rank=rank, world_size=2)
    dist.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == 2
    globals()[case](rank)


def main(directory, *jobs):
    started = {}
    for job in jobs:
        method, case = job.split(":")
        where = f"{directory}/{method}-{case}"
        started[job] = mp.start_processes(run, (case, where), nprocs=2, join=False, start_method=method)
    for job, context in started.items():
        try:
            while not context.join(timeout=60):
                pass
            print(job, "ended", [process.exitcode for process in context.processes], flush=True)
        except mp.ProcessRaisedException as error:
            print(job, "raised", "KeyError: 'no such word'" in str(error), flush=True)  # of either rank


if __name__ == "__main__":
    main(*sys.argv[1:])

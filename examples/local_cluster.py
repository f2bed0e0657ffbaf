"""Two tasks on two ports of this machine, hello from each. In two terminals, in any order (MPICH only):

    python examples/local_cluster.py --task_index=0
    python examples/local_cluster.py --task_index=1

or both at once:

    mpirun -np 2 python examples/local_cluster.py

Each ends with its line, and sees the other's number:

    hello from /job:local/task:0 at localhost:2222, one of 2; the sum of their numbers is 1
"""

import argparse

import allred


def main():
    parser = argparse.ArgumentParser(description="Two tasks on one machine")
    parser.add_argument("--hosts", default="localhost:2222,localhost:2223", help="host:port,host:port")
    parser.add_argument("--task_index", type=int, help="may be left out under mpirun")
    args = parser.parse_args()

    cluster = allred.ClusterSpec({"local": args.hosts.split(",")})
    job = None if args.task_index is None else "local"
    server = allred.Server(cluster, job_name=job, task_index=args.task_index)
    me = allred.task_index()
    total, where = allred.allreduce(me, op=allred.Sum), cluster.task_address("local", me)
    print(f"hello from /job:local/task:{me} at {where}, one of {allred.size()}; the sum of their numbers is {total}")
    server.join()


if __name__ == "__main__":
    main()

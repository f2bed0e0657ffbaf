"""A line through 1000 points, y = 2 x + 10 with noise, in TensorFlow's words, in two ways.

1  A client: a program that has two workers, which sit in join(), compute the gradients of half of the points each. In
   three terminals, in any order (MPICH only), or at once:

    python examples/linear_regression.py --job_name=worker --task_index=0
    python examples/linear_regression.py --job_name=worker --task_index=1
    python examples/linear_regression.py --job_name=client --task_index=0

    mpirun -np 3 python examples/linear_regression.py

2  Parameter servers: each worker trains by itself, the variables live on a server. By hand, with --job_name=ps and
   --job_name=worker, or at once:

    mpirun -np 3 python examples/linear_regression.py --ps_hosts=localhost:2221

The last line, of the client or of worker 0, is

    w = 2.00, b = 10.00: within 1 % of 2 and 10
"""

import argparse

import numpy as np

import allred

STEPS, LEARNING_RATE = 200, 0.2


def points():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 1000)
    return x, 2 * x + 10 + rng.normal(0, 0.1, 1000)


def gradients(params, x, y):
    """Of the mean squared error, for each parameter."""
    error = params["w"] * x + params["b"] - y
    return {"w": np.mean(2 * error * x), "b": np.mean(2 * error)}


def run_client(server, workers):
    x, y = points()
    parts = list(zip(np.array_split(x, workers), np.array_split(y, workers), strict=True))
    params = {"w": np.zeros(()), "b": np.zeros(())}
    opt = allred.optim.SGD(lr=LEARNING_RATE)
    with allred.connect(server.target) as session:
        for _ in range(STEPS):
            calls = []
            for task, part in enumerate(parts):
                with allred.device(f"/job:worker/task:{task}"):
                    calls.append(session.start(gradients, params, *part))
            found = [call.wait() for call in calls]
            opt.step(params, {name: np.mean([grads[name] for grads in found]) for name in params})
    tell(params)


def run_worker(cluster):
    x, y = points()
    with allred.device(allred.replica_device_setter(cluster=cluster)):
        params = {"w": allred.variable(0.0, name="w"), "b": allred.variable(0.0, name="b")}
    opt = allred.distributed(allred.optim.SGD(lr=LEARNING_RATE))  # the servers, in join(), hear of it from worker 0
    rng = np.random.default_rng(allred.task_index())
    opt.broadcast(params)
    for _ in range(STEPS):
        batch = rng.integers(len(x), size=200)
        opt.step(params, gradients(params, x[batch], y[batch]))

    opt.finish()  # no more steps of this worker;
    allred.barrier()  # all workers' steps are done;
    opt.pull(params)  # what came of them
    if allred.is_chief():
        tell(params)


def tell(params):
    w, b = float(params["w"]), float(params["b"])
    near = abs(w - 2) <= 0.02 and abs(b - 10) <= 0.1
    print(f"w = {w:.2f}, b = {b:.2f}: {'within 1 %' if near else 'MORE THAN 1 % OFF'} of 2 and 10")


def main():
    parser = argparse.ArgumentParser(description="Linear regression by a client, or with parameter servers")
    parser.add_argument("--worker_hosts", default="localhost:2222,localhost:2223", help="host:port,host:port")
    parser.add_argument("--client_hosts", default="localhost:2224", help="host:port, of the client")
    parser.add_argument("--ps_hosts", default="", help="host:port,host:port; then there is no client")
    parser.add_argument("--job_name", choices=["ps", "worker", "client"], help="may be left out under mpirun")
    parser.add_argument("--task_index", type=int, help="may be left out under mpirun")
    args = parser.parse_args()

    other = {"ps": args.ps_hosts.split(",")} if args.ps_hosts else {"client": args.client_hosts.split(",")}
    cluster = allred.ClusterSpec({"worker": args.worker_hosts.split(","), **other})
    server = allred.Server(cluster, job_name=args.job_name, task_index=args.task_index)
    if allred.job_name() == "client":
        run_client(server, cluster.num_tasks("worker"))
    elif allred.job_name() == "worker" and args.ps_hosts:
        run_worker(cluster)
    else:
        server.join()


if __name__ == "__main__":
    main()

"""One failure in a program of JAX; test_failures.py runs it. The argument says which."""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import optax

import allred
import allred.jax

allred.init(banner=False)
RANK = allred.rank()


@jax.jit
def program(x):
    """With enough work, before and beside the operation, that XLA runs the operation in one of its threads."""
    square = jnp.ones((512, 512)) * x[0]
    work = [(square @ (square + k)).sum() for k in range(8)]
    return allred.jax.allreduce(x + 0 * sum(work[:4]), name="loss") * 2 + 0 * sum(work)


@jax.jit
def loop(x):
    return jax.lax.fori_loop(0, 10**9, lambda _, x: allred.jax.allreduce(x), x)


program(jnp.ones(3))
match sys.argv[1]:
    case "mismatch":
        program(jnp.ones(3 + RANK))
    case "killed":
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        program(jnp.ones(3))
    case "raises":
        if RANK == 1:
            raise ArithmeticError("the reason")
        program(jnp.ones(3))
    case "late":
        if RANK == 1:
            time.sleep(60)
        program(jnp.ones(3))
    case "interrupted in a session":
        with allred.Session(max_steps=5) as session:
            optimizer = allred.jax.distributed(optax.sgd(0.1))
            training = allred.jax.TrainingState(params={"w": jnp.ones(3)}, opt_state=optimizer.init({"w": jnp.ones(3)}))
            session.track(params=training, optimizer=optimizer)
            while not session.should_stop():
                if RANK == 0 and session.step == 2:
                    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
                if RANK == 1 and session.step == 2:
                    time.sleep(2)
                gradient = {"w": program(jnp.ones(3))}
                training.params, training.opt_state = optimizer.step(training.params, training.opt_state, gradient)
        print("stopped at step", session.step, flush=True)
    case "interrupted" | "interrupted in a loop" as case:
        if RANK == 1 and case == "interrupted":
            time.sleep(60)
        if RANK == 0:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            with allred.jax.raise_allred_errors():
                program(jnp.ones(3)) if case == "interrupted" else loop(jnp.ones(3))
        except KeyboardInterrupt:
            print("KeyboardInterrupt in the program", flush=True)
            raise

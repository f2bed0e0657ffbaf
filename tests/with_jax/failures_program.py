"""One failure in a program of JAX; test_failures.py runs it. The argument says which."""

import os
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp

import allred
import allred.jax

allred.init(banner=False)
RANK = allred.rank()


@jax.jit
def program(x):
    return allred.jax.allreduce(x, name="loss") * 2


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
    case "interrupted":
        if RANK == 1:
            time.sleep(60)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            with allred.jax.own_errors():
                program(jnp.ones(3))
        except KeyboardInterrupt:
            print("KeyboardInterrupt in the program", flush=True)
            raise

"""What a test of `allred run` needs of a program: run_program.py WHAT [ARGUMENT]"""

import os
import pathlib
import signal
import sys
import time

import numpy as np

import allred


def runner():
    """The process id of `allred run`: its name is the end of the name of the job."""
    return int(pathlib.Path(os.environ["RUN_PID"]).read_text())


def train(on_step, before_step=lambda session: None, step_s=0.02):
    """Train 300 steps. on_step: called after each update with the session and the number of updates in this start; if
    it returns True, the steps are fast from now on."""
    directory = os.environ["DIRECTORY"]
    params, opt = {"w": np.zeros(2)}, allred.distributed(allred.optim.SGD(lr=1.0))
    with allred.Session(checkpoint_dir=directory, save_steps=1000, max_steps=300, log_steps=None) as session:
        session.track(params=params, optimizer=opt)
        begin = session.step
        while not session.should_stop():
            before_step(session)
            opt.step(params, {"w": -np.ones(2)})
            if on_step(session, opt.global_step - begin) is True:
                step_s = 0
            time.sleep(step_s)
    if allred.is_chief():
        assert (params["w"] == session.step).all()
        print(f"start {session.starts}: {allred.size()} ranks, steps {begin} to {session.step}", flush=True)


def main(what, argument=""):
    if what == "early":
        sys.exit(int(argument))
    if what == "handler":  # a program without allred, which handles the signal by itself
        time.sleep(0.5 * int(os.environ["RANK"]))  # the other ranks would be killed
        signal.signal(signal.SIGUSR1, lambda *_: print("received", flush=True) or sys.exit(0))
        os.environ["RANK"] == "0" and os.kill(runner(), signal.SIGUSR1)
        time.sleep(20)
    elif what == "orphans":  # two faults before init()
        time.sleep(float(sys.argv[2]))
        if os.environ["RANK"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)
    elif what == "around":  # a signal during init(), one behind the session
        os.environ["RANK"] == "0" and os.kill(runner(), signal.SIGUSR1)
        time.sleep(0.5)
    torch = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]  # before init()
    allred.init(banner=False)
    rank, last = allred.rank(), allred.size() - 1
    assert torch == [rank, allred.size(), allred.local_rank()], torch
    if what == "lines":
        for part in range(3):
            print(f"part{part} ", end="", flush=True)
            time.sleep(0.02 * (rank + 1))
        print(f"\nvariables {os.environ['OMP_NUM_THREADS']} {os.environ.get('ALLRED_MODE')}", flush=True)
        print(f"address {os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}", flush=True)
        print("no newline", end="", flush=True)
        print(f"error of {rank}", file=sys.stderr, flush=True)
    elif what == "raise" and rank == last:
        raise ValueError("wrong")
    elif what == "exit":
        sys.exit(5 * (rank == last))
    elif what == "kill" and rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "shutdown":
        allred.shutdown()
        allred.init(banner=False)
    elif what == "signal":  # in step 5 of the first start
        number = getattr(signal, argument)
        train(lambda _, step: step == 5 and rank == 0 and os.kill(runner(), number))
    elif what == "around":
        time.sleep(0.3)
        train(lambda *_: None)
        rank == 0 and os.kill(runner(), signal.SIGUSR1)
        time.sleep(0.5)
        allred.shutdown()
        rank == 0 and os.kill(runner(), signal.SIGUSR1)
        time.sleep(0.5)
    elif what == "deaf":  # a program that ignores the signals
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        allred.barrier()  # all ignore them
        for _ in range(2):
            if rank == 0:
                os.kill(runner(), signal.SIGINT)
            time.sleep(1)
        time.sleep(300)
    elif what == "resize":
        sizes = dict(zip(range(1, 9), argument.split(","), strict=False))

        def resize(session, step):
            if step == 5 and rank == 0 and (size := sizes.get(session.starts)):
                assert os.system(f"{sys.executable} -m allred resize tested {size}") == 0
            return session.starts not in sizes  # the last start

        train(resize)
    elif what == "hosts":  # the host file changes in each start; in the third one before a session is open
        sizes, file = dict(zip(range(1, 3), argument.split(","), strict=False)), pathlib.Path("hosts")
        if os.environ["ALLRED_STARTS"] == "3" and rank == 0:
            file.unlink()
            time.sleep(2.5)  # `allred run` reads the file once a second
            file.write_text(f"localhost slots={argument.split(',')[2]}\n")
            time.sleep(2.5)

        def change(session, step):
            if step == 5 and rank == 0 and (size := sizes.get(session.starts)):
                file.write_text(f"localhost slots={size}\n")
            while rank == 0 and step == 5 and session.starts in sizes and not session.asked:
                time.sleep(0.05)
            return session.starts == 4  # the last one

        train(change)
    elif what == "same":  # fails before the eighth step, in each start

        def fail(session):
            if session.step == 7 and rank == 0:
                raise ValueError("step 7 is wrong")

        train(lambda session, step: None, fail)
    elif what == "lose":  # runs until its host is cut off, in the first start

        def wait(session, step):
            if session.starts == 1 and step == 5 and rank == 0:
                pathlib.Path(argument).touch()
                time.sleep(0.5)

        train(wait)
    elif what == "no session":
        if rank == 0:
            assert os.system(f"{sys.executable} -m allred resize tested 3") != 0
        allred.barrier()


main(*sys.argv[1:])

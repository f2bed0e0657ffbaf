#!/bin/bash
# Trains on a PBS cluster (OpenPBS, PBS Professional). This script was not run on a cluster; it follows the manual.
# When the job is deleted or reaches its limit, the session writes a checkpoint; submit it again to continue.
#
#   qsub -v PROGRAM="train.py --epochs 10" pbs.sh      # your program; its session has a checkpoint_dir
#
# Lines that begin with #PBS are read by qsub.

#PBS -N allred
# 2 hosts with 4 ranks each, and 4 cores for each rank
#PBS -l select=2:ncpus=16:mpiprocs=4:ompthreads=4
#PBS -l walltime=01:00:00
# errors and output in one file
#PBS -j oe
# run it again from the start of this script if a host fails: the session resumes
#PBS -r y

set -uo pipefail
cd "$PBS_O_WORKDIR" || exit 2              # the directory of submission, which all hosts must see
VENV=${VENV:-.venv}
# shellcheck disable=SC1091  # not here when the script is checked
source "$VENV/bin/activate" || { echo "FAILURE: no Python environment at '$VENV'"; exit 2; }
export PYTHONUNBUFFERED=1
export CHECKPOINTS=${CHECKPOINTS:-checkpoints/${PBS_JOBNAME:-allred}}

# PBS kills the job at its walltime: SIGTERM, and some seconds later SIGKILL (kill_delay of the queue, 10 s by default).
# That may be too short for a checkpoint, so `timeout` sends SIGTERM 2 minutes before. The ranks write a checkpoint.
LIMIT_S=${LIMIT_S:-3480}

# `allred run` takes the hosts from PBS_NODEFILE, which has a line for each rank.
# shellcheck disable=SC2086  # PROGRAM is a program and its arguments
timeout --foreground --signal=TERM "$LIMIT_S" python -m allred run --restarts 3 ${PROGRAM:?set it with qsub -v} &
run=$!
trap 'kill -TERM $run' TERM                # qdel: `timeout` passes the signal on
wait $run
code=$?
while kill -0 $run 2> /dev/null; do        # a signal ends the first `wait`, and the ranks still write
  wait $run
  code=$?
done
[ $code -eq 0 ] && echo "SUCCESS: job $PBS_JOBID" || echo "FAILURE: job $PBS_JOBID, exit code $code"
[ $code -eq 124 ] && echo "the time limit is near; the checkpoint is in $CHECKPOINTS: submit the job again"
exit $code

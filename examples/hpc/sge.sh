#!/bin/bash
# Trains on a Grid Engine cluster. Before the time limit the session writes a checkpoint, and the job is queued again.
#
#   qsub sge.sh train.py --epochs 10           # your program; its session has a checkpoint_dir
#   qsub -pe mpi 32 sge.sh train.py            # qsub's options win over the lines below
#
# Lines that begin with #$ are read by qsub.

#$ -S /bin/bash
#$ -N allred
# start in the directory of submission, which all hosts must see
#$ -cwd
# errors and output in one file; a start after the first adds to it
#$ -j y
#$ -o $JOB_NAME-$JOB_ID.out
# a parallel environment and its slots, one for each rank; qconf -spl lists those of your site
#$ -pe mpi 8
# the limit of the job (it is killed), and two minutes earlier the signal SIGUSR1: time for a step and a checkpoint
#$ -l h_rt=01:00:00,s_rt=00:58:00
# start it again on another host if its host fails
#$ -r y

set -uo pipefail
VENV=${VENV:-.venv}
# shellcheck disable=SC1091  # not here when the script is checked
source "$VENV/bin/activate" || { echo "FAILURE: no Python environment at '$VENV'"; exit 2; }
export PYTHONUNBUFFERED=1

# The program reads its directory from here. The job number stays the same when the job is queued again.
export CHECKPOINTS=${CHECKPOINTS:-checkpoints/$JOB_ID}

# RESTARTED is 1 in every start after the first.
echo "job $JOB_ID, restarted ${RESTARTED:-0}: $NSLOTS ranks"

# `allred run` takes the hosts and slots from PE_HOSTFILE. --restarts: within this job, after a rank has failed.
python -m allred run --restarts 3 "$@" &
run=$!

# Grid Engine sends signals to all processes of the job, so `allred run` has it too and lets the ranks write.
requeue=no
trap 'requeue=yes' USR1
wait $run
code=$?
while kill -0 $run 2> /dev/null; do        # a signal ends the first `wait`, and the ranks still write
  wait $run
  code=$?
done

if [ $requeue = yes ] && [ $code -eq 0 ]; then
  echo "job $JOB_ID: checkpoint in $CHECKPOINTS; queued again"
  exit 99                                  # Grid Engine queues the job again
elif [ $code -eq 0 ]; then
  echo "SUCCESS: job $JOB_ID, $*"
else
  echo "FAILURE: job $JOB_ID, $*, exit code $code"
fi
exit $code

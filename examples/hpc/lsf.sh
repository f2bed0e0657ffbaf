#!/bin/bash
# Trains on an LSF cluster. This script was not run on a cluster; it follows the manual. Before the run limit the session
# writes a checkpoint, and the job is queued again.
#
#   bsub < lsf.sh                                      # with PROGRAM set below
#
# Lines that begin with #BSUB are read by bsub.

#BSUB -J allred
# 8 ranks, 4 on each host
#BSUB -n 8
#BSUB -R "span[ptile=4]"
# the run limit in hours:minutes; 2 minutes earlier (-wt) the job gets SIGUSR1 (-wa)
#BSUB -W 01:00
#BSUB -wa USR1
#BSUB -wt 2
#BSUB -o allred-%J.out
# exit code 99 queues the job again; the queue must be rerunnable
#BSUB -Q "99"
#BSUB -r

set -uo pipefail
PROGRAM=${PROGRAM:-train.py}
VENV=${VENV:-.venv}
# shellcheck disable=SC1091  # not here when the script is checked
source "$VENV/bin/activate" || { echo "FAILURE: no Python environment at '$VENV'"; exit 2; }
export PYTHONUNBUFFERED=1
export CHECKPOINTS=${CHECKPOINTS:-checkpoints/$LSB_JOBID}

# `allred run` takes the hosts and slots from LSB_MCPU_HOSTS.
# shellcheck disable=SC2086  # PROGRAM is a program and its arguments
python -m allred run --restarts 3 $PROGRAM &
run=$!
requeue=no
trap 'requeue=yes; kill -USR1 $run' USR1
trap 'kill -TERM $run' TERM                # bkill
wait $run
code=$?
while kill -0 $run 2> /dev/null; do        # a signal ends the first `wait`, and the ranks still write
  wait $run
  code=$?
done
if [ $requeue = yes ] && [ $code -eq 0 ]; then
  echo "job $LSB_JOBID: checkpoint in $CHECKPOINTS; queued again"
  exit 99
fi
[ $code -eq 0 ] && echo "SUCCESS: job $LSB_JOBID, $PROGRAM" || echo "FAILURE: job $LSB_JOBID, exit code $code"
exit $code

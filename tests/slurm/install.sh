#!/bin/bash
# Installs what tests/slurm needs: Slurm, munge, and PMIx for srun --mpi=pmix. Debian and Ubuntu, as root.
# Does nothing where all of it is there. Where it cannot it says why in one line; the exit code is 0 either way, and the
# tests skip with their own reason.
set -u
PATH=$PATH:/usr/sbin:/sbin

missing=
for program in munged slurmctld slurmd sbatch srun scontrol; do
  command -v "$program" > /dev/null || missing="$missing $program"
done
if [ -z "$missing" ]; then
  echo "slurm: already installed, $(slurmd -V)"
elif ! command -v apt-get > /dev/null; then
  echo "slurm: not installed (no$missing), and this system has no apt-get"
elif [ "$(id -u)" != 0 ]; then
  echo "slurm: not installed (no$missing), and installing needs root: sudo bash tests/slurm/install.sh"
else
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  install() {
    pmix=$(apt-cache pkgnames libpmix2 | sort | head -n 1)    # libpmix2, since Debian 13 and Ubuntu 24.04 libpmix2t64
    # shellcheck disable=SC2086  # no word where there is no such package
    timeout 300 apt-get install -y --no-install-recommends slurm-wlm munge $pmix > "$log" 2>&1
  }
  if install || { timeout 120 apt-get update > /dev/null 2>&1; install; }; then
    echo "slurm: installed, $(slurmd -V)"
  else
    echo "slurm: not installed, apt-get says: $(grep -E '^E:' "$log" | head -n 1)"
  fi
  rm -f "$log"
fi
exit 0

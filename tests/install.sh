#!/bin/bash
# tests/install.sh NAME COMMANDS PACKAGES...: installs Debian packages that a test tier needs, as root. Nothing if all
# COMMANDS (one argument, separated by spaces) are there. If it cannot, it says why in one line; the exit code is 0 in
# both cases, and the tests skip with their own reason. PACKAGE* stands for the first package with this beginning.
set -u
PATH=$PATH:/usr/sbin:/sbin
name=$1 commands=$2
shift 2

missing=
for command in $commands; do
  command -v "$command" > /dev/null || missing="$missing $command"
done
if [ -z "$missing" ]; then
  echo "$name: already installed"
elif ! command -v apt-get > /dev/null; then
  echo "$name: not installed (no$missing), and this system has no apt-get"
elif [ "$(id -u)" != 0 ]; then
  echo "$name: not installed (no$missing), and installing needs root: sudo apt-get install $*"
else
  export DEBIAN_FRONTEND=noninteractive
  exec 9> "${TMPDIR:-/tmp}/allred-tests-install.lock" && flock 9  # tiers may run at the same time
  log=$(mktemp)
  install() {
    packages=
    for package in "$@"; do
      case $package in
        *\*) package=$(apt-cache pkgnames "${package%\*}" | sort | head -n 1) ;;
      esac
      packages="$packages $package"
    done
    # shellcheck disable=SC2086  # no word where there is no such package
    timeout 300 apt-get install -y --no-install-recommends $packages > "$log" 2>&1
  }
  if install "$@" || { timeout 120 apt-get update > /dev/null 2>&1; install "$@"; }; then
    echo "$name: installed"
  else
    echo "$name: not installed, apt-get says: $(grep -E '^E:' "$log" | head -n 1)"
  fi
  rm -f "$log"
fi
exit 0

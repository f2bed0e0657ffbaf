#!/bin/bash
# Installs what tests/sge needs: Debian's gridengine. As root; nothing if it is there. If it cannot, it says why in one
# line; the exit code is 0 in both cases, and the tests skip with their own reason.
set -u
PATH=$PATH:/usr/sbin:/sbin

if command -v sge_qmaster sge_execd qsub > /dev/null && [ -x /usr/lib/gridengine/spoolinit ]; then
  echo "gridengine: already installed"
elif ! command -v apt-get > /dev/null; then
  echo "gridengine: not installed, and this system has no apt-get"
elif [ "$(id -u)" != 0 ]; then
  echo "gridengine: not installed, and installing needs root: sudo bash tests/sge/install.sh"
else
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  install() {
    timeout 300 apt-get install -y --no-install-recommends gridengine-master gridengine-exec gridengine-client \
      > "$log" 2>&1
  }
  if install || { timeout 120 apt-get update > /dev/null 2>&1; install; }; then
    echo "gridengine: installed"
  else
    echo "gridengine: not installed, apt-get says: $(grep -E '^E:' "$log" | head -n 1)"
  fi
  rm -f "$log"
fi
exit 0

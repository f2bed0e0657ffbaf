#!/bin/bash
# Installs what tests/spark needs: Java 17. As root; nothing if it is there. If it cannot, it says why in one line; the
# exit code is 0 in both cases, and the tests skip with their own reason.
set -u
package=openjdk-17-jre-headless
if command -v java > /dev/null; then
  echo "java: already installed"
elif ! command -v apt-get > /dev/null; then
  echo "java: not installed, and this system has no apt-get; install a Java of version 17 or later"
elif [ "$(id -u)" != 0 ]; then
  echo "java: not installed, and installing needs root: sudo apt-get install $package"
else
  export DEBIAN_FRONTEND=noninteractive
  log=$(mktemp)
  install() { timeout 300 apt-get install -y --no-install-recommends "$package" > "$log" 2>&1; }
  if install || { timeout 120 apt-get update > /dev/null 2>&1; install; }; then
    echo "java: installed"
  else
    echo "java: not installed, apt-get says: $(grep -E '^E:' "$log" | head -n 1)"
  fi
  rm -f "$log"
fi
exit 0

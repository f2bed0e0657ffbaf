#!/bin/bash
# Installs what tests/kubernetes needs: ssh and sshd. As root; nothing if they are there. If it cannot, it says why in
# one line; the exit code is 0 in both cases, and the tests skip with their own reason.
set -u
PATH=$PATH:/usr/sbin:/sbin
if command -v sshd > /dev/null && command -v ssh > /dev/null; then
  echo "sshd: already installed"
elif [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
  echo "sshd: not installed; installing needs root and apt-get"
else
  export DEBIAN_FRONTEND=noninteractive
  install() { timeout 300 apt-get install -y --no-install-recommends openssh-server openssh-client > /dev/null 2>&1; }
  if install || { timeout 120 apt-get update > /dev/null 2>&1; install; }; then
    echo "sshd: installed"
  else
    echo "sshd: not installed; apt-get failed"
  fi
fi
exit 0

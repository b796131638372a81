#!/bin/sh
# What torpor's tests, demo and UI test need from Debian: OpenSSH's server, chromium, venv, a compiler.
set -eu
needed=""
command -v sshd >/dev/null 2>&1 || [ -x /usr/sbin/sshd ] || needed="$needed openssh-server"
command -v chromium >/dev/null 2>&1 || needed="$needed chromium"
command -v gcc >/dev/null 2>&1 || needed="$needed gcc libc6-dev"
python3.11 -c 'import ensurepip' 2>/dev/null || needed="$needed python3.11-venv"
[ -n "$needed" ] || exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing:$needed"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # no services are started: torpor runs its own sshd on loopback
    apt-get install -y -qq --no-install-recommends $needed >/dev/null
else
    echo "missing, and only root can install it:$needed" >&2
    echo "the demo runs without openssh-server and chromium; the tests need them" >&2
fi

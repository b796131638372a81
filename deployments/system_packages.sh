#!/bin/sh
# Debian packages that torpor needs, beside Python's own. Installs what is missing where it may, as
# root with apt; elsewhere it says what is missing.
#   sh deployments/system_packages.sh demo    what `make demo` and `make up` need
#   sh deployments/system_packages.sh test    what `make test` needs as well: a browser, C++
#   sh deployments/system_packages.sh bench   what `make bench` needs as well: a peer
set -eu
python="${PYTHON:-python3.11}"

has() {
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ]
}

needed=""
has "$python" || needed="$needed python3.11"
"$python" -c 'import ensurepip' 2>/dev/null || needed="$needed python3.11-venv"
has gcc || needed="$needed gcc libc6-dev"
has sshd || needed="$needed openssh-server"
case "${1:-demo}" in
    test)
        has chromium || needed="$needed chromium"
        has g++ || needed="$needed g++"
        ;;
    bench) has restic || needed="$needed restic" ;;
esac
[ -n "$needed" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! has apt-get; then
    echo "missing, and only root can install it with apt:$needed" >&2
    echo "(the demo does without openssh-server and gcc: it has an SSH server of its own, and" >&2
    echo "snapshots are then encoded by plain Python, which is slower)" >&2
    exit 0
fi

echo "installing from Debian:$needed"
export DEBIAN_FRONTEND=noninteractive
# openssh-server would open port 22 of this host at once and at each boot. torpor runs the program
# itself, on loopback, so the service stays off.
policy=/usr/sbin/policy-rc.d
off=""
if ! has sshd && [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT INT TERM HUP
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    off=yes
fi
log="$(mktemp)"
# shellcheck disable=SC2086 # a list of names
if ! { apt-get update -q && apt-get install -y -q --no-install-recommends $needed; } \
    >"$log" 2>&1 </dev/null; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    echo "apt could not install:$needed" >&2
    exit 1
fi
rm -f "$log"
if [ -n "$off" ] && has systemctl; then
    systemctl --quiet disable ssh.service >/dev/null 2>&1 || true
fi

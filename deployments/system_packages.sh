#!/bin/sh
# Debian packages that torpor needs. Installs what is missing, as root with apt. For any other user
# it prints the command that root must run first, for every make target at once.
#   sh deployments/system_packages.sh demo    for `make demo` and `make up`
#   sh deployments/system_packages.sh test    for `make test` as well
#   sh deployments/system_packages.sh bench   for `make bench` as well
#   sh deployments/system_packages.sh campaign for `make campaign`, `make rentals` and `make jobs`
#   sh deployments/system_packages.sh oracles for the cluster and the distributions that `make oracles` asks
#   sh deployments/system_packages.sh python  prints the Python to use: the first of 3.11 or newer
set -eu

has() {
    command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ]
}

# Any Python from 3.11 on; first the one that the tests run with. Debian 12 calls 3.11 python3, Ubuntu
# 24.04 its 3.12, Debian 13 its 3.13.
python="${PYTHON:-}"
for one in python3.11 python3.12 python3.13 python3.14 python3; do
    [ -z "$python" ] || break
    "$one" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && python="$one"
done
[ "${1:-demo}" != python ] || { echo "${python:-python3}"; exit 0; }

# Without these nothing works.
basic=""
if [ -z "$python" ] || ! has "$python"; then
    basic="$basic python3 python3-venv"
elif ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    basic="$basic ${python##*/}-venv"
fi
# Without these torpor works: plain Python can encode snapshots.
better=""
has gcc && [ -e /usr/include/stdio.h ] || better="$better gcc libc6-dev"
# What a machine of the tests answers with.
machines=""
has sshd || machines=" openssh-server"
# The peers that `make bench` compares with.
peers=""
has restic || peers="$peers restic"
has lz4 || peers="$peers lz4"
tests="$peers$machines"
has chromium || tests="$tests chromium"
has g++ || tests="$tests g++"
has hledger || tests="$tests hledger"
has promtool || tests="$tests prometheus"
has pg_ctlcluster || tests="$tests postgresql"
# What a workspace of the tests has.
has git || tests="$tests git"
has setfacl || tests="$tests acl"
has setcap || tests="$tests libcap2-bin"
has rsync || tests="$tests rsync"
# What the programs of a Kubernetes cluster are started with.
oracles="$machines"
has openssl || oracles="$oracles openssl"
has curl || oracles="$oracles curl"
has xz || oracles="$oracles xz-utils"
has python3 || oracles="$oracles python3"
# The database of its Prefect server, and what fetches Prefect's chart.
has pg_ctlcluster || oracles="$oracles postgresql"
has git || oracles="$oracles git"
# What makes the roots of other distributions.
has debootstrap || oracles="$oracles debootstrap"

case "${1:-demo}" in
    demo) needed="$basic$better" ;;
    test) needed="$basic$better$tests" ;;
    bench) needed="$basic$better$peers" ;;
    campaign) needed="$basic$better$machines" ;;
    oracles) tests="$oracles" needed="$basic$oracles" ;;
    *) echo "usage: sh deployments/system_packages.sh demo|test|bench|campaign|oracles|python" >&2 && exit 2 ;;
esac
[ -n "$needed" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! has apt-get; then
    exec >&2
    echo "Programs are missing, and only root can install them. On Debian or Ubuntu, root runs:"
    echo
    echo "    apt-get update && apt-get install --no-install-recommends$basic$better$tests"
    echo
    [ -z "$basic" ] || echo "Nothing runs without:$basic."
    [ -z "$better" ] || echo "\`make demo\` and \`make up\` run without them, with slower snapshots:$better."
    [ -z "$tests" ] || echo "Only \`make test\` and \`make bench\` need:$tests."
    [ "${1:-demo}" = demo ] && [ -z "$basic" ] && exit 0
    exit 1
fi

echo "installing from Debian:$needed"
export DEBIAN_FRONTEND=noninteractive
# openssh-server, prometheus and postgresql would open ports of this host at once and at each boot. The tests run
# the programs themselves, so the services stay off.
policy=/usr/sbin/policy-rc.d
off=""
has sshd || off="$off ssh.service"
has promtool || off="$off prometheus.service"
has pg_ctlcluster || off="$off postgresql.service"
if [ -n "$off" ] && [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT INT TERM HUP
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
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
    # shellcheck disable=SC2086 # a list of names
    systemctl --quiet disable $off >/dev/null 2>&1 || true
fi

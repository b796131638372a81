#!/bin/sh
# Becomes a fake machine: a root of its own over this host's /usr and /etc, in which one command runs.
#   image.sh FOLDER ADDRESS PORT KIND PYTHON COMMAND...
# KIND: container (the command is its first process), bare (a container without Python and sshd),
# stale (the same, and one of its package lists cannot be read), conda (its own Python is too old and
# the first in PATH, apt has another one), libraries (bare, with libraries of its own that no program of
# the system can load), or vm (an sshd with keys of its own runs already, and the command once beside
# it). The caller gives it namespaces for mounts and processes; all that this mounts goes with them.
set -eu
folder=$1 address=$2 port=$3 kind=$4 python=$5
shift 5
mount -t tmpfs -o mode=755 tmpfs "$folder"
root=$folder/root
mkdir -p "$root" "$folder/layers"
for name in usr etc; do
    mkdir -p "$folder/layers/$name" "$folder/layers/$name.work" "$root/$name"
    mount -t overlay -o "lowerdir=/$name,upperdir=$folder/layers/$name,workdir=$folder/layers/$name.work" \
        overlay "$root/$name"
done
for name in bin sbin lib lib32 lib64 libx32; do
    if [ -L "/$name" ]; then
        ln -s "$(readlink "/$name")" "$root/$name"
    elif [ -d "/$name" ]; then
        mkdir "$root/$name" && mount --bind "/$name" "$root/$name"
    fi
done
cd "$root"
mkdir -p dev proc root run tmp var/tmp var/log var/lib home opt mnt
chmod 1777 tmp var/tmp
chmod 700 root
mount --rbind /dev dev
mount -t proc proc proc
# The image: no key of this host, a root account without a password, an sshd that asks nobody.
rm -rf etc/ssh etc/shadow- etc/gshadow-
mkdir -p etc/ssh/sshd_config.d
printf 'root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n' >etc/shadow
chmod 600 etc/shadow
grep -q '^sshd:' etc/passwd || echo 'sshd:x:74:65534::/run/sshd:/usr/sbin/nologin' >>etc/passwd
cat >etc/ssh/sshd_config <<CONFIG
Include /etc/ssh/sshd_config.d/*.conf
Port $port
ListenAddress $address
UsePAM no
UseDNS no
MaxStartups 100
Subsystem sftp internal-sftp
CONFIG
[ -e usr/bin/python3 ] || [ -e usr/local/bin/python3 ] || ln -s "$python" usr/local/bin/python3
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
environment=
case $kind in
bare | stale | conda | libraries) # apt brings back what the image lacks
    mkdir -p opt/packages/sbin opt/packages/bin
    [ "$kind" = conda ] || mv usr/sbin/sshd opt/packages/sbin/
    for program in usr/bin/python3* usr/local/bin/python3*; do
        [ ! -e "$program" ] && [ ! -L "$program" ] || mv "$program" opt/packages/bin/
    done
    cat >usr/bin/apt-get <<'APT'
#!/bin/sh
set -eu
[ -z "${LD_LIBRARY_PATH-}${LD_PRELOAD-}" ] || exit 9 # as the scripts of openssh-server do
for word in "$@"; do
    case $word in
    python3) mv /opt/packages/bin/* /usr/bin/ ;;
    openssh-server) mv /opt/packages/sbin/sshd /usr/sbin/ && mkdir -p /run/sshd ;;
    update) [ ! -e /opt/stale ] || exit 100 ;;
    esac
done
APT
    chmod 755 usr/bin/apt-get
    case $kind in
    stale) touch opt/stale ;;
    conda)
        mkdir -p opt/conda/bin
        printf '#!/bin/sh\nexit 1\n' >opt/conda/bin/python3 # what a check of its version ends with
        chmod 755 opt/conda/bin/python3
        path=/opt/conda/bin:$path
        ;;
    libraries)
        mkdir -p opt/image/lib
        for library in libcrypto.so.3 libpam.so.0 libselinux.so.1 libz.so.1; do
            echo "no library" >"opt/image/lib/$library"
        done
        environment=LD_LIBRARY_PATH=/opt/image/lib
        ;;
    esac
    ;;
vm) # systemd runs, sshd has the keys that the first boot made, and the GPU a driver
    mkdir -p run/systemd/system run/sshd
    printf '#!/bin/sh\n[ "$*" = -L ]\n' >usr/bin/nvidia-smi
    chmod 755 usr/bin/nvidia-smi
    ssh-keygen -q -t ed25519 -N '' -f etc/ssh/ssh_host_ed25519_key
    cat >usr/bin/systemctl <<'SYSTEMCTL'
#!/bin/sh
set -eu
case "$*" in
*restart*ssh*) ;;
*) exit 1 ;;
esac
wait_until() { # sshd goes on behind its own return, both when it starts and when it is told to end
    n=0
    until "$@"; do [ $((n += 1)) -lt 1000 ] || exit 1; sleep 0.02; done
}
if [ -s /run/sshd.pid ]; then
    old=$(cat /run/sshd.pid)
    kill "$old"
    wait_until [ ! -e "/proc/$old/exe" ] # not even as a zombie
    rm -f /run/sshd.pid
fi
mkdir -p /run/sshd
/usr/sbin/sshd
wait_until [ -s /run/sshd.pid ]
SYSTEMCTL
    chmod 755 usr/bin/systemctl
    chroot . /usr/bin/systemctl restart ssh
    ;;
esac
clean="env -i PATH=$path HOME=/root $environment CONTAINER_API_KEY=of-the-container"
set -- env "QUOTED=a \"b\" 'c' \\d #e \$f" "LINES=1
2=3" "$@"
if [ "$kind" = vm ]; then
    set -- sh -c '"$@" || echo "the start script failed with $?" >&2; exec sleep infinity' sh "$@"
fi
exec chroot . $clean "$@"

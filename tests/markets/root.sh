#!/bin/sh
# Becomes a machine whose root is a copy of a real distribution's, in which one command runs as root.
#   root.sh FOLDER ADDRESS PORT BASE KIND COMMAND...
# BASE: a directory that debootstrap made. KIND: bare; ready (sshd and Python are installed before);
# conda (a Python that is too old comes first in PATH); broken (one of apt's sources cannot be reached);
# or foreign (the image's user, home and libraries are its own program's).
# The caller gives it namespaces for mounts and processes; all that this mounts goes with them.
set -eu
folder=$1 address=$2 port=$3 base=$4 kind=$5
shift 5
mount -t tmpfs -o mode=755 tmpfs "$folder"
root=$folder/root
mkdir "$root" "$folder/changes" "$folder/work"
mount -t overlay -o "lowerdir=$base,upperdir=$folder/changes,workdir=$folder/work" overlay "$root"
cd "$root"
mount --rbind /dev dev
mount -t proc proc proc
# How this host reaches the archives.
cp -L /etc/resolv.conf /etc/hosts etc/
# As images of containers have it: packages start no service.
printf '#!/bin/sh\nexit 101\n' >usr/sbin/policy-rc.d
chmod 755 usr/sbin/policy-rc.d
mkdir -p etc/ssh/sshd_config.d
printf 'Port %s\nListenAddress %s\n' "$port" "$address" >etc/ssh/sshd_config.d/50-address.conf
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
environment=HOME=/root
case $kind in
ready)
    chroot . env -i "PATH=$path" DEBIAN_FRONTEND=noninteractive sh -c \
        'apt-get update && apt-get install -y --no-install-recommends python3 openssh-server'
    ;;
conda)
    mkdir -p opt/conda/bin
    printf '#!/bin/sh\nexit 1\n' >opt/conda/bin/python3 # what a check of its version ends with
    chmod 755 opt/conda/bin/python3
    path=/opt/conda/bin:$path
    ;;
broken) echo 'deb http://127.0.0.1:9/cuda ./' >etc/apt/sources.list.d/cuda.list ;;
foreign)
    mkdir -p opt/image/lib home/app
    for library in libcrypto.so.3 libpam.so.0 libselinux.so.1 libz.so.1; do
        echo "no library" >"opt/image/lib/$library"
    done
    environment="HOME=/home/app USER=app LD_LIBRARY_PATH=/opt/image/lib"
    ;;
esac
touch "$folder/begins" # the image is there: from now on a user waits
exec chroot . env -i "PATH=$path" $environment CONTAINER_API_KEY=of-the-container "$@"

#!/bin/sh
# Becomes a container: an image's root with the pod's volumes, in which one command runs.
#   pod.sh FOLDER ADDRESS PORT ROOT ro|rw [SOURCE:TARGET...] -- COMMAND...
# The caller gives it namespaces for mounts and processes; all that this mounts goes with them.
set -eu
root=$4 mode=$5
shift 5
mount --bind "$root" "$root"
while [ "$1" != -- ]; do
    target=$root$(chroot "$root" realpath -m "${1#*:}") # links of the image lead into it
    mkdir -p "$target"
    mount --bind "${1%%:*}" "$target"
    shift
done
shift
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
mount -o "remount,bind,$mode" "$root"
exec chroot "$root" "$@"

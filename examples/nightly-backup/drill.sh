#!/bin/sh
# A restore drill: the newest snapshot comes back to this host and is compared with what is on the
# machine now.
#   sh drill.sh WORKSPACE DIRECTORY          sh drill.sh notes '~/workspace'
# Ends with 0 where both are equal, with another status and the names where they differ.
set -eu
workspace=$1 directory=$2
drill=$(mktemp -d)
trap 'rm -rf "$drill"' EXIT
mkdir "$drill/stored" "$drill/there"
torpor restore "$workspace" "$directory" "$drill/stored"
torpor cp "$workspace:$directory" "$drill/there"
stored=$drill/stored/$(basename "$directory")
if diff -r "$stored" "$drill/there/$(basename "$directory")"; then
    echo "equal: $(find "$stored" -type f | wc -l) files of the newest snapshot and of the machine"
else
    echo "the newest snapshot of $workspace and its machine differ" >&2
    exit 1
fi

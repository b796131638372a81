"""What a rented machine runs first: it gets Python, sshd, our key and its host key.

Markets show this script in their consoles. The only secret in it is the host key of this rental.
"""

from __future__ import annotations

import base64
import re
from typing import Final

from torpor.control.providers.provider import Order
from torpor.shared.errors import InvalidInput

MOST_CHARACTERS: Final = 4048
"""Characters of the longest start command. Vast.ai states this limit for its own kind of start
script."""
_AROUND: Final = 48  # characters around the packed script in a command

_APART: Final = """: "${ld_path=${LD_LIBRARY_PATH-}}" "${ld_preload=${LD_PRELOAD-}}"
unset LD_LIBRARY_PATH LD_PRELOAD
"""
"""An image's libraries may break apt, sshd and what else is not its own (dstack #1769)."""

SSHD: Final = (
    _APART
    + r"""umask 077
{
    cat /etc/ssh/sshd_config.d/00-torpor.conf
    printf SetEnv
    env -0 ${ld_path:+"LD_LIBRARY_PATH=$ld_path"} ${ld_preload:+"LD_PRELOAD=$ld_preload"} |
        tr '\n\0' '\1\n' | LC_ALL=C sed -E '/\x01/d; /^[A-Za-z_][A-Za-z_0-9]*=/!d
/^(_|HOME|LOGNAME|MAIL|(OLD)?PWD|SHELL|SHLVL|SSH_.*|TERM|USER)=/d
s/[\\"]/\\&/g; s/.*/ "&"/' | tr -d '\n'
    echo
    echo 'Include /etc/ssh/sshd_config'
} >/etc/ssh/torpor.conf
umask 022
exec /usr/sbin/sshd -D -e -f /etc/ssh/torpor.conf
"""
)
"""How a container runs sshd, once the script has prepared it, with the script's settings before the
image's own. Sessions get the container's
environment, which may hold keys: only root reads the file."""

# torpor's own key file is outside of the home and readable by root alone. So root is let in after
# `chmod -R a+w ~`, for which sshd leaves a home's file out, and after `>` in the place of `>>`.
_SCRIPT: Final = """#!/bin/sh
set -eu
@APART@@FIRST@fits='import sys; sys.exit(sys.version_info < (3, 10))'
apt() {
    DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 "$@"
}
need=
python3 -I -c "$fits" 2>/dev/null || /usr/bin/python3 -I -c "$fits" 2>/dev/null || need=python3
[ -x /usr/sbin/sshd ] || need="$need openssh-server"
if [ -n "$need" ]; then
    apt update || echo 'not all package lists were read: going on with the others' >&2
    apt install -y --no-install-recommends $need || [ -x /usr/sbin/sshd ]
fi
umask 077
mkdir -p /root/.ssh
echo '@PUBLIC@' >/root/.ssh/authorized_keys
rm -f /etc/ssh/ssh_host_*
cat >/etc/ssh/ssh_host_ed25519_key <<'KEY'
@HOST@
KEY
mkdir -p -m 755 /run/sshd /etc/ssh/sshd_config.d
echo '@PUBLIC@' >/etc/ssh/torpor.keys
conf=/etc/ssh/sshd_config.d/00-torpor.conf
rm -f $conf
keys=$(/usr/sbin/sshd -T 2>/dev/null | sed -n 's/^authorizedkeysfile //p' | grep -v '^none$') ||
    keys='.ssh/authorized_keys .ssh/authorized_keys2'
cat >$conf <<CONFIG
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
AuthorizedKeysFile /etc/ssh/torpor.keys $keys
CONFIG
@MORE@if [ -d /run/systemd/system ]; then
    systemctl restart ssh || systemctl restart sshd
else
@SSHD@fi
"""

_END: Final = """TORPOR_END='import os, sys, urllib.request as web
told = {"Authorization": "Bearer " + os.environ[sys.argv[2]], "User-Agent": "torpor"}
web.urlopen(web.Request(sys.argv[1], method="DELETE", headers=told), timeout=60)'
(
    at=/var/tmp/torpor-end
    [ -s $at ] || echo $(($(date +%s) + @SECONDS@)) >$at
    while [ "$(date +%s)" -lt "$(cat $at)" ]; do sleep 5; done
    while :; do
        python3 -I -c "$TORPOR_END" @URL@ @KEY@ || :
        sleep 60
    done
) &
"""

_PUBLIC: Final = re.compile(r"[a-z0-9@.-]+ [A-Za-z0-9+/=]+(?: [\w@.:+-]*)?")
_PRIVATE: Final = re.compile(r"-----BEGIN [A-Z ]+-----\n[A-Za-z0-9+/=\n]+-----END [A-Z ]+-----")
_BARE: Final = re.compile(
    r"(?:^|/)(?:alpine|busybox|scratch|wolfi-base)(?=[:@]|$)"
    r"|(?:^|/)distroless/|[:-]alpine[\d.]*(?=[-@]|$)"
)
_OLD: Final = re.compile(
    r"ubuntu[:-]?(?:1\d|20)\.|ubuntu:(?:trusty|xenial|bionic|focal)"
    r"|debian:(?:[89]|1[01]|jessie|stretch|buster|bullseye)\b"
)


def start_script(order: Order, more: str = "", *, first: str = "") -> str:
    """For user data: cloud-init runs it as root, and sshd runs already. ``more``: lines that run
    before sshd has the new keys. ``first``: lines that run before all else, and may not fail."""
    public, host = order.public_key.strip(), order.host_key.strip()
    if not _PUBLIC.fullmatch(public):
        raise InvalidInput("the public key of an order is no OpenSSH public key line")
    if not _PRIVATE.fullmatch(host):
        raise InvalidInput("the host key of an order is no OpenSSH private key")
    script = _SCRIPT.replace("@PUBLIC@", public).replace("@HOST@", host)
    script = script.replace("@FIRST@", first).replace("@MORE@", more)
    return script.replace("@APART@", _APART).replace("@SSHD@", SSHD)


def start_command(order: Order, *, first: str = "") -> list[str]:
    """For a container: its first process. No word needs quotes beyond one pair. ``first`` is that
    of ``start_script``."""
    packed = _packed(start_script(order, first=first))
    return ["/bin/sh", "-c", f'eval "$(echo {packed} | base64 -d)"']


def end_lines(order: Order, url: str, key: str) -> str:
    """Lines for ``first``: after the order's lifetime, also if it was started again meanwhile, the
    machine sends a DELETE to ``url``, again each minute until it is gone. ``url``: a word of shell,
    which may name variables of the machine. ``key``: the variable with the login. None of it for an
    order without a lifetime."""
    if order.lifetime_s is None:
        return ""
    lines = _END.replace("@SECONDS@", f"{order.lifetime_s:.0f}")
    return lines.replace("@URL@", url).replace("@KEY@", key)


def start_lines(order: Order, more: str = "") -> list[str]:
    """For a virtual machine whose market takes lines of shell; none of them needs a quote. ``more``
    is that of ``start_script``."""
    return [
        "install -m 700 /dev/null /run/torpor-start",
        f"echo {_packed(start_script(order, more))} | base64 -d >/run/torpor-start",
        "sh /run/torpor-start",
    ]


def _packed(script: str) -> str:
    packed = base64.b64encode(script.encode()).decode()
    if len(packed) > MOST_CHARACTERS - _AROUND:
        raise InvalidInput(
            f"the start script has {len(packed)} characters, markets take {MOST_CHARACTERS}: use "
            "a shorter SSH key, such as an ed25519 key"
        )
    return packed


def check_image(image: str) -> None:
    """InvalidInput for an image of which the script cannot make a machine."""
    if not re.fullmatch(r"[A-Za-z0-9][\w./:@-]{0,1023}", image):
        raise InvalidInput(f"{image!r} is not the name of a container image")
    if _BARE.search(image):
        raise InvalidInput(
            f"image {image} has neither sshd nor apt to install it, or no glibc: choose an image "
            "that is built on Ubuntu 22.04, Debian 12 or newer"
        )
    if _OLD.search(image):
        raise InvalidInput(
            f"image {image} has no Python 3.10: choose one with Ubuntu 22.04, Debian 12 or newer"
        )

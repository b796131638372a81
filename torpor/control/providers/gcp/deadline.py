"""A machine of GCP that powers itself off when nobody has renewed its deadline.

Google changes the run time that it limits itself (``maxRunDuration``, ``terminationTime``) only
while a machine is off, so nobody could renew it. But it changes the metadata of a running machine,
and a machine that powers itself off costs its disk alone, which Google keeps. So the deadline is in
the metadata, and a program on the machine powers it off once the deadline was not changed for the
whole time. No clock of the machine is asked what day it is.
"""

from __future__ import annotations

import shlex
from typing import Final

DEADLINE_KEY: Final = "torpor-deadline"
_PATH: Final = f"/computeMetadata/v1/instance/attributes/{DEADLINE_KEY}"
_PAUSE_S: Final = 60

WATCHER: Final = '''\
"""Powers the machine off once its deadline was the same for the whole time. Each boot has the whole
time again. Neither a clock that is wrong nor a deadline that cannot be read powers it off."""
import http.client, subprocess, sys, time, urllib.request

url, length_s, pause_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
last, since_s = None, 0.0
while True:
    try:
        asked = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(asked, timeout=10) as answer:
            deadline = answer.read()
    except (OSError, http.client.HTTPException) as error:
        print(f"the deadline cannot be read, so the machine goes on: {error}", flush=True)
    else:
        if deadline != last:
            last, since_s = deadline, time.monotonic()
        elif time.monotonic() - since_s >= length_s:
            subprocess.run(["poweroff"], check=False)
    time.sleep(pause_s)
'''

_START: Final = """\
cat >/usr/local/sbin/torpor-deadline <<'WATCHER'
@WATCHER@WATCHER
set -- python3 -I /usr/local/sbin/torpor-deadline @ARGUMENTS@
if [ -d /run/systemd/system ]; then
    systemd-run --collect --unit torpor-deadline "$@"
else
    setsid "$@" </dev/null >/dev/null 2>&1 &
fi
"""


def start_watcher(metadata_url: str, length_s: float) -> str:
    """Lines of a start script."""
    arguments = shlex.join([metadata_url + _PATH, f"{length_s:.0f}", str(_PAUSE_S)])
    return _START.replace("@WATCHER@", WATCHER).replace("@ARGUMENTS@", arguments)

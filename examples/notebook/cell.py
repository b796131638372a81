"""Runs one cell in the kernel whose connection file is kernel.json, and prints what it says.

    python3 cell.py 'x = 6 * 7'

This is what a notebook's page does, without a browser: the kernel is the same.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jupyter_client.blocking import BlockingKernelClient

WITHIN_S = 120.0


def main(code: str) -> None:
    client = BlockingKernelClient(connection_file=str(Path(__file__).with_name("kernel.json")))
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=WITHIN_S)
        reply = client.execute_interactive(code, timeout=WITHIN_S)
    finally:
        client.stop_channels()
    if reply["content"]["status"] != "ok":
        sys.exit(1)  # the traceback is printed


if __name__ == "__main__":
    main(sys.argv[1])

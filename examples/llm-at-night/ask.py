"""Asks the server at a port of this host for a completion, and prints it.

python3 ask.py 8080 'Once upon a time'
"""

from __future__ import annotations

import json
import sys
from http.client import HTTPConnection

WITHIN_S = 120.0


def main(port: str, prompt: str) -> None:
    asked = json.dumps({"prompt": prompt, "max_tokens": 16, "temperature": 0}).encode()
    server = HTTPConnection("127.0.0.1", int(port), timeout=WITHIN_S)
    server.request("POST", "/v1/completions", asked, {"Content-Type": "application/json"})
    answer = server.getresponse()
    said = json.load(answer)
    if answer.status != 200:
        sys.exit(f"the server says {answer.status}: {said}")
    print(f"{said['usage']['completion_tokens']} tokens: {said['choices'][0]['text']!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])

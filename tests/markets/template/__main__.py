"""Begin a market: copy this template to where the files of a market are.

python -m tests.markets.template NAME
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).parent
_FILES: Final = {
    "adapter.py": "torpor/control/providers/{name}.py",
    "block.py": "blocks/{name}_provider.py",
    "fake.py": "tests/markets/{name}.py",
    "contract.py": "tests/control/providers/test_{name}.py",
}
_WORDS: Final = {
    "from tests.markets.template import adapter": "from torpor.control.providers import {name}",
    "adapter.": "{name}.",
    "tests.markets.template.{name}.": "torpor.control.providers.{name}.",
    "tests.markets.template.adapter": "torpor.control.providers.{name}",
    "Example": "{title}",
    "example": "{name}",
}


def begin(name: str, root: Path) -> list[Path]:
    """The files of the market, made below ``root``, which has none of them yet."""
    if not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise ValueError(f"{name!r} is no name of a market: use small letters and digits")
    made = {root / there.format(name=name): here for here, there in _FILES.items()}
    if found := [path for path in made if path.exists()]:
        raise FileExistsError(f"{found[0]} is there already: nothing was written")
    for path, here in made.items():
        text = (_HERE / here).read_text()
        for old, new in _WORDS.items():
            text = text.replace(old, new.format(name=name, title=name.capitalize()))
        path.write_text(text)
    return list(made)


if __name__ == "__main__":
    print(*begin(*sys.argv[1:2], Path.cwd()), sep="\n")

"""What `from flows import ...` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

from deployments.installation import CHECKOUT

_ASKS = """
import sys
import flows
from flows import wake, list_snapshots
assert "flows.deploy" not in sys.modules and "flows.benchmark" not in sys.modules
import flows.hibernate
assert (flows.wake.name, flows.hibernate.name) == ("wake", "hibernate")
assert callable(list_snapshots)
assert all(hasattr(flows, name) for name in flows.__all__)
"""


def test_a_name_is_its_flow_and_no_other_flow_is_imported_for_it() -> None:
    subprocess.run([sys.executable, "-c", _ASKS], cwd=CHECKOUT, check=True)

"""The use cases: order, retries and state of each; one file a flow.

from flows import hibernate, wake
"""

from flows.create import create
from flows.hibernate import hibernate
from flows.listing import list_machines, list_snapshots
from flows.wake import wake

__all__ = ["create", "hibernate", "list_machines", "list_snapshots", "wake"]

"""The leases of concurrency slots at our own Prefect server: files, which outlive the server.

A flow run renews its lease every 225 s, for 300 s, and Prefect cancels a run whose lease is over.
So a server that was away for a minute would, once it is back, end runs that only wait to renew.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final
from uuid import UUID

from prefect.server.concurrency.lease_storage import ConcurrencyLimitLeaseMetadata, filesystem
from prefect.server.utilities.leasing import ResourceLease

LEAST: Final = timedelta(minutes=30)
"""The least time of a lease: 225 s, and the 20 minutes for which a run asks a server that is away.
It delays nobody who waits for the slot of a lost run, because torpor ends such a run and so its
lease (deployments/lost_runs.py)."""


class ConcurrencyLeaseStorage(filesystem.ConcurrencyLeaseStorage):
    """The storage of leases; Prefect finds the class by this name."""

    async def create_lease(
        self,
        resource_ids: list[UUID],
        ttl: timedelta,
        metadata: ConcurrencyLimitLeaseMetadata | None = None,
    ) -> ResourceLease[ConcurrencyLimitLeaseMetadata]:
        return await super().create_lease(resource_ids, max(ttl, LEAST), metadata)

    async def renew_lease(self, lease_id: UUID, ttl: timedelta) -> bool:
        return await super().renew_lease(lease_id, max(ttl, LEAST))

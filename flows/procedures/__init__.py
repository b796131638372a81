"""What several flows share: the steps of a snapshot, a restore, a fleet, a job."""

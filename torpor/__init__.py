"""The torpor engine: snapshots of workspaces, free of Prefect."""

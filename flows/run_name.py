"""What a run of a flow is called in the UI."""

from __future__ import annotations

from prefect.runtime import flow_run


def run_name() -> str:
    """``hibernate-mywork``: the flow, and the workspace that it is given."""
    workspace = flow_run.parameters.get("workspace")
    return f"{flow_run.flow_name}-{getattr(workspace, 'name', workspace)}"

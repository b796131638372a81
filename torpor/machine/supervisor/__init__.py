"""The supervisor: a job's command on the machine, apart from the agent and all connections."""

"""The supervisor: the parent of a job's command on the machine, apart from the agent and all
connections; and the autosave process."""

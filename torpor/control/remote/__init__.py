"""The control side's way to a machine: SSH, the agent's bundle, and a session with the agent."""

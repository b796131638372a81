"""The agent's protocol, as both sides use it."""

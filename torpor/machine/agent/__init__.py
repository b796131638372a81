"""The agent: torpor's program on the rented machine."""

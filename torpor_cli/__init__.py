"""The command `torpor`: the flows, from a terminal."""

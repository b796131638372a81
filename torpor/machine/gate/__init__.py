"""The gate: a command that starts before its files are there waits for each file that it opens."""

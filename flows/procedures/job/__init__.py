"""The procedures of a job: how it moves from machine to machine."""

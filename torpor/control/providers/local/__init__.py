"""Machines that are folders of this host, with an SSH server each."""

"""The program of ours that runs on the machine."""

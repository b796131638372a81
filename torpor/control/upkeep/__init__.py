"""What happens to snapshots later: retention, pins, comparison, deletion, prune, verify."""

"""The rest of a snapshot's life on the control side: kept, pinned, compared, deleted, pruned."""

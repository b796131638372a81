"""One side effect each: typed in and out, retried on their own, no bytes through them."""

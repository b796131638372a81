"""Jobs: their records in the store, and what becomes of them."""

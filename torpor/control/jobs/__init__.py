"""Jobs: their records in the store, and the decisions about them."""

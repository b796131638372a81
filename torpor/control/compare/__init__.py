"""Where to rent: the offers of all markets side by side, and which one for which use."""

"""The first, cheapest rental at a market: what its adapter assumes against what is seen."""

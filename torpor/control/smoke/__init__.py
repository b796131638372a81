"""The first, cheapest rental at a market, which compares what its adapter assumes with what is
seen."""

"""The target "peak": finds the plans of graphs, and chooses among them for a peak."""

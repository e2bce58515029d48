"""The target "peak": plans of a graph, and the choice among those of all graphs."""

"""What people read about plans: of one graph, and of a step."""

"""Which items to save: asks a knapsack solver, and picks among what it may answer."""

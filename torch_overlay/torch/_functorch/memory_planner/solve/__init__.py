"""Which items to save: asks a knapsack solver, and breaks ties among its answers."""

"""Which items to save: asks a knapsack solver, and picks among its possible answers."""

"""What a joint graph is to a planner: operators, storages, costs, and bytes that are live."""

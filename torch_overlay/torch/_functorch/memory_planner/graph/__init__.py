"""A planner's view of a joint graph: operators, storages, costs and live bytes."""

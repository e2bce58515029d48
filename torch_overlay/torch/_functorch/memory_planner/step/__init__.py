"""A StepBudget: the calls of a training step, recorded, planned and compiled."""

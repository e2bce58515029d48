"""What each pull request changes, on five models: one module per topic."""

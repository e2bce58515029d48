"""What each pull request changes, on five models or more: one module per topic."""

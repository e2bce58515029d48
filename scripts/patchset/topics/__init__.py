"""One module per topic, each with its ``PATCH``; ``..series`` puts them in order."""

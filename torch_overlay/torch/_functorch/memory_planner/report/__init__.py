"""Readable reports of plans: of one graph, and of a step."""

"""The target "saved": a bound for the bytes that a forward leaves for its backward."""

"""The target "saved": a bound on the bytes that a forward leaves for its backward."""

"""The benchmarks, a module each, and what they share; scripts/benchmark.sh runs them."""

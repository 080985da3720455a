"""Benchmarks, one folder a question; docs and results/README.md say which command answers what."""

"""Benchmarks side by side: ``python -m tests.benchmarks NAME``.

Each starts what it needs, runs the systems in turn, and prints medians and ratios to what plain SQL
does on the same server. ``docs/explanation/performance.md`` tells how, and why so.
"""

"""Chaos: real workers on a real server, struck at random; then their history is proved right.

``python -m tests.chaos --help`` tells how to run it. ``stage`` starts the processes, ``faults``
strikes them, ``recording`` has each of them log what it asks of the database and what it is told,
``history`` gathers what they logged, and ``checker`` judges it.
"""

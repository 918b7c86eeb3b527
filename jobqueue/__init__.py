"""A job queue in the project's own database whose state changes are fenced."""

__version__ = "0.1.0"

"""PostgreSQL loses its primary; a standby takes over."""

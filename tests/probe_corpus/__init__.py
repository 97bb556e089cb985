"""Planted faults and sound models, as users bring them: what the self-test must tell apart."""

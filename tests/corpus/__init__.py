"""Faults and sound models, as users bring them: what `ab.check` and every door must tell apart."""

"""Races against the hand-written loop and its peers: config, raw results, report, thresholds."""

"""Tests: the folders mirror src; laws, parity and faults stand beside them."""

"""Measuring Medusa against its peers: engines side by side, runs alternated, one JSON (design section 13)."""

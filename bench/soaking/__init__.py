"""Minutes of traffic on one server, and whether it grows by it; run by bench/soak.py."""

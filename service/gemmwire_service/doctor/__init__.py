"""`gemmwire-serve check`: what this host has and lacks, and what each backend really does on it.

Needs torch, and none of the server's packages.
"""

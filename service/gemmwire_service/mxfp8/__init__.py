"""The MXFP8 number format: blocks of 32 E4M3 elements along K under one E8M0 scale."""

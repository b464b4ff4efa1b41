"""What MXFP8 and other precisions cost two small real models; run by bench/accuracy.py."""

"""gemmwire-serve quantize: a float model as an MXFP8 checkpoint that vLLM, SGLang and gemmwire load.

outline.py says what is written, tensor by tensor; shards.py divides them among files; declaration.py is the
config that goes with it; folder.py makes the whole appear at once; command.py is the command line.
"""

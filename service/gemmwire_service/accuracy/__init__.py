"""gemmwire-serve accuracy: what MXFP8 costs each layer of a checkpoint, before anyone serves it.

source.py reads a layer as stored and as quantized; tile.py cuts the two into pieces that are looked at
together; weight.py, inputs.py and output.py say what is measured of a piece; verdict.py is the rule;
report.py, page.py and table.py are what people and programs read; command.py is the command line.
"""

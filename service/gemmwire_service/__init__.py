"""The gemmwire server: MXFP8 linear layers behind the Open Inference Protocol."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gemmwire")
except PackageNotFoundError:  # a source tree on PYTHONPATH
    __version__ = "0+unknown"

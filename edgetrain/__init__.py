"""edgetrain: train one PyTorch model on many small machines over slow links."""

__version__ = "0.1.0"

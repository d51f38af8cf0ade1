"""Weight formats and what they cost in precision; sees tensors only.

drift      how far one model's next-token laws are from another's
formats    weight formats by the word a recipe uses
int8       INT8 weights per output channel, INT8 activations per token
linear     linear maps over plain and quantised weights
smoothing  factors that move outlier channels from activations to weights
"""

__all__ = ["drift", "formats", "int8", "linear", "smoothing"]

"""Smaller models. Importing this package also lets transformers load the models that it has made smaller."""

from acclimate.compress.low_rank_linear import LowRankLinear, export_dense, lora_config
from acclimate.compress.whitening import CompressionReport, ShiftAwareCompressor, compress_low_rank

__all__ = [
    "CompressionReport",
    "LowRankLinear",
    "ShiftAwareCompressor",
    "compress_low_rank",
    "export_dense",
    "lora_config",
]

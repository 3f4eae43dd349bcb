"""Smaller models. Importing this package also lets transformers load the models that it has made smaller."""

from acclimate.compress.low_rank_linear import LowRankLinear, export_dense, lora_config
from acclimate.compress.projq import QuantizationReport, quantize_projq
from acclimate.compress.quant_linear import QuantLinear
from acclimate.compress.quantized_formats import dequantize_and_merge, load_quantized, save_quantized
from acclimate.compress.whitening import CompressionReport, ShiftAwareCompressor, compress_low_rank

__all__ = [
    "CompressionReport",
    "LowRankLinear",
    "QuantLinear",
    "QuantizationReport",
    "ShiftAwareCompressor",
    "compress_low_rank",
    "dequantize_and_merge",
    "export_dense",
    "load_quantized",
    "lora_config",
    "quantize_projq",
    "save_quantized",
]

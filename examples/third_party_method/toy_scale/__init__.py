"""The table row of the toy method. It imports no torch, so that `acclimate methods` stays quick."""

from acclimate.methods import Method

METHOD = Method(
    name="toy-scale",
    job="trains one positive scale for each output of a linear layer",
    stage="adapter",
    module="toy_scale.tuner:ToyScaleConfig",
    option="--adapter toy-scale",
    status="ready",
)

"""Where the change to a model lives: our tuners and initialisations for PEFT.

Importing this package registers every tuner of ours with PEFT, so that `get_peft_model`, `save_pretrained` and
`PeftModel.from_pretrained` know them; no file of peft is changed.
"""

from acclimate.adapters.bayesian_lora import BayesianLoraConfig as BayesianLoraConfig
from acclimate.adapters.frame import FrameFTConfig as FrameFTConfig

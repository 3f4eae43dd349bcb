"""Plug a tuner into PEFT from outside.

PEFT's `register_peft_method` only takes names that are in the enum `PeftType`, which is closed. `register_tuner` adds
the missing member to the enum in memory and then registers in PEFT's own way, so that `get_peft_model`,
`save_pretrained`, `PeftModel.from_pretrained` and `PeftConfig.from_pretrained` treat the tuner as one of theirs.
"""

from __future__ import annotations

import peft
from packaging.version import Version
from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTuner

from acclimate.errors import MissingError

MINIMUM_PEFT = "0.21.2"  # the oldest release in which the hooks below, and those of BaseTuner, have been tested


class PeftTooOldError(MissingError, ImportError):
    """The installed peft lacks the registration hooks. An ImportError, since it surfaces while a tuner is imported."""


def register_tuner(name: str, config_cls: type[PeftConfig], model_cls: type[BaseTuner], prefix: str) -> PeftType:
    """Make PEFT know a tuner as `PeftType(name.upper())`; returns that member. Doing it twice is harmless.

    `name` is lower-case (letters, digits, underscores). `prefix` is what every adapter parameter's name starts with
    and must equal `model_cls.prefix`: PEFT finds the weights to save by it.

    Raises ValueError when the name belongs to another tuner or `prefix` is taken or does not fit, and
    PeftTooOldError (an ImportError) with the minimum version when peft is too old.
    """
    _require_hooks()
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils import register_peft_method

    key = name.upper()
    if key in PeftType.__members__:
        member = PeftType[key]
        if (
            PEFT_TYPE_TO_CONFIG_MAPPING.get(member) is config_cls
            and PEFT_TYPE_TO_TUNER_MAPPING.get(member) is model_cls
        ):
            return member
        owner = PEFT_TYPE_TO_CONFIG_MAPPING.get(member)
        held_by = "peft itself" if owner is None else f"{owner.__module__}.{owner.__qualname__}"
        raise ValueError(
            f"the PEFT method name '{name}' belongs to {held_by}; it is not overwritten. Choose another name"
        )
    if prefix in PEFT_TYPE_TO_PREFIX_MAPPING.values():
        raise ValueError(f"the parameter prefix '{prefix}' belongs to another PEFT method. Choose another prefix")
    member = _add_member(key)
    try:
        register_peft_method(name=name, config_cls=config_cls, model_cls=model_cls, prefix=prefix)
    except (KeyError, ValueError) as error:
        _remove_member(key)
        raise ValueError(f"peft refuses the tuner '{name}': {error.args[0]}") from error
    return member


def _require_hooks() -> None:
    if Version(peft.__version__) < Version(MINIMUM_PEFT):
        raise PeftTooOldError(
            f"peft {peft.__version__} cannot take tuners from outside; acclimate's adapters need peft>={MINIMUM_PEFT}. "
            f"Update it with: pip install 'peft>={MINIMUM_PEFT}'"
        )


def _add_member(key: str) -> PeftType:
    member = str.__new__(PeftType, key)
    member._name_ = key
    member._value_ = key
    PeftType._member_map_[key] = member
    PeftType._member_names_.append(key)
    PeftType._value2member_map_[key] = member
    # Some Python versions resolve PeftType.KEY from the map above, others need the class attribute; the enum's own
    # __setattr__ forbids setting it.
    if not hasattr(PeftType, key):
        type.__setattr__(PeftType, key, member)
    return member


def _remove_member(key: str) -> None:
    del PeftType._member_map_[key]
    PeftType._member_names_.remove(key)
    del PeftType._value2member_map_[key]
    if key in vars(PeftType):
        type.__delattr__(PeftType, key)

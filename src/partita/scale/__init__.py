"""How sharp: policies that turn the number of visible keys into a multiplier of the scores.

    policy(visible, dim) -> scale per row          policy.fold(query, visible) -> query * scale

n is the number of keys the row may *see*, never the padded length. All but `TargetEntropy` depend on n and dim alone,
so they fold into the query of any attention kernel. sigma is the standard deviation of the raw scores <query, key> over
a row's keys: sqrt(dim) for vectors of unit variance, or what `measure_sigma` finds.
"""

from partita.scale.policies import (
    Constant,
    CriticalScale,
    InverseSqrt,
    KappaLog,
    Llama4Temperature,
    LogLength,
    MaxLength,
    Mixed,
    Policy,
    ScalableSoftmax,
    SqrtLogLength,
    TargetEntropy,
    YarnTemperature,
    from_temperature,
)
from partita.scale.relevant import BestFor, BestScale, best_for
from partita.scale.sigma import CalibratedLog, GaussianEntropy, critical_scale, measure_sigma

__all__ = [
    "BestFor", "BestScale", "CalibratedLog", "Constant", "CriticalScale", "GaussianEntropy", "InverseSqrt", "KappaLog",
    "Llama4Temperature", "LogLength", "MaxLength", "Mixed", "Policy", "ScalableSoftmax", "SqrtLogLength",
    "TargetEntropy", "YarnTemperature", "best_for", "critical_scale", "from_temperature", "measure_sigma",
]  # fmt: skip

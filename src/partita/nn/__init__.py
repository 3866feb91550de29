"""Modules: they hold parameters and settings, and call the faces."""

from partita.nn.attention import EntropyInvariantAttention, MultiheadAttention, entropy_loss
from partita.nn.controller import TemperatureController
from partita.nn.losses import (
    BrierLoss,
    ClipLoss,
    CrossEntropyLoss,
    DistillationLoss,
    FocalLoss,
    InfoNCELoss,
    LinearCrossEntropyLoss,
    MAELoss,
    MSELoss,
    NCELoss,
    NTXentLoss,
    SigLipLoss,
    SupConLoss,
)
from partita.nn.qk_clip import qk_clip_
from partita.nn.transformer import TransformerDecoderLayer, TransformerEncoderLayer, init_sharpness_
from partita.scale import ScalableSoftmax

__all__ = [
    "BrierLoss", "ClipLoss", "CrossEntropyLoss", "DistillationLoss", "EntropyInvariantAttention", "FocalLoss",
    "InfoNCELoss", "LinearCrossEntropyLoss", "MAELoss", "MSELoss", "MultiheadAttention", "NCELoss", "NTXentLoss",
    "ScalableSoftmax", "SigLipLoss", "SupConLoss", "TemperatureController", "TransformerDecoderLayer",
    "TransformerEncoderLayer", "entropy_loss", "init_sharpness_", "qk_clip_",
]  # fmt: skip
